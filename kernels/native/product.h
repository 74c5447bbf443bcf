// Matrix products with packed weights: c[r][n] = sum over k of x[r][k] * w[n][k].
//
// Packed layout, in blocks of 32 rows: [num_blocks][pairs of k][32 rows][2], zero where the matrix
// ends and to a multiple of 32 k. One dword holds two neighbouring k of one row, which is what the
// bf16 instructions take, and 16 pairs of 16 rows are a tile of AMX.
//
// Order of the sums (numerics rule N1), the same for every number of rows:
// - HR_HAS_BF16: one chain of vdpbf16ps over ascending pairs, from +0;
// - otherwise, per 32 k: e and o are fused-multiply-add chains over even and odd k from +0, then
//   c = c + (e + o). This is also what AMX's tdpbf16ps does.
#pragma once

#include "simd.h"

namespace {

constexpr int kBlockRows = 32;
constexpr int kMaxRows = 6;       // of x, multiplied together
constexpr int kPrefetchBytes = 2048;

inline int64_t block_size(int64_t num_inputs) {  // elements of one block of 32 rows
    return (num_inputs + 31) / 32 * 32 * kBlockRows;
}

inline uint32_t pair_at(const bf16* x, int64_t k, int64_t num_inputs) {
    if (k + 1 >= num_inputs) return x[k];
    uint32_t pair;
    memcpy(&pair, x + k, 4);
    return pair;
}

#if HR_HAS_BF16

// R rows of x times B blocks, which lie `block` elements apart; c is [R][B * 32] floats.
template <int R, int B>
inline void multiply(const bf16* x, int64_t x_stride, const bf16* w, int64_t block,
                     int64_t num_inputs, float* c, int64_t c_stride) {
    constexpr int kVectors = 2 * B;
    __m512 sums[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sums[r][v] = _mm512_setzero_ps();
    const int64_t whole = num_inputs & ~(int64_t)1;
    int64_t k = 0;
    const auto step = [&](auto pair_of) __attribute__((always_inline)) {
        __m512i weights[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            const bf16* line = w + (v / 2) * block + k * kBlockRows + (v % 2) * 32;
            if (R <= 4) prefetch((const char*)line + kPrefetchBytes);
            weights[v] = _mm512_loadu_si512(line);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512i pair = _mm512_set1_epi32(pair_of(x + r * x_stride));
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)pair, (__m512bh)weights[v]);
        }
    };
    for (; k < whole; k += 2)
        step([&](const bf16* row) {
            int32_t pair;
            memcpy(&pair, row + k, 4);
            return pair;
        });
    if (k < num_inputs) step([&](const bf16* row) { return (int32_t)row[k]; });
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) store(c + r * c_stride + v * 16, sums[r][v]);
}

// `rows` rows of x, at most kMaxRows.
template <int B>
inline void multiply_rows(int rows, const bf16* x, int64_t x_stride, const bf16* w, int64_t block,
                          int64_t num_inputs, float* c, int64_t c_stride) {
    switch (rows) {
        case 1: return multiply<1, B>(x, x_stride, w, block, num_inputs, c, c_stride);
        case 2: return multiply<2, B>(x, x_stride, w, block, num_inputs, c, c_stride);
        case 3: return multiply<3, B>(x, x_stride, w, block, num_inputs, c, c_stride);
        case 4: return multiply<4, B>(x, x_stride, w, block, num_inputs, c, c_stride);
        case 5: return multiply<5, B>(x, x_stride, w, block, num_inputs, c, c_stride);
        default: return multiply<6, B>(x, x_stride, w, block, num_inputs, c, c_stride);
    }
}

#else

#if HR_LANES == 16
inline Vec low_halves(const bf16* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
inline Vec high_halves(const bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
}
#else
inline Vec low_halves(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
inline Vec high_halves(const bf16* p) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p),
                                                _mm256_set1_epi32((int)0xffff0000)));
}
#endif

// R rows of x times 2 vectors of one block, over 32 k at most; adds to c.
template <int R>
inline void multiply_chunk(const bf16* x, int64_t x_stride, const bf16* w, int64_t from, int64_t to,
                           int64_t num_inputs, float* c, int64_t c_stride) {
    Vec even[R][2], odd[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) even[r][v] = odd[r][v] = splat(0.0f);
    for (int64_t k = from; k < to; k += 2) {
        Vec low[2], high[2];
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) {
            const bf16* line = w + k * kBlockRows + v * 2 * HR_LANES;
            if (R == 1) prefetch((const char*)line + kPrefetchBytes);
            low[v] = low_halves(line);
            high[v] = high_halves(line);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const uint32_t pair = pair_at(x + r * x_stride, k, num_inputs);
            const Vec first = splat(to_float((bf16)pair));
            const Vec second = splat(to_float((bf16)(pair >> 16)));
#pragma GCC unroll 16
            for (int v = 0; v < 2; ++v) {
                even[r][v] = fma(first, low[v], even[r][v]);
                odd[r][v] = fma(second, high[v], odd[r][v]);
            }
        }
    }
    if (to - from < 31) {  // what the padding adds: it turns -0, which is what flushing leaves, to +0
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
            for (int v = 0; v < 2; ++v) {
                even[r][v] = add(even[r][v], splat(0.0f));
                odd[r][v] = add(odd[r][v], splat(0.0f));
            }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) {
            float* sums = c + r * c_stride + v * HR_LANES;
            store(sums, add(load(sums), add(even[r][v], odd[r][v])));
        }
    }
}

template <int R>
inline void multiply_block(const bf16* x, int64_t x_stride, const bf16* w, int64_t num_inputs,
                           float* c, int64_t c_stride) {
    constexpr int kLanes = 2 * HR_LANES;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) memset(c + r * c_stride, 0, kBlockRows * sizeof(float));
    for (int64_t from = 0; from < num_inputs; from += 32) {
        const int64_t to = from + 32 < num_inputs ? from + 32 : num_inputs;
        for (int lane = 0; lane < kBlockRows; lane += kLanes)
            multiply_chunk<R>(x, x_stride, w + lane * 2, from, to, num_inputs, c + lane, c_stride);
    }
}

template <int B>
inline void multiply_rows(int rows, const bf16* x, int64_t x_stride, const bf16* w, int64_t block,
                          int64_t num_inputs, float* c, int64_t c_stride) {
    constexpr int kTogether = HR_LANES == 16 ? 6 : 2;
    for (int b = 0; b < B; ++b) {
        int r = 0;
        for (; r + kTogether <= rows; r += kTogether)
            multiply_block<kTogether>(x + r * x_stride, x_stride, w + b * block, num_inputs,
                                      c + r * c_stride + b * kBlockRows, c_stride);
        for (; r < rows; ++r)
            multiply_block<1>(x + r * x_stride, x_stride, w + b * block, num_inputs,
                              c + r * c_stride + b * kBlockRows, c_stride);
    }
}

#endif

}  // namespace
