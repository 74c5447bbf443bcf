// A part of simd.h: its vectors in the NEON of any 64-bit Arm processor, 8 lanes in two registers.
//
// The 32 registers are 16 such pairs, as many as AVX2 has, so that what the kernels keep in registers
// for 8 lanes fits here, too. Nothing but the sign of a NaN and one rule of the processor differs
// from AVX2's bits: what is below the smallest normal number is flushed before it is rounded, and
// there after.
#pragma once

namespace {

// Into all caches. Not the builtin: gcc may remove calls of functions that do nothing else.
inline void prefetch(const void* line) {
    asm volatile("prfm pldl1keep, %0" : : "Q"(*(const char*)line));
}

inline void prefetch_far(const void* line) {  // into the second-level cache
    asm volatile("prfm pldl2keep, %0" : : "Q"(*(const char*)line));
}

inline float to_float(f16 value) {
    __fp16 half;
    memcpy(&half, &value.bits, 2);
    return (float)half;
}
inline f16 to_f16(float value) {  // to nearest even
    const __fp16 half = (__fp16)value;
    f16 bits;
    memcpy(&bits.bits, &half, 2);
    return bits;
}

struct Vec {
    float32x4_t low, high;
};

// Bits of 32 per lane: comparisons, and floats taken as what they are made of.
struct Lanes {
    uint32x4_t low, high;
};

inline Lanes bits_of(Vec v) {
    return {vreinterpretq_u32_f32(v.low), vreinterpretq_u32_f32(v.high)};
}
inline Lanes is_below(Vec a, Vec b) { return {vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }
inline Vec where(Lanes mask, Vec yes, Vec no) {
    return {vbslq_f32(mask.low, yes.low, no.low), vbslq_f32(mask.high, yes.high, no.high)};
}
// Bit i: lane i is set.
inline uint32_t mask_bits(Lanes mask) {
    constexpr uint32_t kLow[4] = {1, 2, 4, 8}, kHigh[4] = {16, 32, 64, 128};
    return vaddvq_u32(vorrq_u32(vandq_u32(mask.low, vld1q_u32(kLow)),
                                vandq_u32(mask.high, vld1q_u32(kHigh))));
}

inline Vec load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store(float* p, Vec v) {
    vst1q_f32(p, v.low);
    vst1q_f32(p + 4, v.high);
}
inline Vec splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline Vec add(Vec a, Vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline Vec fma(Vec a, Vec b, Vec c) {
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
inline Vec max(Vec a, Vec b) { return where(is_below(b, a), a, b); }  // b if either is not a number
inline Vec min(Vec a, Vec b) { return where(is_below(a, b), a, b); }
inline Vec round_to_int(Vec a) { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }
inline Vec zero_below(Vec v, Vec x, Vec limit) {  // 0 where x < limit
    return where(is_below(x, limit), splat(0.0f), v);
}
inline uint32_t at_least(Vec x, Vec limit) {  // bit i: lane i of x is not below that of limit
    return mask_bits({vcgeq_f32(x.low, limit.low), vcgeq_f32(x.high, limit.high)});
}
inline uint32_t above(Vec x, Vec limit) {
    return mask_bits({vcgtq_f32(x.low, limit.low), vcgtq_f32(x.high, limit.high)});
}
inline uint32_t unordered(Vec a, Vec b) {  // bit i: lane i of one of them is not a number
    const auto are_numbers = [](float32x4_t a, float32x4_t b) {
        return vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b));
    };
    return mask_bits({vmvnq_u32(are_numbers(a.low, b.low)), vmvnq_u32(are_numbers(a.high, b.high))});
}
inline Vec excluded_below(Vec x, Vec limit) {  // -Inf where x < limit
    return where(is_below(x, limit), splat(-__builtin_inff()), x);
}
inline Vec chosen(uint32_t bits, Vec v, Vec other) {  // lane i of `v` where bit i is set
    constexpr uint32_t kLow[4] = {1, 2, 4, 8}, kHigh[4] = {16, 32, 64, 128};
    const uint32x4_t set = vdupq_n_u32(bits);
    return where({vtstq_u32(set, vld1q_u32(kLow)), vtstq_u32(set, vld1q_u32(kHigh))}, v, other);
}
inline Vec times_power_of_two(Vec v, Vec n) {  // n integral, -126 ... 127
    const auto power = [](float32x4_t n) {
        const int32x4_t biased = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
        return vreinterpretq_f32_s32(vshlq_n_s32(biased, 23));
    };
    return mul(v, {power(n.low), power(n.high)});
}

inline Vec load(const bf16* p) {
    const uint16x8_t halves = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
}
inline void store(bf16* p, Vec v) {  // to nearest even; not-a-number stays one
    const auto narrow = [](float32x4_t v) {
        const uint32x4_t bits = vreinterpretq_u32_f32(v);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t up = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
        return vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), up, quiet), 16);
    };
    vst1q_u16(p, vcombine_u16(narrow(v.low), narrow(v.high)));
}
// Pairs of bf16, as floats: the first of each, and the second.
inline Vec low_halves(const bf16* p) {
    const auto widened = [](const bf16* p) {
        return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(p)), 16));
    };
    return {widened(p), widened(p + 8)};
}
inline Vec high_halves(const bf16* p) {
    const auto widened = [](const bf16* p) {
        const uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(p));
        return vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000)));
    };
    return {widened(p), widened(p + 8)};
}

