// Matrix products with packed weights in f32 or f16, and x in f32.
//
// Packed layout, in blocks of 32 rows: [num_blocks][k][32 rows], zero where the matrix ends.
//
// Order of the sums, the same for every instruction set and number of rows: one chain of fused
// multiply-adds over ascending k, from +0. It may stop anywhere and go on from what is stored.
#pragma once

#include "product.h"

namespace {

constexpr int64_t kWidenFromPasses = 3;  // over f16 weights: then they are made wide once for all
constexpr int64_t kHalvesInputs = 32;    // after which the other half of a block has its turn

// R rows of x times V vectors of each of B blocks, which lie `block` elements apart; c is
// [R][B * 32] floats, of which it computes as many.
template <int R, int B, int V, typename W>
inline void multiply_floats(const float* x, int64_t x_stride, const W* w, int64_t block,
                            int64_t num_inputs, bool is_first, float* c, int64_t c_stride,
                            const Ahead& ahead) {
    constexpr int kPerLine = 64 / sizeof(W) / HR_LANES;  // vectors
    Vec sums[R][B * V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < B * V; ++v)
            sums[r][v] = is_first ? splat(0.0f)
                                  : load(c + r * c_stride + v / V * kBlockRows + v % V * HR_LANES);
    int64_t offset = 0;
    for (int64_t k = 0; k < num_inputs; ++k, offset += ahead.advance) {
        Vec weights[B * V];
#pragma GCC unroll 16
        for (int v = 0; v < B * V; ++v) {
            if (v % V % kPerLine == 0)
                prefetch(ahead.blocks[v / V] + offset + v % V / kPerLine * 64);
            weights[v] = load(w + v / V * block + k * kBlockRows + v % V * HR_LANES);
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vec value = splat(x[r * x_stride + k]);
#pragma GCC unroll 16
            for (int v = 0; v < B * V; ++v) sums[r][v] = fma(value, weights[v], sums[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < B * V; ++v)
            store(c + r * c_stride + v / V * kBlockRows + v % V * HR_LANES, sums[r][v]);
}

// As many vectors together as there are registers for.
template <int R, int B, typename W>
inline void multiply_float_rows(const float* x, int64_t x_stride, const W* w, int64_t block,
                                int64_t num_inputs, bool is_first, float* c, int64_t c_stride,
                                const Ahead& ahead) {
#if HR_LANES == 16
    multiply_floats<R, B, 2>(x, x_stride, w, block, num_inputs, is_first, c, c_stride, ahead);
#else
    constexpr int kVectors = R <= 2 ? 4 : 2;
    for (int b = 0; b < B; ++b) {
        for (int64_t k = 0; k < num_inputs; k += kHalvesInputs) {
            const int64_t rest = num_inputs - k;
            for (int lane = 0; lane < kBlockRows; lane += kVectors * HR_LANES) {
                const char* fetched =
                    ahead.blocks[b] + k * ahead.advance + lane * (int64_t)sizeof(W);
                multiply_floats<R, 1, kVectors>(
                    x + k, x_stride, w + b * block + k * kBlockRows + lane, 0,
                    rest < kHalvesInputs ? rest : kHalvesInputs, is_first && k == 0,
                    c + b * kBlockRows + lane, c_stride, {{fetched, nullptr}, ahead.advance});
            }
        }
    }
#endif
}

// `rows` rows of x, at most kMaxRows with two blocks; adds to c, unless it is the first to write
// there.
template <int B, typename W>
inline void multiply_rows(int rows, const float* x, int64_t x_stride, const W* w, int64_t block,
                          int64_t num_inputs, bool is_first, float* c, int64_t c_stride,
                          const Ahead& ahead) {
    with_rows<B == 1 ? kMaxRowsAlone<W> : kMaxRows>(rows, [&](auto r) {
        multiply_float_rows<r.value, B>(x, x_stride, w, block, num_inputs, is_first, c, c_stride,
                                        ahead);
    });
}

// All of k at once.
template <int B, typename W>
inline void multiply_rows(int rows, const float* x, int64_t x_stride, const W* w, int64_t block,
                          int64_t num_inputs, float* c, int64_t c_stride) {
    multiply_rows<B>(rows, x, x_stride, w, block, num_inputs, true, c, c_stride,
                     own_weights(w, block, kBlockRows * (int64_t)sizeof(W)));
}

inline void widen(const f16* from, int64_t size, float* to) {
    for (int64_t i = 0; i < size; i += HR_LANES)
        store_some(to + i, load_some(from + i, size - i), size - i);
}

}  // namespace
