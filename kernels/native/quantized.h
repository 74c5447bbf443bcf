// Products with quantized weights, straight from their packed codes (quantized_layout.h).
//
// The rule, the same for every instruction set and every number of rows. Inputs are quantized per
// token in blocks of 32 (quantize_rows.h): codes q, scale s, t = s * (sum of q). All of what follows
// is fp32, each operation rounded once, fma being fused; c begins at +0. For blocks n ascending:
//   dot = sum over the block of q[k] * (code[k] - offset)   exact, in int32
//   c = fma(s[n] * scale[n], dot, c)                        Q6_K: so for the first 16, then the last
//   c = fma(minimum[n], t[n], c)                            formats with a minimum
// Scale and minimum are those of the format; with blocks of 256, scale = float(d) * float(sub-scale)
// and minimum = -float(dmin) * float(sub-minimum). INT8 has no scale[n]: c = fma(s[n], dot, c), and
// at the end c = c * (scale of the row).
#pragma once

#include "quantized_panel.h"
#include "rows.h"
#if HR_HAS_AMX
#include "quantized_amx.h"
#endif

namespace {

// Rows of x that are multiplied together, as far as registers go: up to the first number straight
// from the packed weights, for more the weights are unpacked in memory.
constexpr int kDirectRows = HR_LANES == 8 ? 2 : HR_HAS_VNNI ? 8 : 4;
constexpr int kPanelRows = kDirectRows < 6 ? kDirectRows : 6;

// Vectors of a chunk's 32 lanes that are multiplied together with R rows, one group after another.
#if defined(__aarch64__)
constexpr int kMostPaired = 1;  // a vector of lanes is two registers
#else
constexpr int kMostPaired = 6;
#endif
template <int R>
constexpr int kVectors = R > kMostPaired ? 1 : 2;
template <int R>
constexpr int kGroups = kChunkRows / (kVectors<R> * HR_LANES);

template <int kFormat>
struct PanelChunk {
    static constexpr QuantizedLayout kLayout = layout_of(kFormat);
    const Panel<kFormat>& panel;
    int64_t n;

    static PanelChunk at(const uint8_t* panel, int64_t chunk) {
        return {*(const Panel<kFormat>*)panel, chunk};
    }

    template <int kStep>
    Ints codes(int lane) const {
        return load_ints(panel.codes(n) + 4 * lane + kStep * kLineBytes);
    }
    template <int kStep, int R>
    void fetch() const {
        if (kStep == 0) panel.fetch(n);
    }
    Vec scale(int lane, int part) const { return load(panel.scales[n][part] + lane); }
    Vec minimum(int lane) const { return load(panel.minima[n] + lane); }
};

inline int32_t word_of(const int8_t* codes) {
    int32_t word;
    memcpy(&word, codes, 4);
    return word;
}

// Dots of the inputs of one part of a chunk: of R blocks of x with V vectors of lanes.
template <typename Chunk, int R, int V, int kPart>
inline __attribute__((always_inline)) void multiply_codes(const Chunk& chunk,
                                                          const QuantizedBlock* const (&x)[R],
                                                          int lane, Ints (&dots)[R][V]) {
    constexpr QuantizedLayout kLayout = Chunk::kLayout;
    constexpr int kParts = kLayout.num_scales == 2 ? 2 : 1;
    using Sum = Dot<kLayout.code_bits>;
    Sum sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        Ints start = splat_int(0);
        if constexpr (kLayout.offset_bits >= 0 && !Sum::kIsCentred)
            start = splat_int(x[r]->template offset_sum<kLayout.offset_bits, kPart>());
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sums[r][v].total = start;
    }
    each_step([&](auto step) __attribute__((always_inline)) {
        constexpr int kStep = decltype(step)::value;
        if constexpr (kStep * kParts / 8 != kPart) return;
        if (lane == 0) chunk.template fetch<kStep, R>();
        Ints codes[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) codes[v] = chunk.template codes<kStep>(lane + v * HR_LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Ints inputs = splat_int(word_of(x[r]->codes + 4 * kStep));
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) sums[r][v].template add<kStep>(codes[v], inputs);
        }
    });
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) dots[r][v] = sums[r][v].total;
}

