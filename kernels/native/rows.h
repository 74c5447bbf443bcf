// Operations on rows of tokens: normalization, rotary embedding, products with their epilogues.
#pragma once

#include "interface.h"
#include "product_float.h"
#if HR_HAS_AMX
#include "product_amx.h"
#endif
#include "work.h"

namespace {

// The format's number of an element type.
template <typename E>
constexpr int32_t kFormat = HR_BF16;
template <>
constexpr int32_t kFormat<f16> = HR_F16;
template <>
constexpr int32_t kFormat<float> = HR_F32;

template <typename E>
inline E* row_of(const hr_step& step, int32_t buffer, int64_t row) {
    return (E*)step.buffers[buffer] + row * step.strides[buffer];
}

struct Range {
    int64_t from, to;
};

inline Range share(int64_t size, int thread, int num_threads) {
    return {size * thread / num_threads, size * (thread + 1) / num_threads};
}

// 1 / sqrt(mean of squares + eps), from four sums taken in turn.
template <typename E>
inline float inverse_rms(const E* x, int64_t size, float eps) {
    Vec sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
    int turn = 0;
    for (int64_t i = 0; i < size; i += HR_LANES, turn = (turn + 1) % 4) {
        const Vec v = load_some(x + i, size - i);
        sums[turn] = fma(v, v, sums[turn]);
    }
    const float squares = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    return 1.0f / __builtin_sqrtf(squares / (float)size + eps);
}

// x / rms(x) * weight, or added to `out`; rounded once.
template <typename E>
inline void normalize(const E* x, const float* weight, int64_t size, float eps, bool is_added,
                      E* out) {
    const Vec inverse = splat(inverse_rms(x, size, eps));
    for (int64_t i = 0; i < size; i += HR_LANES) {
        const int64_t rest = size - i;
        const Vec scaled = mul(mul(load_some(x + i, rest), inverse), load_some(weight + i, rest));
        store_some(out + i, is_added ? add(load_some(out + i, rest), scaled) : scaled, rest);
    }
}

template <typename E>
inline void run_norm(const hr_op& op, const hr_step& step, Range rows, bool is_added, E* out,
                     int64_t out_stride) {
    for (int64_t row = rows.from; row < rows.to; ++row)
        normalize(row_of<E>(step, op.input, row), op.norm, op.num_inputs, op.eps, is_added,
                  out + row * out_stride);
}

// One head, half-split: (a, b) -> (a cos - b sin, b cos + a sin). In place where `out` is `x`.
template <typename E>
inline void rotate(const E* x, const float* norm, float eps, const float* angles, int64_t size,
                   E* out) {
    const int64_t half = size / 2;
    const Vec inverse = splat(norm == nullptr ? 1.0f : inverse_rms(x, size, eps));
    for (int64_t i = 0; i < half; i += HR_LANES) {
        const int64_t rest = half - i;
        Vec a = load_some(x + i, rest), b = load_some(x + half + i, rest);
        if (norm != nullptr) {
            a = mul(mul(a, inverse), load_some(norm + i, rest));
            b = mul(mul(b, inverse), load_some(norm + half + i, rest));
        }
        const Vec c = load_some(angles + i, rest), s = load_some(angles + half + i, rest);
        store_some(out + i, sub(mul(a, c), mul(b, s)), rest);
        store_some(out + half + i, fma(a, s, mul(b, c)), rest);
    }
}

// One block's share of one row: `sums` are 32 floats.
template <typename E>
inline void finish_block(const hr_op& op, const hr_step& step, int64_t row, int64_t block,
                         const float* sums) {
    const bool is_gated = op.epilogue == HR_SILU_MUL || op.epilogue == HR_GELU_MUL;
    const int64_t width = is_gated ? kBlockRows / 2 : kBlockRows;
    const int64_t num_outputs = is_gated ? op.num_outputs / 2 : op.num_outputs;
    const E* bias = (const E*)op.bias;
    for (int64_t lane = 0; lane < width; lane += HR_LANES) {
        const int64_t n = block * width + lane, rest = num_outputs - n;
        if (rest <= 0) return;
        Vec value = load(sums + lane);
        if (bias != nullptr) value = add(value, load_some(bias + n, rest));
        if (op.epilogue == HR_STORE_F32) {
            store_some(row_of<float>(step, op.output, row) + op.output_column + n, value, rest);
            continue;
        }
        E* out = row_of<E>(step, op.output, row) + op.output_column + n;
        if (is_gated) {
            Vec up = load(sums + width + lane);
            if (bias != nullptr) up = add(up, load_some(bias + num_outputs + n, rest));
            value = mul(op.epilogue == HR_SILU_MUL ? silu(value) : gelu_tanh(value), up);
        } else if (op.epilogue == HR_ADD) {
            value = add(load_some(out, rest), value);
        }
        store_some(out, value, rest);
    }
}

// Rows of a product's input, `stride` elements apart. If that is kPairedRows, then every
// kMaxRowsAlone<E> of them lie as `pair_rows` puts them.
template <typename E>
struct Rows {
    const E* data;
    int64_t stride;