// The instructions for halves are in every 64-bit Arm processor; sums of them are not.
inline Vec load_f16(const uint16_t* p) {
    const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
inline Vec load(const f16* p) { return load_f16(&p->bits); }
inline void store(f16* p, Vec v) {  // to nearest even, from 65520 on to Inf
    const float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(v.low), v.high);
    vst1q_u16(&p->bits, vreinterpretq_u16_f16(halves));
}

inline Vec to_floats(int16x8_t words) {
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_high_s16(words))};
}
inline Vec load(const int8_t* p) { return to_floats(vmovl_s8(vld1_s8(p))); }
inline void store(int8_t* p, Vec v) {  // to nearest even, between -128 and 127
    const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(v.low));
    vst1_s8(p, vqmovn_s16(vqmovn_high_s32(low, vcvtnq_s32_f32(v.high))));
}

inline float sum(Vec v) {
    const float32x4_t four = vaddq_f32(v.low, v.high);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
// The largest lane; none of them is NaN.
inline float top(Vec v) { return vmaxvq_f32(vmaxq_f32(v.low, v.high)); }

typedef Lanes Words;  // of 32 bits, unsigned
inline Words load_words(const uint32_t* p) { return {vld1q_u32(p), vld1q_u32(p + 4)}; }
inline void store_words(uint32_t* p, Words w) {
    vst1q_u32(p, w.low);
    vst1q_u32(p + 4, w.high);
}
inline Words splat_word(uint32_t w) { return {vdupq_n_u32(w), vdupq_n_u32(w)}; }
inline Words add(Words a, Words b) { return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)}; }
inline Words exclusive_or(Words a, Words b, Words c) {
    return {veorq_u32(veorq_u32(a.low, b.low), c.low), veorq_u32(veorq_u32(a.high, b.high), c.high)};
}
// Pairs of words are numbers of 64 bits, low word first.
inline uint64x2_t pairs_of(uint32x4_t words) { return vreinterpretq_u64_u32(words); }
inline uint32x4_t words_of(uint64x2_t pairs) { return vreinterpretq_u32_u64(pairs); }
inline Words multiply_low(Words a, Words b) {  // their low words
    const auto product = [](uint32x4_t a, uint32x4_t b) {
        return words_of(vmull_u32(vmovn_u64(pairs_of(a)), vmovn_u64(pairs_of(b))));
    };
    return {product(a.low, b.low), product(a.high, b.high)};
}
inline Words high_words(Words a) {
    return {words_of(vshrq_n_u64(pairs_of(a.low), 32)), words_of(vshrq_n_u64(pairs_of(a.high), 32))};
}
inline Words low_words(Words a, Words b) {  // a's first in each pair
    return {words_of(vsliq_n_u64(pairs_of(a.low), pairs_of(b.low), 32)),
            words_of(vsliq_n_u64(pairs_of(a.high), pairs_of(b.high), 32))};
}
inline Words even_pairs(Words a, Words b) {  // in turn
    return {words_of(vzip1q_u64(pairs_of(a.low), pairs_of(b.low))),
            words_of(vzip1q_u64(pairs_of(a.high), pairs_of(b.high)))};
}
inline Words odd_pairs(Words a, Words b) {
    return {words_of(vzip2q_u64(pairs_of(a.low), pairs_of(b.low))),
            words_of(vzip2q_u64(pairs_of(a.high), pairs_of(b.high)))};
}
inline Vec upper_halves(Words w) {  // (2^32 - 1 - w) / 2, as floats
    const auto half = [](uint32x4_t w) {
        return vcvtq_f32_s32(vreinterpretq_s32_u32(vshrq_n_u32(vmvnq_u32(w), 1)));
    };
    return {half(w.low), half(w.high)};
}
inline Vec power_of_two_above(Vec x) {  // 2^x <= result < 1.07 * 2^x, for x in -126 ... 127
    const Vec scaled = fma(x, splat(0x1p23f), splat(127 * 0x1p23f));
    return {vreinterpretq_f32_s32(vcvtnq_s32_f32(scaled.low)),
            vreinterpretq_f32_s32(vcvtnq_s32_f32(scaled.high))};
}

// Writes the lanes that the bits name one after the other, and anything up to HR_LANES floats.
inline void store_lanes(float* p, Vec v, uint32_t lanes) {
    float all[HR_LANES];
    store(all, v);
    for (; lanes != 0; lanes &= lanes - 1) *p++ = all[__builtin_ctz(lanes)];
}

struct Doubles {  // half as many as floats
    float64x2_t low, high;
};
inline Doubles add(Doubles a, Doubles b) {
    return {vaddq_f64(a.low, b.low), vaddq_f64(a.high, b.high)};
}
inline void store(double* p, Doubles v) {
    vst1q_f64(p, v.low);
    vst1q_f64(p + 2, v.high);
}
inline Doubles widened(float32x4_t v) {
    return {vcvt_f64_f32(vget_low_f32(v)), vcvt_high_f64_f32(v)};
}
inline Doubles low_half(Vec v) { return widened(v.low); }
inline Doubles high_half(Vec v) { return widened(v.high); }

inline uint64_t arithmetic_mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
inline void set_arithmetic_mode(uint64_t mode) {
    asm volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
constexpr uint64_t kFlushDenormals = 1u << 24;

}  // namespace
