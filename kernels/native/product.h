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
// Both may stop at any multiple of 32 k and go on from the c that is stored there.
#pragma once

#include "simd.h"
#include "work.h"

namespace {

constexpr int kMaxRows = 6;  // of x, multiplied together with two blocks
constexpr int64_t kPrefetchBytes = 2048;

// Rows that are multiplied together with one block, if there are no more: measured, as is from how
// many rows on that is faster than fewer with two blocks.
template <typename W>
constexpr int kMaxRowsAlone = kMaxRows;
template <typename W>
constexpr int64_t kManyRows = INT64_MAX;
#if HR_LANES == 16
template <>
constexpr int kMaxRowsAlone<float> = 12;
#endif
#if HR_HAS_BF16
template <>
constexpr int kMaxRowsAlone<bf16> = 12;
template <>
constexpr int64_t kManyRows<bf16> = 48;
#endif

// In place of a stride: the rows of each pass lie as `pair_rows` puts them.
constexpr int64_t kPairedRows = -1;

// What a pass over the weights prefetches on its way: as many lines per step as it reads, from
// these addresses, which move on by `advance` bytes with each step. Steps are pairs of k in bf16.
struct Ahead {
    const char* blocks[2];
    int64_t advance;
};

// For a pass that reads its weights from memory: the same weights, a little later.
template <typename W>
inline Ahead own_weights(const W* w, int64_t block, int64_t step_bytes) {
    const char* start = (const char*)w + kPrefetchBytes;
    return {{start, start + block * (int64_t)sizeof(W)}, step_bytes};
}

inline uint32_t pair_at(const bf16* x, int64_t k, int64_t num_inputs) {
    if (k + 1 >= num_inputs) return x[k];
    uint32_t pair;
    memcpy(&pair, x + k, 4);
    return pair;
}

// Calls `function` with a type whose `value` is `rows`, from 1 to `Most`.
template <int R>
struct NumRows {
    static constexpr int value = R;
};

template <int Most, int R = 1, typename F>
inline void with_rows(int rows, const F& function) {
    if constexpr (R < Most) {
        if (rows > R) return with_rows<Most, R + 1>(rows, function);
    }
    function(NumRows<R>());
}

#if HR_HAS_BF16

// R rows of x times B blocks, which lie `block` elements apart; c is [R][B * 32] floats. Rows are
// [R][k], `x_stride` apart, or, if that is kPairedRows, [pairs of k][R][2].
template <int R, int B, bool kIsPaired>
inline void multiply(const bf16* x, int64_t x_stride, const bf16* w, int64_t block,
                     int64_t num_inputs, bool is_first, float* c, int64_t c_stride, Ahead ahead) {
    if (kIsPaired) x_stride = 2;
    constexpr int64_t kStepPairs = kIsPaired ? R : 1;
    constexpr int kVectors = 2 * B;
    __m512 sums[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v)
            sums[r][v] = is_first ? _mm512_setzero_ps() : load(c + r * c_stride + v * 16);
    const int64_t whole = num_inputs & ~(int64_t)1;
    int64_t k = 0, offset = 0;
    const auto step = [&](auto pair_of) __attribute__((always_inline)) {
        __m512i weights[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            prefetch(ahead.blocks[v / 2] + offset + (v % 2) * 64);
            weights[v] = _mm512_loadu_si512(w + (v / 2) * block + k * kBlockRows + (v % 2) * 32);
        }
        offset += ahead.advance;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512i pair = _mm512_set1_epi32(pair_of(x + r * x_stride, kStepPairs * k));
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v)
                sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)pair, (__m512bh)weights[v]);
        }
    };
    for (; k < whole; k += 2)
        step([&](const bf16* row, int64_t at) {
            int32_t pair;
            memcpy(&pair, row + at, 4);
            return pair;
        });
    if (k < num_inputs) step([&](const bf16* row, int64_t at) { return (int32_t)row[at]; });
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) store(c + r * c_stride + v * 16, sums[r][v]);
}