    // Some of them, which one pass takes, from input k on.
    const E* at(Range rows, int64_t k, int64_t num_inputs) const {
        if (stride != kPairedRows) return data + rows.from * stride + k;
        return data + rows.from * even(num_inputs) + (rows.to - rows.from) * k;
    }
};

// A product with a matrix of floats: f16 is multiplied as f32.
template <typename E>
struct FloatProduct {
    typedef E Input;
};
template <>
struct FloatProduct<f16> {
    typedef float Input;
};

// Some rows, at most kRowsTogether, times B blocks. A tile of the weights stays in the second-level
// cache for all passes over it, and these fetch the next tile from memory bit by bit.
template <int B, typename E, typename X>
inline void multiply_blocks(const hr_op& op, const hr_step& step, const Rows<X>& x,
                            int64_t first_row, int64_t num_rows, int64_t block, float* wide) {
    constexpr int64_t kMost = B == 1 ? kMaxRowsAlone<E> : kMaxRows;
    constexpr int64_t kStepBytes = kBlockRows * (kFormat<E> == HR_BF16 ? 4 : sizeof(E));
    alignas(64) float sums[kRowsTogether * B * kBlockRows];
    const int64_t size = block_bytes(kFormat<E>, op.num_inputs) / (int64_t)sizeof(E);
    const E* weight = (const E*)op.weight + block * size;
    const int64_t num_passes = (num_rows + kMost - 1) / kMost;
    constexpr int64_t kMostInputs = kFormat<E> == HR_BF16 ? 2 * kTileInputs : kTileInputs;
    const int64_t num_tiles = num_passes == 1 ? 1 : (op.num_inputs + kMostInputs - 1) / kMostInputs;
    const int64_t tile = ((op.num_inputs + num_tiles - 1) / num_tiles + 31) / 32 * 32;
    for (int64_t k = 0; k < op.num_inputs; k += tile) {
        const int64_t num_inputs = k + tile < op.num_inputs ? tile : op.num_inputs - k;
        const E* w = weight + k * kBlockRows;
        const E* next = k + tile < op.num_inputs ? w + tile * kBlockRows : weight + B * size;
        const bool is_widened = kFormat<E> == HR_F16 && num_passes >= kWidenFromPasses;
        if constexpr (kFormat<E> == HR_F16) {
            for (int b = 0; is_widened && b < B; ++b)
                widen(w + b * size, num_inputs * kBlockRows, wide + b * kTileInputs * kBlockRows);
        }
        for (int64_t pass = 0; pass < num_passes; ++pass) {
            const int64_t last = (pass + 1) * kMost;
            const Range rows = {pass * kMost, last < num_rows ? last : num_rows};
            const E* fetched = next + num_inputs * kBlockRows * pass / num_passes;
            const Ahead ahead = num_passes == 1
                                    ? own_weights(w, size, kStepBytes)
                                    : Ahead{{(const char*)fetched, (const char*)(fetched + size)},
                                            kStepBytes / num_passes};
            const auto multiply_by = [&](const auto* weights, int64_t weights_stride) {
                multiply_rows<B>((int)(rows.to - rows.from), x.at(rows, k, op.num_inputs), x.stride,
                                 weights, weights_stride, num_inputs, k == 0,
                                 sums + rows.from * B * kBlockRows, B * kBlockRows, ahead);
            };
            if constexpr (kFormat<E> == HR_F16) {
                if (is_widened) {
                    multiply_by((const float*)wide, kTileInputs * kBlockRows);
                    continue;
                }
            }
            multiply_by(w, size);
        }
    }
    for (int64_t row = 0; row < num_rows; ++row)
        for (int b = 0; b < B; ++b)
            finish_block<E>(op, step, first_row + row, block + b,
                            sums + (row * B + b) * kBlockRows);
}

#if HR_HAS_BF16
inline Rows<bf16> pair_all_rows(const Rows<bf16>& x, int64_t num_rows, int64_t num_inputs,
                                bf16* out) {
    constexpr int64_t kMost = kMaxRowsAlone<bf16>;
    for (int64_t row = 0; row < num_rows; row += kMost) {
        const int64_t rows = num_rows - row < kMost ? num_rows - row : kMost;
        pair_rows(x.data + row * x.stride, x.stride, rows, num_inputs,
                  out + row * even(num_inputs));
    }
    return {out, kPairedRows};
}
#endif

// A matrix of floats, of the same format as the rows. Every thread has its own blocks of the
// weights, and no k is split. f16 rows are made wide, many bf16 rows paired, once for all blocks.
template <typename E>
inline void multiply_matrix(const hr_op& op, const hr_step& step, const Rows<E>& x, Range blocks,
                            float* scratch) {
    for (int64_t row = 0; row < step.num_tokens; row += kRowsTogether) {
        const int64_t rest = step.num_tokens - row;
        const int64_t num_rows = rest < kRowsTogether ? rest : kRowsTogether;
        const E* first = x.data + row * x.stride;
        Rows<typename FloatProduct<E>::Input> some;
        if constexpr (kFormat<E> == HR_F16) {
            some = {scratch, row_stride(op.num_inputs, 4)};
            for (int64_t r = 0; r < num_rows; ++r)
                widen(first + r * x.stride, op.num_inputs, scratch + r * some.stride);
        } else {
            some = {first, x.stride};
#if HR_HAS_BF16
            if constexpr (kFormat<E> == HR_BF16) {
                if (num_rows >= kManyRows<bf16>)
                    some = pair_all_rows(some, num_rows, op.num_inputs, (bf16*)scratch);
            }
#endif
        }
        float* wide = scratch + num_rows * row_stride(op.num_inputs, 4);
        const bool is_paired = num_rows <= kMaxRows ||
                               (num_rows > kMaxRowsAlone<E> && num_rows < kManyRows<E>);
        int64_t block = blocks.from;
        for (; is_paired && block + 2 <= blocks.to; block += 2)
            multiply_blocks<2, E>(op, step, some, row, num_rows, block, wide);
        for (; block < blocks.to; ++block)
            multiply_blocks<1, E>(op, step, some, row, num_rows, block, wide);
    }
}

// Chooses by the format of the weights; `can_run` of library.cpp refuses all others.
template <typename E>
inline void run_product(const Work& work, const hr_op& op, const Rows<E>& x, int thread,
                        int num_threads) {
    const Range blocks = share((op.num_outputs + kBlockRows - 1) / kBlockRows, thread, num_threads);
    char* scratch = work.scratch + thread * work.scratch_bytes +
                    normed_bytes(op, work.step->num_tokens, sizeof(E));
#if HR_HAS_AMX
    if constexpr (kFormat<E> == HR_BF16) {
        const hr_step& step = *work.step;
        if (op.format == HR_BF16 && are_tiles_used(step.num_tokens, op.num_inputs)) {
            run_tile_product(x.data, x.stride, step.num_tokens, (const bf16*)op.weight,
                             op.num_outputs, op.num_inputs, scratch, thread, num_threads,
                             [&](int64_t row, int64_t block, const float* sums) {
                                 finish_block<bf16>(op, step, row, block, sums);
                             });
            return;
        }
    }
#endif
    switch (op.format) {
        case kFormat<E>: return multiply_matrix(op, *work.step, x, blocks, (float*)scratch);
    }
}

}  // namespace
