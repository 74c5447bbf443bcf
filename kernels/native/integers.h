// Vectors of bytes and their dot products, for the instruction set of the including file.
//
// A vector holds 4 bytes for each of HR_LANES lanes. A file that may use vpdpbusd on vectors of 64
// bytes defines HR_HAS_VNNI as 1, one that may use sdot HR_HAS_DOTPROD.
#pragma once

#if defined(__aarch64__)
#include "integers_neon.h"
#else
#include "simd.h"
#endif

#ifndef HR_HAS_VNNI
#define HR_HAS_VNNI 0
#endif
#ifndef HR_HAS_DOTPROD
#define HR_HAS_DOTPROD 0
#endif

namespace {

#if !defined(__aarch64__)
#if HR_LANES == 16

typedef __m512i Ints;
inline Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline void store_ints(void* p, Ints a) { _mm512_storeu_si512(p, a); }
inline Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
inline Ints splat_byte(int x) { return _mm512_set1_epi8((char)x); }
inline Ints bits_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bits_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints sub_bytes(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
template <int kBits>
inline Ints shifted_left(Ints a) {  // within 32 bits
    return _mm512_slli_epi32(a, kBits);
}
template <int kBits>
inline Ints shifted_right(Ints a) {
    return _mm512_srli_epi32(a, kBits);
}
inline Vec to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
inline Vec load_halves(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline Vec load_unsigned_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Vec load_signed_bytes(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

#else

typedef __m256i Ints;
inline Ints load_ints(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_ints(void* p, Ints a) { _mm256_storeu_si256((__m256i*)p, a); }
inline Ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }
inline Ints splat_byte(int x) { return _mm256_set1_epi8((char)x); }
inline Ints bits_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints bits_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints sub_bytes(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
template <int kBits>
inline Ints shifted_left(Ints a) {  // within 32 bits
    return _mm256_slli_epi32(a, kBits);
}
template <int kBits>
inline Ints shifted_right(Ints a) {
    return _mm256_srli_epi32(a, kBits);
}
inline Vec to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
inline Vec load_halves(const uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
inline Vec load_unsigned_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline Vec load_signed_bytes(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

#endif
#endif

// Sums of products of unsigned codes of kBits bits with signed bytes, not below -127: per lane, over
// the 4 bytes of up to 8 steps, from `start` - exact, without saturation. With 8 bits a code means
// code - 128 where kIsCentred, so that `start` needs nothing for it.
#if HR_HAS_VNNI

template <int kBits>
struct Dot {
    static constexpr bool kIsCentred = false;
    Ints total;

    template <int kStep>
    void add(Ints codes, Ints x) {
        total = _mm512_dpbusd_epi32(total, codes, x);
    }
};

#elif HR_HAS_DOTPROD

template <int kBits>
struct Dot {  // of bytes with signs: what is not centred is below 128
    static constexpr bool kIsCentred = kBits == 8;
    Ints total;

    template <int kStep>
    void add(Ints codes, Ints x) {
        if (kBits == 8) codes = centred(codes);
        total = {vdotq_s32(total.low, bytes_of(codes.low), bytes_of(x.low)),
                 vdotq_s32(total.high, bytes_of(codes.high), bytes_of(x.high))};
    }
};

#else

#if !defined(__aarch64__)
#if HR_LANES == 16
inline Ints pair_sums(Ints codes, Ints x) { return _mm512_maddubs_epi16(codes, x); }
inline Ints add_pairs(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
inline Ints add_joined_pairs(Ints total, Ints pairs) {
    return _mm512_add_epi32(total, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
inline Ints centred(Ints codes) { return _mm512_xor_si512(codes, _mm512_set1_epi8((char)0x80)); }
inline Ints signed_pair_sums(Ints weights, Ints x) {
    const __mmask64 signs = _mm512_movepi8_mask(weights);
    return pair_sums(_mm512_abs_epi8(weights),
                     _mm512_mask_sub_epi8(x, signs, _mm512_setzero_si512(), x));
}
#else
inline Ints pair_sums(Ints codes, Ints x) { return _mm256_maddubs_epi16(codes, x); }
inline Ints add_pairs(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
inline Ints add_joined_pairs(Ints total, Ints pairs) {
    return _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints centred(Ints codes) { return _mm256_xor_si256(codes, _mm256_set1_epi8((char)0x80)); }
inline Ints signed_pair_sums(Ints weights, Ints x) {
    return pair_sums(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
}
#endif
#endif

template <int kBits>
struct Dot {
    static constexpr bool kIsCentred = kBits == 8;
    // Two products, summed over as many steps, fit in 16 bits: (2^bits - 1) * 127 * 2 * steps; of
    // 8 bits with sign, 128 * 127 * 2.
    static constexpr int kSteps = kBits == 4 ? 8 : kBits == 5 ? 4 : kBits == 6 ? 2 : 1;
    Ints total, pairs;

    template <int kStep>
    void add(Ints codes, Ints x) {
        const Ints sums = kBits == 8 ? signed_pair_sums(centred(codes), x) : pair_sums(codes, x);
        pairs = kStep % kSteps == 0 ? sums : add_pairs(pairs, sums);
        if (kStep % kSteps == kSteps - 1) total = add_joined_pairs(total, pairs);
    }
};

#endif

}  // namespace
