// Parts of integers.h and quantize_rows.h in NEON.
#pragma once

#include "simd.h"

namespace {

struct Ints {
    int32x4_t low, high;
};

inline int8x16_t bytes_of(int32x4_t a) { return vreinterpretq_s8_s32(a); }

inline Ints load_ints(const void* p) {
    const uint8_t* bytes = (const uint8_t*)p;
    return {vreinterpretq_s32_u8(vld1q_u8(bytes)), vreinterpretq_s32_u8(vld1q_u8(bytes + 16))};
}
inline void store_ints(void* p, Ints a) {
    uint8_t* bytes = (uint8_t*)p;
    vst1q_u8(bytes, vreinterpretq_u8_s32(a.low));
    vst1q_u8(bytes + 16, vreinterpretq_u8_s32(a.high));
}
inline Ints splat_int(int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
inline Ints splat_byte(int x) { return splat_int((int32_t)(0x01010101u * (uint8_t)x)); }
inline Ints bits_and(Ints a, Ints b) { return {vandq_s32(a.low, b.low), vandq_s32(a.high, b.high)}; }
inline Ints sub_bytes(Ints a, Ints b) {
    const auto difference = [](int32x4_t a, int32x4_t b) {
        return vreinterpretq_s32_s8(vsubq_s8(bytes_of(a), bytes_of(b)));
    };
    return {difference(a.low, b.low), difference(a.high, b.high)};
}
inline Ints bits_or(Ints a, Ints b) { return {vorrq_s32(a.low, b.low), vorrq_s32(a.high, b.high)}; }
template <int kBits>
inline Ints shifted_left(Ints a) {  // within 32 bits
    return {vshlq_n_s32(a.low, kBits), vshlq_n_s32(a.high, kBits)};
}
template <int kBits>
inline Ints shifted_right(Ints a) {
    if constexpr (kBits == 0) return a;  // no number for the instruction
    const auto shifted = [](int32x4_t a) {
        constexpr int kShift = kBits == 0 ? 1 : kBits;
        return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), kShift));
    };
    return {shifted(a.low), shifted(a.high)};
}
inline Vec to_floats(Ints a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
inline Vec load_halves(const uint8_t* p) { return load_f16((const uint16_t*)p); }
inline Vec load_unsigned_bytes(const uint8_t* p) {
    return to_floats(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p))));
}
inline Vec load_signed_bytes(const uint8_t* p) { return load((const int8_t*)p); }

inline Ints centred(Ints codes) {
    const Ints offset = splat_byte(0x80);
    return {veorq_s32(codes.low, offset.low), veorq_s32(codes.high, offset.high)};
}

inline int16x8_t words_of(int32x4_t a) { return vreinterpretq_s16_s32(a); }

inline Ints pair_sums(Ints codes, Ints x) {  // in 16 bits
    const auto sums = [](int8x16_t a, int8x16_t b) {
        return vreinterpretq_s32_s16(vpaddq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)),
                                                vmull_high_s8(a, b)));
    };
    return {sums(bytes_of(codes.low), bytes_of(x.low)),
            sums(bytes_of(codes.high), bytes_of(x.high))};
}
inline Ints signed_pair_sums(Ints weights, Ints x) { return pair_sums(weights, x); }
inline Ints add_pairs(Ints a, Ints b) {
    return {vreinterpretq_s32_s16(vaddq_s16(words_of(a.low), words_of(b.low))),
            vreinterpretq_s32_s16(vaddq_s16(words_of(a.high), words_of(b.high)))};
}
inline Ints add_joined_pairs(Ints total, Ints pairs) {
    return {vpadalq_s16(total.low, words_of(pairs.low)),
            vpadalq_s16(total.high, words_of(pairs.high))};
}

// Of quantize_rows.h.

inline uint32_t largest_magnitude_bits(const Vec (&x)[4]) {
    const auto magnitudes = [](float32x4_t v) { return vreinterpretq_u32_f32(vabsq_f32(v)); };
    uint32x4_t most = vdupq_n_u32(0);
    for (const Vec& each : x)
        most = vmaxq_u32(most, vmaxq_u32(magnitudes(each.low), magnitudes(each.high)));
    return vmaxvq_u32(most);
}

typedef int8x16_t Codes;
inline Codes narrow_codes(const Vec* x) {
    const auto narrow = [](Vec v) {
        return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(v.low)), vcvtnq_s32_f32(v.high));
    };
    return vqmovn_high_s16(vqmovn_s16(narrow(x[0])), narrow(x[1]));
}
inline void store_codes(int8_t* p, Codes codes) { vst1q_s8(p, codes); }
inline int32_t sum_of_bytes(Codes codes) { return vaddlvq_s8(codes); }

}  // namespace
