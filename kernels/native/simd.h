// Vectors of floats for the instruction set that the including file is compiled for.
//
// The including file defines HR_LANES (8 or 16), HR_HAS_BF16 (products of bf16 by vdpbf16ps) and,
// where they are there, HR_HAS_VNNI (integer dot products) and HR_HAS_AMX (tiles).
// Everything is static, so that no function compiled for one instruction set is shared with
// another.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif
#include <stdint.h>
#include <string.h>

namespace {

typedef uint16_t bf16;

struct f16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
    const uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

}  // namespace

#if defined(__aarch64__)
#include "simd_neon.h"
#else

namespace {

// Into all caches. Not the intrinsic: gcc removes calls of functions that do nothing else.
inline void prefetch(const void* line) {
    asm volatile("prefetcht0 %0" : : "m"(*(const char*)line));
}

// Into the second-level cache: the first one has places for few lines on their way, which a stream
// from memory that is read once would fill.
inline void prefetch_far(const void* line) {
    asm volatile("prefetcht1 %0" : : "m"(*(const char*)line));
}

inline unsigned arithmetic_mode() { return _mm_getcsr(); }
inline void set_arithmetic_mode(unsigned mode) { _mm_setcsr(mode); }
constexpr unsigned kFlushDenormals = 0x8040;  // MXCSR: flush to zero, denormals are zero

inline float to_float(f16 value) { return _cvtsh_ss(value.bits); }
inline f16 to_f16(float value) { return {_cvtss_sh(value, 0)}; }  // to nearest even

#if HR_LANES == 16

typedef __m512 Vec;
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b if either is not a number
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec round_to_int(Vec a) { return _mm512_roundscale_ps(a, 0); }
inline Vec zero_below(Vec v, Vec x, Vec limit) {  // 0 where x < limit
    return _mm512_mask_mov_ps(v, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), _mm512_setzero_ps());
}
inline uint32_t at_least(Vec x, Vec limit) {  // bit i: lane i of x is not below that of limit
    return _mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ);
}
inline uint32_t above(Vec x, Vec limit) {
    return _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ);
}
inline uint32_t unordered(Vec a, Vec b) {  // bit i: lane i of one of them is not a number
    return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
}
inline Vec excluded_below(Vec x, Vec limit) {  // -Inf where x < limit
    return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ),
                              _mm512_set1_ps(-__builtin_inff()));
}
inline Vec times_power_of_two(Vec v, Vec n) {  // n integral, -126 ... 127
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtps_epi32(n), 23);
    return _mm512_mul_ps(v, _mm512_castsi512_ps(
        _mm512_add_epi32(bits, _mm512_set1_epi32(127 << 23))));
}
inline Vec wide(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline Vec load(const bf16* p) { return wide(_mm256_loadu_si256((const __m256i*)p)); }
inline __m256i narrow(Vec v) {  // to nearest even; not-a-number stays one
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}
inline void store(bf16* p, Vec v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
inline Vec load(const f16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
inline void store(f16* p, Vec v) {  // to nearest even, from 65520 on to Inf
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline void store(int8_t* p, Vec v) {  // to nearest even, between -128 and 127
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
inline float sum(Vec v) {
    const __m256 low = _mm512_castps512_ps256(v);
    const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    const __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

// Writes the lanes that the bits name one after the other, and anything up to HR_LANES floats.
inline void store_lanes(float* p, Vec v, uint32_t lanes) {
    _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)lanes, v));
}

typedef __m512d Doubles;  // half as many as floats
inline Doubles add(Doubles a, Doubles b) { return _mm512_add_pd(a, b); }
inline void store(double* p, Doubles v) { _mm512_storeu_pd(p, v); }
inline Doubles low_half(Vec v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
inline Doubles high_half(Vec v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }

typedef __m512i Words;  // of 32 bits, unsigned
inline Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline void store_words(uint32_t* p, Words w) { _mm512_storeu_si512(p, w); }
inline Words splat_word(uint32_t w) { return _mm512_set1_epi32((int)w); }
inline Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
inline Words exclusive_or(Words a, Words b, Words c) {
    return _mm512_ternarylogic_epi32(a, b, c, 0x96);
}
// Pairs of words are numbers of 64 bits, low word first.
inline Words multiply_low(Words a, Words b) { return _mm512_mul_epu32(a, b); }  // their low words
inline Words high_words(Words a) { return _mm512_srli_epi64(a, 32); }
inline Words low_words(Words a, Words b) {  // a's first in each pair
    return _mm512_mask_mov_epi32(a, 0xaaaa, _mm512_slli_epi64(b, 32));
}
inline Words even_pairs(Words a, Words b) { return _mm512_unpacklo_epi64(a, b); }  // in turn
inline Words odd_pairs(Words a, Words b) { return _mm512_unpackhi_epi64(a, b); }
inline Vec upper_halves(Words w) {  // (2^32 - 1 - w) / 2, as floats
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_xor_si512(w, _mm512_set1_epi32(-1)), 1));
}
inline Vec power_of_two_above(Vec x) {  // 2^x <= result < 1.07 * 2^x, for x in -126 ... 127
    const Vec scaled = _mm512_fmadd_ps(x, _mm512_set1_ps(0x1p23f), _mm512_set1_ps(127 * 0x1p23f));
    return _mm512_castsi512_ps(_mm512_cvtps_epi32(scaled));
}

#else

typedef __m256 Vec;
inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec splat(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b if either is not a number
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec round_to_int(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | 8); }
inline Vec zero_below(Vec v, Vec x, Vec limit) {  // 0 where x < limit
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), v);
}
inline uint32_t at_least(Vec x, Vec limit) {  // bit i: lane i of x is not below that of limit
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_GE_OQ));
}
inline uint32_t above(Vec x, Vec limit) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_GT_OQ));
}
inline uint32_t unordered(Vec a, Vec b) {  // bit i: lane i of one of them is not a number
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q));
}
inline Vec excluded_below(Vec x, Vec limit) {  // -Inf where x < limit
    return _mm256_blendv_ps(x, _mm256_set1_ps(-__builtin_inff()),
                            _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}
inline Vec times_power_of_two(Vec v, Vec n) {  // n integral, -126 ... 127
    const __m256i bits = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    return _mm256_mul_ps(v, _mm256_castsi256_ps(
        _mm256_add_epi32(bits, _mm256_set1_epi32(127 << 23))));
}
inline Vec wide(__m128i halves) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Vec load(const bf16* p) { return wide(_mm_loadu_si128((const __m128i*)p)); }
inline __m128i narrow(Vec v) {  // to nearest even; not-a-number stays one
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256i chosen = _mm256_castps_si256(
        _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(quiet), is_nan));
    const __m256i halves = _mm256_srli_epi32(chosen, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
inline void store(bf16* p, Vec v) { _mm_storeu_si128((__m128i*)p, narrow(v)); }
inline Vec load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store(f16* p, Vec v) {  // to nearest even, from 65520 on to Inf
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline void store(int8_t* p, Vec v) {  // to nearest even, between -128 and 127
    const __m256i words = _mm256_cvtps_epi32(v);
    const __m128i halves =
        _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
}
inline float sum(Vec v) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

// Writes the lanes that the bits name one after the other, and anything up to HR_LANES floats.
inline void store_lanes(float* p, Vec v, uint32_t lanes) {
    float all[HR_LANES];
    _mm256_storeu_ps(all, v);
    for (; lanes != 0; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
}

typedef __m256d Doubles;  // half as many as floats
inline Doubles add(Doubles a, Doubles b) { return _mm256_add_pd(a, b); }
inline void store(double* p, Doubles v) { _mm256_storeu_pd(p, v); }
inline Doubles low_half(Vec v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
inline Doubles high_half(Vec v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }

typedef __m256i Words;  // of 32 bits, unsigned
inline Words load_words(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_words(uint32_t* p, Words w) { _mm256_storeu_si256((__m256i*)p, w); }
inline Words splat_word(uint32_t w) { return _mm256_set1_epi32((int)w); }
inline Words add(Words a, Words b) { return _mm256_add_epi32(a, b); }
inline Words exclusive_or(Words a, Words b, Words c) {
    return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}
// Pairs of words are numbers of 64 bits, low word first.
inline Words multiply_low(Words a, Words b) { return _mm256_mul_epu32(a, b); }  // their low words
inline Words high_words(Words a) { return _mm256_srli_epi64(a, 32); }
inline Words low_words(Words a, Words b) {  // a's first in each pair
    return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xaa);
}
inline Words even_pairs(Words a, Words b) { return _mm256_unpacklo_epi64(a, b); }  // in turn
inline Words odd_pairs(Words a, Words b) { return _mm256_unpackhi_epi64(a, b); }
inline Vec upper_halves(Words w) {  // (2^32 - 1 - w) / 2, as floats
    return _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_xor_si256(w, _mm256_set1_epi32(-1)), 1));
}
inline Vec power_of_two_above(Vec x) {  // 2^x <= result < 1.07 * 2^x, for x in -126 ... 127
    const Vec scaled = _mm256_fmadd_ps(x, _mm256_set1_ps(0x1p23f), _mm256_set1_ps(127 * 0x1p23f));
    return _mm256_castsi256_ps(_mm256_cvtps_epi32(scaled));
}

#endif

}  // namespace

#endif

namespace {

// The first n of HR_LANES elements; the others are 0. The same arithmetic serves tails.
template <typename T>
inline Vec load_some(const T* p, int64_t n) {
    if (n >= HR_LANES) return load(p);
    T padded[HR_LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load(padded);
}

// The first n of HR_LANES scores; the others are excluded.
inline Vec load_scores(const float* scores, int64_t n) {
    if (n >= HR_LANES) return load(scores);
    float padded[HR_LANES];
    store(padded, splat(-__builtin_inff()));
    memcpy(padded, scores, n * sizeof(float));
    return load(padded);
}

template <typename T>
inline void store_some(T* p, Vec v, int64_t n) {
    if (n >= HR_LANES) {
        store(p, v);
        return;
    }
    T padded[HR_LANES];
    store(padded, v);
    memcpy(p, padded, n * sizeof(T));
}

inline float largest(Vec v) {  // of the numbers; those that are none are passed over
    float lanes[HR_LANES];
    store(lanes, v);
    float most = lanes[0];
    for (int i = 1; i < HR_LANES; ++i) most = lanes[i] > most ? lanes[i] : most;
    return most;
}

// While it lives, denormals are numbers to this thread, which the pool's do not take them for.
class DenormalsKept {
  public:
    DenormalsKept() : before_(arithmetic_mode()) {
        set_arithmetic_mode(before_ & ~kFlushDenormals);
    }
    ~DenormalsKept() { set_arithmetic_mode(before_); }

  private:
    const decltype(arithmetic_mode()) before_;
};

constexpr float kLeastExponent = -87.3f;

// e^x with about one unit in the last place; exactly 1 at 0, 0 below -87.3, finite above 88.
// Cody-Waite reduction by ln 2 in two parts, then the Taylor polynomial of degree 7.
inline Vec exponential(Vec x) {
    const Vec low = splat(kLeastExponent);
    const Vec bounded = max(low, min(splat(88.0f), x));
    const Vec n = round_to_int(mul(bounded, splat(1.44269504f)));
    Vec r = fma(n, splat(-0.693359375f), bounded);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.0f / 5040.0f);
    p = fma(p, r, splat(1.0f / 720.0f));
    p = fma(p, r, splat(1.0f / 120.0f));
    p = fma(p, r, splat(1.0f / 24.0f));
    p = fma(p, r, splat(1.0f / 6.0f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    return zero_below(times_power_of_two(p, n), x, low);
}

// An upper bound of e^x, up to rounding, that is too large by at most 7 %: between powers of two it
// goes straight.
inline Vec exponential_above(Vec x) {
    return power_of_two_above(mul(max(x, splat(kLeastExponent)), splat(1.44269504f)));
}

inline Vec silu(Vec x) { return div(x, add(splat(1.0f), exponential(sub(splat(0.0f), x)))); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
    const Vec cube = mul(mul(x, x), x);
    const Vec u = mul(splat(0.7978845608f), fma(splat(0.044715f), cube, x));
    return div(x, add(splat(1.0f), exponential(mul(splat(-2.0f), u))));
}

inline Vec tanh_of(Vec x) {
    const Vec e = exponential(mul(splat(-2.0f), x));
    return div(sub(splat(1.0f), e), add(splat(1.0f), e));
}

}  // namespace
