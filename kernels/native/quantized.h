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

#include <type_traits>

#include "quantize_rows.h"
#include "quantized_layout.h"
#include "rows.h"

namespace {

constexpr int kCacheLine = 64;
constexpr int kAhead = 12288;  // bytes that are fetched before they are needed
constexpr int kPanelChunks = 8;
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

// Calls f(0) ... f(7) with numbers that are constants.
template <typename Function>
inline __attribute__((always_inline)) void each_step(Function f) {
    f(std::integral_constant<int, 0>());
    f(std::integral_constant<int, 1>());
    f(std::integral_constant<int, 2>());
    f(std::integral_constant<int, 3>());
    f(std::integral_constant<int, 4>());
    f(std::integral_constant<int, 5>());
    f(std::integral_constant<int, 6>());
    f(std::integral_constant<int, 7>());
}

// Bits moved to the left or, below 0, to the right. Only those of `mask` are kept in every byte, so
// what crosses from one to another does not matter.
template <int kShift>
inline Ints bits_moved(Ints a, int mask) {
    if constexpr (kShift >= 0) return bits_and(shifted_left<kShift>(a), splat_byte(mask));
    return bits_and(shifted_right<kShift >= 0 ? 0 : -kShift>(a), splat_byte(mask));
}

// A chunk of a packed block: codes and scales of its lanes, unpacked in registers.
template <int kFormat>
struct PackedChunk {
    static constexpr QuantizedLayout kLayout = layout_of(kFormat);
    const uint8_t* data;
    const uint8_t* header;

    static PackedChunk at(const uint8_t* block, int64_t chunk) {
        return {block + kLayout.chunk_at(chunk), block + kLayout.header_at(chunk)};
    }

    // Of inputs 4 step ... 4 step + 3.
    template <int kStep>
    Ints codes(int lane) const {
        const uint8_t* low = data + 4 * lane;
        if constexpr (kLayout.code_bits == 8) return load_ints(low + kStep * kLineBytes);
        const Ints line = load_ints(low + kStep % 4 * kLineBytes);
        const Ints lower = bits_moved<kStep < 4 ? 0 : -4>(line, 15);
        if constexpr (kLayout.code_bits == 4) return lower;
        const uint8_t* high = low + kLayout.high_at();
        if constexpr (kLayout.code_bits == 5)
            return bits_or(lower, bits_moved<4 - kStep>(load_ints(high), 16));
        const Ints pairs = load_ints(high + kStep / 4 * kLineBytes);
        return bits_or(lower, bits_moved<4 - kStep % 4 * 2>(pairs, 48));
    }

    // One of 8 parts of what will be needed soon. With one or two rows of x the processor sees for
    // itself what comes next.
    template <int kStep, int R>
    void fetch() const {
        if (R <= 2) return;
        constexpr int kLines = kLayout.chunk_bytes() / kCacheLine;
#pragma GCC unroll 16
        for (int i = kLines * kStep / 8; i < kLines * (kStep + 1) / 8; ++i)
            prefetch_far(data + kAhead + i * kCacheLine);
    }

    Vec scale(int lane, int part) const {
        const uint8_t* at = data + kLayout.scales_at() + part * kChunkRows * kLayout.scale_bytes();
        if constexpr (!kLayout.is_super) return load_halves(at + 2 * lane);
        const Vec bytes = kFormat == HR_Q6_K ? load_signed_bytes(at + lane)
                                             : load_unsigned_bytes(at + lane);
        return mul(load_halves(header + 2 * lane), bytes);
    }

    Vec minimum(int lane) const {
        const uint8_t* at = data + kLayout.minima_at();
        if constexpr (!kLayout.is_super) return load_halves(at + 2 * lane);
        return mul(load_halves(header + 2 * (kChunkRows + lane)), load_unsigned_bytes(at + lane));
    }
};

// Chunks of a block, unpacked once for many rows of x: bytes and floats.
template <int kFormat>
struct Panel {
    static constexpr QuantizedLayout kLayout = layout_of(kFormat);
    alignas(64) uint8_t codes[kPanelChunks][8 * kLineBytes];
    alignas(64) float scales[kPanelChunks][2][kChunkRows];
    alignas(64) float minima[kPanelChunks][kChunkRows];
    const uint8_t* ahead;  // what to fetch meanwhile: so many cache lines with every chunk
    int64_t ahead_lines;

    void unpack(const uint8_t* block, int64_t first, int64_t count) {
        for (int64_t n = 0; n < count; ++n) {
            const auto chunk = PackedChunk<kFormat>::at(block, first + n);
            for (int lane = 0; lane < kChunkRows; lane += HR_LANES) unpack(chunk, n, lane);
        }
    }