// The fused multiply-adds of one chunk, for the vectors from `lane` on.
template <typename Chunk, int R, int V>
inline __attribute__((always_inline)) void add_chunk(const Chunk& chunk,
                                                     const QuantizedBlock* const (&x)[R], int lane,
                                                     Vec (&sums)[R][V]) {
    constexpr QuantizedLayout kLayout = Chunk::kLayout;
    const auto add_part = [&](auto part) __attribute__((always_inline)) {
        constexpr int kPart = decltype(part)::value;
        Ints dots[R][V];
        multiply_codes<Chunk, R, V, kPart>(chunk, x, lane, dots);
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            Vec weight_scale;
            if constexpr (kLayout.num_scales != 0)
                weight_scale = chunk.scale(lane + v * HR_LANES, kPart);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                Vec scale = splat(x[r]->scale);
                if constexpr (kLayout.num_scales != 0) scale = mul(scale, weight_scale);
                sums[r][v] = fma(scale, to_floats(dots[r][v]), sums[r][v]);
            }
        }
    };
    add_part(std::integral_constant<int, 0>());
    if constexpr (kLayout.num_scales == 2) add_part(std::integral_constant<int, 1>());
    if constexpr (kLayout.has_minimum)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            const Vec minimum = chunk.minimum(lane + v * HR_LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
                sums[r][v] = fma(minimum, splat(x[r]->scaled_sum), sums[r][v]);
        }
}

// Chunks `from` ... `to` - 1 of a block of 32 rows with R rows of x, whose blocks lie `x_stride`
// apart: added to c [R][32]. A function of its own, for the sake of registers.
template <typename Chunk, int R>
__attribute__((noinline)) void multiply_chunks(const QuantizedBlock* x, int64_t x_stride,
                                               const uint8_t* block, int64_t from, int64_t to,
                                               float* c) {
    constexpr int V = kVectors<R>, kNumGroups = kGroups<R>;
    Vec sums[kNumGroups][R][V];
    const auto each_sum = [&](auto f) __attribute__((always_inline)) {
#pragma GCC unroll 16
        for (int g = 0; g < kNumGroups; ++g)
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
                for (int v = 0; v < V; ++v)
                    f(sums[g][r][v], c + r * kChunkRows + (g * V + v) * HR_LANES);
    };
    each_sum([](Vec& sum, const float* at) __attribute__((always_inline)) { sum = load(at); });
    for (int64_t n = from; n < to; ++n) {
        const Chunk chunk = Chunk::at(block, n);
        const QuantizedBlock* blocks[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) blocks[r] = x + r * x_stride + n;
#pragma GCC unroll 16
        for (int g = 0; g < kNumGroups; ++g) {
            add_chunk<Chunk, R, V>(chunk, blocks, g * V * HR_LANES, sums[g]);
            // Inputs are read again for the next group: there are no registers for all of them.
            if (g + 1 < kNumGroups) asm volatile("" ::: "memory");
        }
    }
    each_sum([](const Vec& sum, float* at) __attribute__((always_inline)) { store(at, sum); });
}

// As multiply_chunks, for 1 ... R rows.
template <typename Chunk, int R>
inline void multiply_some(int64_t num_rows, const QuantizedBlock* x, int64_t x_stride,
                          const uint8_t* block, int64_t from, int64_t to, float* c) {
    if constexpr (R > 1) {
        if (num_rows < R)
            return multiply_some<Chunk, R - 1>(num_rows, x, x_stride, block, from, to, c);
    }
    multiply_chunks<Chunk, R>(x, x_stride, block, from, to, c);
}

// One block of 32 outputs for many rows: added to c [num_rows][32].
template <int kFormat>
inline void multiply_panels(const uint8_t* block, const QuantizedRows& x, int64_t num_rows,
                            int64_t num_chunks, float* c) {
    Panel<kFormat> panel;
    const int64_t turns = (num_rows + kPanelRows - 1) / kPanelRows;
    const int64_t together = (num_rows + turns - 1) / turns;
    each_panel(panel, block, num_rows, together, num_chunks,
               [&](int64_t row, int64_t from, int64_t count) {
                   const int64_t rest = num_rows - row;
                   multiply_some<PanelChunk<kFormat>, kPanelRows>(
                       rest < together ? rest : together, x.data + row * x.stride + from, x.stride,
                       (const uint8_t*)&panel, 0, count, c + row * kChunkRows);
               });
}