// `rows` rows of x, at most kMaxRows with two blocks; adds to c, unless it is the first to write
// there.
template <int B>
inline void multiply_rows(int rows, const bf16* x, int64_t x_stride, const bf16* w, int64_t block,
                          int64_t num_inputs, bool is_first, float* c, int64_t c_stride,
                          const Ahead& ahead) {
    with_rows<B == 1 ? kMaxRowsAlone<bf16> : kMaxRows>(rows, [&](auto r) {
        const auto run = x_stride == kPairedRows ? multiply<r.value, B, true>
                                                 : multiply<r.value, B, false>;
        run(x, x_stride, w, block, num_inputs, is_first, c, c_stride, ahead);
    });
}

// Rows as [pairs of k][rows][2], which lets a step of `multiply` read from one place instead of one
// in each row. `out` holds an even number of k, with a zero behind an odd one.
inline void pair_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t num_inputs,
                      bf16* out) {
    for (int64_t k = 0; k < num_inputs; k += 2)
        for (int64_t r = 0; r < rows; ++r, out += 2) {
            const uint32_t pair = pair_at(x + r * x_stride, k, num_inputs);
            memcpy(out, &pair, 4);
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
#elif !defined(__aarch64__)
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
                           int64_t num_inputs, float* c, int64_t c_stride, const char* ahead,
                           int64_t advance) {
    Vec even[R][2], odd[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) even[r][v] = odd[r][v] = splat(0.0f);
    for (int64_t k = from; k < to; k += 2, ahead += advance) {
        Vec low[2], high[2];
#pragma GCC unroll 16
        for (int v = 0; v < 2; ++v) {
            const bf16* line = w + k * kBlockRows + v * 2 * HR_LANES;
            if (v * HR_LANES % 16 == 0) prefetch(ahead + v * 64);
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
                           bool is_first, float* c, int64_t c_stride, const char* ahead,
                           int64_t advance) {
    constexpr int kLanes = 2 * HR_LANES;
    if (is_first) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) memset(c + r * c_stride, 0, kBlockRows * sizeof(float));
    }
    for (int64_t from = 0; from < num_inputs; from += 32) {
        const int64_t to = from + 32 < num_inputs ? from + 32 : num_inputs;
        for (int lane = 0; lane < kBlockRows; lane += kLanes)
            multiply_chunk<R>(x, x_stride, w + lane * 2, from, to, num_inputs, c + lane, c_stride,
                              ahead + from / 2 * advance + lane * 4, advance);
    }
}

// `rows` rows of x, at most kMaxRows; adds to c, unless it is the first to write there.
template <int B>
inline void multiply_rows(int rows, const bf16* x, int64_t x_stride, const bf16* w, int64_t block,
                          int64_t num_inputs, bool is_first, float* c, int64_t c_stride,
                          const Ahead& ahead) {
    for (int b = 0; b < B; ++b) {
        const auto run = [&](int first, auto r) {
            multiply_block<r.value>(x + first * x_stride, x_stride, w + b * block, num_inputs,
                                    is_first, c + first * c_stride + b * kBlockRows, c_stride,
                                    ahead.blocks[b], ahead.advance);
        };
        if (HR_LANES == 16) {
            with_rows<kMaxRows>(rows, [&](auto r) { run(0, r); });
        } else {
            int r = 0;
            for (; r + 2 <= rows; r += 2) run(r, NumRows<2>());
            if (r < rows) run(r, NumRows<1>());
        }
    }
}

#endif

// All of k at once.
template <int B>
inline void multiply_rows(int rows, const bf16* x, int64_t x_stride, const bf16* w, int64_t block,
                          int64_t num_inputs, float* c, int64_t c_stride) {
    multiply_rows<B>(rows, x, x_stride, w, block, num_inputs, true, c, c_stride,
                     own_weights(w, block, 4 * kBlockRows));
}

}  // namespace
