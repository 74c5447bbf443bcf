// What happens to some rows and one tile of keys: scores, probabilities, weighted values.
//
// Products of bf16 rows follow rule N1, with probabilities rounded to bf16; of other rows they are
// chains of fused multiply-adds in fp32, ascending over dims and over keys. Weighted values are
// added to what the tiles before have left: c does not begin at 0. Keys that no row sees may be
// left out 16 at a time: they would add 0.
#pragma once

#include "cache.h"
#if HR_HAS_AMX
#include "attention_amx.h"
#endif

namespace {

constexpr float kInfinity = __builtin_inff();

// Queries and probabilities, as the products take them.
template <typename E>
struct FactorOf {
    typedef float Type;
};
template <>
struct FactorOf<bf16> {
    typedef bf16 Type;
};
template <typename E>
using Factor = typename FactorOf<E>::Type;

// Rows and vectors of sums that fit into registers.
template <typename E>
constexpr int kStripRows = HR_LANES == 16 ? 4 : 2;
template <>
constexpr int kStripRows<bf16> = HR_LANES == 16 ? 6 : 2;
template <typename E>
constexpr int kStripVectors = 4;
template <>
constexpr int kStripVectors<bf16> = HR_HAS_BF16 ? 4 : 2;

// Whether tiles can multiply rows, and how many rows are between two products at once.
template <typename E>
constexpr bool kHasTiles = false;
template <typename E>
constexpr int64_t kSoftmaxRows = 24;
#if HR_HAS_AMX
template <>
constexpr bool kHasTiles<bf16> = true;
template <>
constexpr int64_t kSoftmaxRows<bf16> = 2 * kTileRows;
static_assert(kSoftmaxRows<bf16> <= kMaxSoftmaxRows && kMaxItemRows % kTileRows == 0,
              "tiles write whole ones");
#endif

// R rows of x times V vectors of outputs, over sections of 16 k from `first` to `end`, of which the
// last may end early, at `size`. `line(section, v)`: where vector v of the first k (or pair of k)
// of a section lies; the next one lies `stride` elements further. c [R][V vectors] is set, or added
// to if `kIsAdded`.
#if HR_HAS_BF16

template <int R, int V, bool kIsAdded, typename Line>
inline void multiply_strip(const bf16* x, int64_t x_stride, int64_t first, int64_t end,
                           int64_t size, Line line, int64_t stride, float* c, int64_t c_stride) {
    __m512 sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            sums[r][v] = kIsAdded ? load(c + r * c_stride + v * HR_LANES) : splat(0.0f);
    for (int64_t section = first; section < end; ++section) {
        const bf16* lines[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) lines[v] = line(section, v);
        const int64_t rest = size - section * 16, pairs = rest < 16 ? rest / 2 : 8;
        for (int64_t p = 0; p < pairs; ++p) {
            __m512bh w[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v)
                w[v] = (__m512bh)_mm512_loadu_si512(lines[v] + p * stride);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                int32_t pair;
                memcpy(&pair, x + r * x_stride + section * 16 + 2 * p, 4);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], both, w[v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * c_stride + v * HR_LANES, sums[r][v]);
}

#else

template <int R, int V, bool kIsAdded, typename Line>
inline void multiply_strip(const bf16* x, int64_t x_stride, int64_t first, int64_t end,
                           int64_t size, Line line, int64_t stride, float* c, int64_t c_stride) {
    bool is_first = !kIsAdded;
    for (int64_t section = first; section < end;) {
        Vec even[R][V], odd[R][V];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) even[r][v] = odd[r][v] = splat(0.0f);
        do {  // to the next multiple of 32 k
            const bf16* lines[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) lines[v] = line(section, v);
            const int64_t rest = size - section * 16, pairs = rest < 16 ? rest / 2 : 8;
            for (int64_t p = 0; p < pairs; ++p) {
                Vec low[V], high[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) {
                    low[v] = low_halves(lines[v] + p * stride);
                    high[v] = high_halves(lines[v] + p * stride);
                }
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    const bf16* pair = x + r * x_stride + section * 16 + 2 * p;
                    const Vec a = splat(to_float(pair[0])), b = splat(to_float(pair[1]));
#pragma GCC unroll 8
                    for (int v = 0; v < V; ++v) {
                        even[r][v] = fma(a, low[v], even[r][v]);
                        odd[r][v] = fma(b, high[v], odd[r][v]);
                    }
                }
            }
        } while (++section % 2 != 0 && section < end);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) {
                float* sums = c + r * c_stride + v * HR_LANES;
                const Vec before = is_first ? splat(0.0f) : load(sums);
                store(sums, add(before, add(even[r][v], odd[r][v])));
            }
        is_first = false;
    }
}

#endif

