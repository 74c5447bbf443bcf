// What the tile instructions compute, in plain C++: it judges the processor before tiles are used,
// and stands in for it where HR_AMX_EMULATED is defined, in tests on other machines.
//
// Shapes as in tiles.h: a row has 64 bytes, of which `num_quads` dwords count.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

namespace {

constexpr unsigned kTileMxcsr = 0x9fc0;  // to nearest even, flush to zero, denormals are zero

inline float widened(uint16_t bf16_value) {
    const uint32_t bits = (uint32_t)bf16_value << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

// Not inlined, so that nothing of it moves out from between the changes of MXCSR.
__attribute__((noinline)) void model_bf16_sums(const uint16_t (*a)[32], const uint16_t (*b)[32],
                                               float (*c)[16], int num_rows, int num_quads) {
    for (int m = 0; m < num_rows; ++m) {
        float even[16] = {}, odd[16] = {};
        for (int k = 0; k < num_quads; ++k) {
            const float first = widened(a[m][2 * k]), second = widened(a[m][2 * k + 1]);
            for (int n = 0; n < 16; ++n) {
                even[n] = __builtin_fmaf(first, widened(b[k][2 * n]), even[n]);
                odd[n] = __builtin_fmaf(second, widened(b[k][2 * n + 1]), odd[n]);
            }
        }
        for (int n = 0; n < 16; ++n) c[m][n] = c[m][n] + (even[n] + odd[n]);
    }
}

// tdpbf16ps: c[m][n] += e + o, chains of fused multiply-adds over even and odd k from +0. It heeds
// no MXCSR.
inline void model_bf16(const uint16_t (*a)[32], const uint16_t (*b)[32], float (*c)[16],
                       int num_rows, int num_quads) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(kTileMxcsr);
    model_bf16_sums(a, b, c, num_rows, num_quads);
    _mm_setcsr(before);
}

// tdpbssd: c[m][n] += the sum over k of signed a and b, modulo 2^32.
inline void model_int8(const int8_t (*a)[64], const int8_t (*b)[64], int32_t (*c)[16],
                       int num_rows, int num_quads) {
    for (int m = 0; m < num_rows; ++m)
        for (int n = 0; n < 16; ++n) {
            uint32_t sum = (uint32_t)c[m][n];
            for (int k = 0; k < num_quads; ++k)
                for (int i = 0; i < 4; ++i)
                    sum += (uint32_t)((int32_t)a[m][4 * k + i] * (int32_t)b[k][4 * n + i]);
            c[m][n] = (int32_t)sum;
        }
}

}  // namespace
