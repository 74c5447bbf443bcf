// Activations in 8 bits: rows of a product's input, quantized per token in blocks of 32 inputs.
#pragma once

#include "integers.h"

namespace {

constexpr int kQuantizedInputs = 32;

// 32 inputs of one row, the ones beyond its end being 0:
//   scale = m / 127, m being the largest magnitude; codes = x * (127 / m) to nearest even.
// Below 2^-100 m counts as 0: scale and codes are 0. If an input is not finite, the scale is not a
// number and the codes are 0.
struct alignas(64) QuantizedBlock {
    int8_t codes[kQuantizedInputs];
    float scale;
    float scaled_sum;            // scale * (sum of the codes), one rounding
    int32_t minus_sums[3];       // of the codes: times 2^3, 2^4 and 2^7
    int32_t minus_half_sums[2];  // of the first and the last 16: times 2^5
    int32_t unused[1];

    // -(sum of the codes) * 2^kOffsetBits: what the offset of a format's codes adds to a dot. Of all
    // 32, or of one half.
    template <int kOffsetBits, int kPart>
    int32_t offset_sum() const {
        static_assert(kOffsetBits == 3 || kOffsetBits == 4 || kOffsetBits == 5 || kOffsetBits == 7,
                      "the offsets that formats have");
        if constexpr (kOffsetBits == 5) return minus_half_sums[kPart];
        return minus_sums[kOffsetBits == 7 ? 2 : kOffsetBits - 3];
    }
};

inline int64_t num_quantized_blocks(int64_t num_inputs) {
    return (num_inputs + kQuantizedInputs - 1) / kQuantizedInputs;
}

#if !defined(__aarch64__)

inline uint32_t largest_magnitude_bits(const Vec (&x)[kQuantizedInputs / HR_LANES]) {
#if HR_LANES == 16
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    return _mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(x[0]), mask),
                         _mm512_and_si512(_mm512_castps_si512(x[1]), mask)));
#else
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i most = _mm256_setzero_si256();
    for (const Vec& each : x)
        most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(each), mask));
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(four);
#endif
}

// Rounded to nearest even, 16 at a time; |x| <= 127.
typedef __m128i Codes;
inline Codes narrow_codes(const Vec* x) {
#if HR_LANES == 16
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x[0]));
#else
    const __m256i pairs = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(x[0]), _mm256_cvtps_epi32(x[1])), 0xd8);
    return _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
#endif
}

inline void store_codes(int8_t* p, Codes codes) { _mm_store_si128((__m128i*)p, codes); }

inline int32_t sum_of_bytes(Codes codes) {
    // Sums of unsigned bytes, to which 128 was added 16 times.
    const __m128i halves =
        _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8((char)0x80)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(halves) + _mm_extract_epi32(halves, 2) - 16 * 128;
}

#endif

inline void quantize_block(const Vec (&x)[kQuantizedInputs / HR_LANES], QuantizedBlock& out) {
    constexpr int kHalf = 16 / HR_LANES;  // vectors of 16 inputs
    const uint32_t bits = largest_magnitude_bits(x);
    float most;
    memcpy(&most, &bits, 4);
    if (bits >= 0x7f800000 || most < 0x1p-100f) {
        memset(&out, 0, sizeof out);
        if (bits >= 0x7f800000) out.scale = out.scaled_sum = __builtin_nanf("");
        return;
    }
    const Vec inverse = splat(127.0f / most);
    Vec scaled[2 * kHalf];
    for (int i = 0; i < 2 * kHalf; ++i) scaled[i] = mul(x[i], inverse);
    int32_t sums[2];
    for (int half = 0; half < 2; ++half) {
        const Codes codes = narrow_codes(scaled + half * kHalf);
        store_codes(out.codes + 16 * half, codes);
        sums[half] = sum_of_bytes(codes);
        out.minus_half_sums[half] = -sums[half] * 32;
    }
    const int32_t sum = sums[0] + sums[1];
    out.minus_sums[0] = -sum * 8;
    out.minus_sums[1] = -sum * 16;
    out.minus_sums[2] = -sum * 128;
    out.scale = most / 127.0f;
    out.scaled_sum = out.scale * (float)sum;
}

// A row of `size` inputs of format E into `num_quantized_blocks(size)` blocks.
template <typename E>
inline void quantize_row(const E* x, int64_t size, QuantizedBlock* out) {
    constexpr int kVectors = kQuantizedInputs / HR_LANES;
    for (int64_t start = 0; start < size; start += kQuantizedInputs, ++out) {
        Vec block[kVectors];
        for (int i = 0; i < kVectors; ++i) {
            const int64_t rest = size - start - i * HR_LANES;
            block[i] = rest <= 0 ? splat(0.0f) : load_some(x + start + i * HR_LANES, rest);
        }
        quantize_block(block, *out);
    }
}

}  // namespace