template <int R, int V, bool kIsAdded, typename E, typename Line>
inline void multiply_strip(const float* x, int64_t x_stride, int64_t first, int64_t end,
                           int64_t size, Line line, int64_t stride, float* c, int64_t c_stride) {
    Vec sums[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            sums[r][v] = kIsAdded ? load(c + r * c_stride + v * HR_LANES) : splat(0.0f);
    for (int64_t section = first; section < end; ++section) {
        const E* lines[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) lines[v] = line(section, v);
        const int64_t rest = size - section * 16, steps = rest < 16 ? rest : 16;
        for (int64_t k = 0; k < steps; ++k) {
            Vec w[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) w[v] = load(lines[v] + k * stride);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Vec factor = splat(x[r * x_stride + section * 16 + k]);
#pragma GCC unroll 8
                for (int v = 0; v < V; ++v) sums[r][v] = fma(factor, w[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) store(c + r * c_stride + v * HR_LANES, sums[r][v]);
}

// Sections, rows and outputs of one product.
template <typename E, bool kIsAdded>
struct Strips {
    const Factor<E>* x;
    int64_t x_stride;
    int64_t first, end;  // sections of 16 k
    int64_t size;        // of k
    int64_t stride;
    float* c;
    int64_t c_stride;

    template <int R, int V, typename Line>
    void multiply(int64_t row, int64_t vector, Line line) const {
        const auto line_of = [&](int64_t section, int v) { return line(section, vector + v); };
        const Factor<E>* rows = x + row * x_stride;
        float* sums = c + row * c_stride + vector * HR_LANES;
        if constexpr (kSame<E, bf16>) {
            multiply_strip<R, V, kIsAdded>(rows, x_stride, first, end, size, line_of, stride, sums,
                                           c_stride);
        } else {
            multiply_strip<R, V, kIsAdded, E>(rows, x_stride, first, end, size, line_of, stride,
                                              sums, c_stride);
        }
    }

    template <int R, int V, typename Line>
    void multiply_rest(int64_t row, int64_t rows, int64_t vector, Line line) const {
        if (rows == R) return multiply<R, V>(row, vector, line);
        if constexpr (R > 1) multiply_rest<R - 1, V>(row, rows, vector, line);
    }

    template <int V, typename Line>
    void multiply_rows(int64_t num_rows, int64_t vector, Line line) const {
        constexpr int kRows = kStripRows<E>;
        int64_t row = 0;
        for (; row + kRows <= num_rows; row += kRows) multiply<kRows, V>(row, vector, line);
        if constexpr (kRows > 1)
            multiply_rest<kRows - 1, V>(row, num_rows - row, vector, line);
    }

    template <typename Line>
    void multiply_all(int64_t num_rows, int64_t from, int64_t to, Line line) const {
        constexpr int kVectors = kStripVectors<E>;
        int64_t vector = from;
        for (; vector + kVectors <= to; vector += kVectors)
            multiply_rows<kVectors>(num_rows, vector, line);
        for (; vector < to; ++vector) multiply_rows<1>(num_rows, vector, line);
    }
};

// 16 keys or values of 16 dims; those of a pair lie in one row.
template <typename E>
inline void prefetch_rows(const E* first, int64_t stride) {
#pragma GCC unroll 16
    for (int row = 0; row < 16 / kPair<E>; ++row) prefetch_far(first + row * stride);
}

// Scores [num_rows][kTile] of queries [num_rows][dim] and the keys of some groups of a tile.
// `is_tiled`, if kHasTiles: by tiles, which write up to the next multiple of 16 rows.
template <typename E>
__attribute__((noinline)) void multiply_keys(bool is_tiled, int64_t num_rows,
                                             const Factor<E>* queries, int64_t dim,
                                             const Tile<E>& tile, int64_t first_group,
                                             int64_t end_group, float* scores) {
    if constexpr (kHasTiles<E>) {
        if (is_tiled)
            return keys_by_tiles(num_rows, queries, dim, tile, first_group, end_group, scores);
    }
    constexpr int64_t kVectors = kKeyGroup / HR_LANES;  // of a group
    constexpr int64_t P = kPair<E>;
    const Strips<E, false> strips = {queries,         dim,    0,    (dim + 15) / 16, dim,
                                     tile.key_stride, scores, kTile};
    strips.multiply_all(
        num_rows, first_group * kVectors, end_group * kVectors, [&](int64_t section, int64_t v) {
            const int64_t group = v / kVectors, row = section * (16 / P);
            if (v % kVectors == 0 && tile.next_keys[group] != nullptr)
                prefetch_rows(tile.next_keys[group] + row * tile.key_stride, tile.key_stride);
            return tile.keys[group] + v % kVectors * HR_LANES * P + row * tile.key_stride;
        });
}

// Adds the values of some groups of a tile, weighted with probabilities [num_rows][kTile], to sums
// [num_rows][wide]; `is_tiled` as above.
template <typename E>
__attribute__((noinline)) void add_values(bool is_tiled, int64_t num_rows,
                                          const Factor<E>* probabilities, const Tile<E>& tile,
                                          int64_t first_group, int64_t end_group, int64_t wide,
                                          float* sums) {
    if constexpr (kHasTiles<E>) {
        if (is_tiled)
            return values_by_tiles(num_rows, probabilities, tile, first_group, end_group, wide,
                                   sums);
    }
    const Strips<E, true> strips = {probabilities, kTile, first_group, end_group, kTile,
                                    tile.value_stride, sums, wide};
    strips.multiply_all(num_rows, 0, wide / HR_LANES, [&](int64_t section, int64_t v) {
        if (v * HR_LANES % 16 == 0 && tile.next_values[section] != nullptr)
            prefetch_rows(tile.next_values[section] + v * HR_LANES * 16, 16 * kPair<E>);
        return tile.values[section] + v * HR_LANES * kPair<E>;
    });
}

#if !defined(__aarch64__)

// Lane i of `v` where bit i is set, else of `other`.
inline Vec chosen(uint32_t bits, Vec v, Vec other) {
#if HR_LANES == 16
    return _mm512_mask_blend_ps((__mmask16)bits, other, v);
#else
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32((int)bits), lanes);
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)));
#endif
}