// One block of 32 outputs: c is [num_rows][32], with room up to the next multiple of 16 rows. Not
// inlined: rows of all types share its code.
template <int kFormat>
__attribute__((noinline)) void multiply_block(const uint8_t* block, const QuantizedRows& x,
                                              int64_t num_rows, int64_t num_inputs, float* c) {
    const int64_t num_chunks = num_quantized_blocks(num_inputs);
    memset(c, 0, num_rows * kChunkRows * sizeof(float));
#if HR_HAS_AMX
    if (num_rows >= kMinRowsByTiles) {
        multiply_tile_panels<kFormat>(block, x, num_rows, num_chunks, c);
    } else
#endif
    if (num_rows <= kDirectRows) {
        multiply_some<PackedChunk<kFormat>, kDirectRows>(num_rows, x.data, x.stride, block, 0,
                                                         num_chunks, c);
    } else {
        multiply_panels<kFormat>(block, x, num_rows, num_chunks, c);
    }
    if constexpr (kFormat == HR_INT8) {
        const float* scales = (const float*)(block + layout_of(kFormat).row_scales_at(num_inputs));
        for (int64_t i = 0; i < num_rows * kChunkRows; i += HR_LANES)
            store(c + i, mul(load(c + i), load(scales + i % kChunkRows)));
    }
}

// Every thread has its own rows of the weights. Rows of x come in groups that the second-level
// cache holds.
template <typename E, int kFormat>
inline void run_quantized_product(const hr_op& op, const hr_step& step, const QuantizedRows& x,
                                  int thread, int num_threads) {
    constexpr int64_t kRowsInCache = 96;
    const int64_t num_blocks = (op.num_outputs + kChunkRows - 1) / kChunkRows;
    const int64_t block_bytes = layout_of(kFormat).block_bytes(op.num_inputs);
    const Range blocks = share(num_blocks, thread, num_threads);
    alignas(64) float c[kRowsInCache * kChunkRows];
#if HR_HAS_AMX
    const bool are_tiles_used = step.num_tokens >= kMinRowsByTiles;
    if (are_tiles_used) configure_tiles(kTileRows, kTileInputsOf<kFormat>);
#endif
    for (int64_t first = 0; first < step.num_tokens; first += kRowsInCache) {
        const int64_t rest = step.num_tokens - first;
        const int64_t num_rows = rest < kRowsInCache ? rest : kRowsInCache;
        for (int64_t n = blocks.from; n < blocks.to; ++n) {
            multiply_block<kFormat>((const uint8_t*)op.weight + n * block_bytes,
                                    {x.data + first * x.stride, x.stride}, num_rows, op.num_inputs,
                                    c);
            for (int64_t row = 0; row < num_rows; ++row)
                finish_block<E>(op, step, first + row, n, c + row * kChunkRows);
        }
    }
#if HR_HAS_AMX
    if (are_tiles_used) configure_tiles(kTileRows, kTileBytes);  // as products of bf16 want them
#endif
}

template <typename E>
inline void run_quantized_product(const hr_op& op, const hr_step& step, const QuantizedRows& x,
                                  int thread, int num_threads) {
    switch (op.format) {
        case HR_INT8: return run_quantized_product<E, HR_INT8>(op, step, x, thread, num_threads);
        case HR_Q8_0: return run_quantized_product<E, HR_Q8_0>(op, step, x, thread, num_threads);
        case HR_Q4_0: return run_quantized_product<E, HR_Q4_0>(op, step, x, thread, num_threads);
        case HR_Q4_1: return run_quantized_product<E, HR_Q4_1>(op, step, x, thread, num_threads);
        case HR_Q5_0: return run_quantized_product<E, HR_Q5_0>(op, step, x, thread, num_threads);
        case HR_Q5_1: return run_quantized_product<E, HR_Q5_1>(op, step, x, thread, num_threads);
        case HR_Q4_K: return run_quantized_product<E, HR_Q4_K>(op, step, x, thread, num_threads);
        case HR_Q5_K: return run_quantized_product<E, HR_Q5_K>(op, step, x, thread, num_threads);
        default: return run_quantized_product<E, HR_Q6_K>(op, step, x, thread, num_threads);
    }
}

}  // namespace