  private:
    void unpack(const PackedChunk<kFormat>& chunk, int64_t n, int lane) {
        each_step([&](auto step) __attribute__((always_inline)) {
            constexpr int kStep = decltype(step)::value;
            store_ints(codes[n] + 4 * lane + kStep * kLineBytes, chunk.template codes<kStep>(lane));
        });
        for (int part = 0; part < kLayout.num_scales; ++part)
            store(scales[n][part] + lane, chunk.scale(lane, part));
        if constexpr (kLayout.has_minimum) store(minima[n] + lane, chunk.minimum(lane));
    }
};

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
        return load_ints(panel.codes[n] + 4 * lane + kStep * kLineBytes);
    }
    template <int kStep, int R>
    void fetch() const {
        if (kStep > 0) return;
        const uint8_t* from = panel.ahead + n * panel.ahead_lines * kCacheLine;
        for (int64_t i = 0; i < panel.ahead_lines; ++i) prefetch_far(from + i * kCacheLine);
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
            start = shifted_left<kLayout.offset_bits>(
                splat_int(kParts == 2 ? x[r]->minus_sums[kPart] : x[r]->minus_sum));
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

// As multiply_chunks, for 1 ... kDirectRows rows.
template <typename Chunk>
inline void multiply_some(int64_t num_rows, const QuantizedBlock* x, int64_t x_stride,
                          const uint8_t* block, int64_t from, int64_t to, float* c) {
    switch (num_rows) {
        case 1: return multiply_chunks<Chunk, 1>(x, x_stride, block, from, to, c);
#if HR_LANES == 16
        case 2: return multiply_chunks<Chunk, 2>(x, x_stride, block, from, to, c);
        case 3: return multiply_chunks<Chunk, 3>(x, x_stride, block, from, to, c);
#if HR_HAS_VNNI
        case 4: return multiply_chunks<Chunk, 4>(x, x_stride, block, from, to, c);
        case 5: return multiply_chunks<Chunk, 5>(x, x_stride, block, from, to, c);
        case 6: return multiply_chunks<Chunk, 6>(x, x_stride, block, from, to, c);
        case 7: return multiply_chunks<Chunk, 7>(x, x_stride, block, from, to, c);
#endif
#endif
        default: return multiply_chunks<Chunk, kDirectRows>(x, x_stride, block, from, to, c);
    }
}

// Rows of a product's input, quantized.
struct QuantizedRows {
    const QuantizedBlock* data;
    int64_t stride;  // blocks
};

// One block of 32 outputs for many rows: added to c [num_rows][32].
template <int kFormat>
inline void multiply_panels(const uint8_t* block, const QuantizedRows& x, int64_t num_rows,
                            int64_t num_chunks, float* c) {
    constexpr QuantizedLayout kLayout = layout_of(kFormat);
    Panel<kFormat> panel;
    const int64_t turns = (num_rows + kPanelRows - 1) / kPanelRows;
    const int64_t together = (num_rows + turns - 1) / turns;
    for (int64_t from = 0; from < num_chunks; from += kPanelChunks) {
        const int64_t rest = num_chunks - from, count = rest < kPanelChunks ? rest : kPanelChunks;
        panel.unpack(block, from, count);
        const int64_t bytes = kLayout.chunk_at(from + count) - kLayout.chunk_at(from);
        const int64_t lines = turns * count * kCacheLine;  // bytes, if each chunk fetches a line
        panel.ahead = block + kLayout.chunk_at(from) + bytes;
        panel.ahead_lines = (bytes + lines - 1) / lines;
        const uint8_t* ahead_end = panel.ahead + bytes;
        for (int64_t row = 0; row < num_rows; row += together) {
            const int64_t rows = num_rows - row < together ? num_rows - row : together;
            multiply_some<PanelChunk<kFormat>>(rows, x.data + row * x.stride + from, x.stride,
                                               (const uint8_t*)&panel, 0, count,
                                               c + row * kChunkRows);
            panel.ahead += panel.ahead_lines * count * kCacheLine;
            if (panel.ahead >= ahead_end) panel.ahead_lines = 0;
        }
    }
}

// One block of 32 outputs: c is [num_rows][32]. Not inlined: rows of all types share its code.
template <int kFormat>
__attribute__((noinline)) void multiply_block(const uint8_t* block, const QuantizedRows& x, int64_t num_rows,
                           int64_t num_inputs, float* c) {
    const int64_t num_chunks = num_quantized_blocks(num_inputs);
    memset(c, 0, num_rows * kChunkRows * sizeof(float));
    if (num_rows <= kDirectRows) {
        multiply_some<PackedChunk<kFormat>>(num_rows, x.data, x.stride, block, 0, num_chunks, c);
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