// The largest lane; none of them is NaN.
inline float top(Vec v) {
#if HR_LANES == 16
    return _mm512_reduce_max_ps(v);
#else
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
#endif
}

#endif

// 2^x for x up to 126, with two units in the last place; exactly 1 at 0; 2^-126 below -126.
// n = round(x); the polynomial has the smallest relative error on |x - n| <= 0.5 for its degree.
inline Vec power_of_two(Vec x) {
    const Vec bounded = max(splat(-126.0f), x);
    const Vec n = round_to_int(bounded);
    const Vec r = sub(bounded, n);
    Vec p = splat(1.326472614891827e-3f);
    p = fma(p, r, splat(9.671512991189957e-3f));
    p = fma(p, r, splat(5.550733581185341e-2f));
    p = fma(p, r, splat(0.24022242426872253f));
    p = fma(p, r, splat(0.6931470036506653f));
    p = fma(p, r, splat(1.0f));
#if HR_LANES == 16
    return _mm512_scalef_ps(p, n);
#else
    return times_power_of_two(p, n);
#endif
}

inline float power_of_two(float x) {
    float lanes[HR_LANES];
    store(lanes, power_of_two(splat(x)));
    return lanes[0];
}

// From products to scores, in units of which 2 to the power is taken.
struct ScoreRule {
    float scale;     // of products before a cap
    float soft_cap;  // 0: none
    float factor;    // of what is left, before 2 to the power
};

inline ScoreRule score_rule(const hr_op& op) {
    constexpr float kLog2E = 1.44269504f;
    if (op.soft_cap == 0.0f) return {1.0f, 0.0f, op.scale * kLog2E};
    return {op.scale / op.soft_cap, op.soft_cap, op.soft_cap * kLog2E};
}

// The keys of a tile that one row sees, `from` to `to`: bit i for key i.
inline uint64_t seen_keys(int64_t from, int64_t to) {
    const auto below = [](int64_t key) {
        return key <= 0 ? 0 : key >= kTile ? ~(uint64_t)0 : ((uint64_t)1 << key) - 1;
    };
    return below(to) & ~below(from);
}

// What rows of scores become, and what comes of them; of some groups of keys.
template <typename E, bool kHasScales>
struct Softmax {
    ScoreRule rule;
    const Tile<E>& tile;
    int first, end;  // keys

    // The largest score that is seen, or `before` if that is larger. Scores are scaled and capped
    // in place.
    float fold_scores(float* scores, uint64_t seen, float before) const {
        if (kHasScales || rule.soft_cap != 0.0f) finish_scores(scores);
        Vec most = splat(before);
        if (~seen == 0) {
            for (int key = first; key < end; key += HR_LANES) most = max(load(scores + key), most);
        } else {
            for (int key = first; key < end; key += HR_LANES)
                most = max(chosen((uint32_t)(seen >> key), load(scores + key), splat(-kInfinity)), most);
        }
        return top(most);
    }

    // Probabilities from scores, exactly 0 for keys that are not seen. Adds to `totals` [HR_LANES],
    // before they are rounded.
    void exponentiate(const float* scores, uint64_t seen, float most, float kept,
                      Factor<E>* probabilities, float* totals) const {
        const Vec factor = splat(rule.factor), shift = splat(-most * rule.factor);
        Vec sums = mul(load(totals), splat(kept));
        const auto add_vector = [&](int key, auto only_seen) {
            const Vec score = load(scores + key);
            Vec p = only_seen(power_of_two(fma(score, factor, shift)));
            sums = add(sums, p);
            if (kHasScales) p = only_seen(mul(p, load(tile.value_scales + key)));
            store_quick(probabilities + key, p);
        };
        if (~seen == 0) {
            for (int key = first; key < end; key += HR_LANES)
                add_vector(key, [](Vec p) { return p; });
        } else {
            for (int key = first; key < end; key += HR_LANES)
                add_vector(key, [&](Vec p) { return chosen((uint32_t)(seen >> key), p, splat(0.0f)); });
        }
        store(totals, sums);
    }

  private:
    void finish_scores(float* scores) const {
        for (int key = first; key < end; key += HR_LANES) {
            Vec score = load(scores + key);
            if (kHasScales) score = mul(score, load(tile.key_scales + key));
            if (rule.soft_cap != 0.0f) score = tanh_of(mul(score, splat(rule.scale)));
            store(scores + key, score);
        }
    }
};

}  // namespace
