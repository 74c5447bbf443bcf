// Operations on rows of tokens: normalization, rotary embedding, products with their epilogues.
#pragma once

#include "interface.h"
#include "product.h"

namespace {

inline bf16* bf16_row(const hr_step& step, int32_t buffer, int64_t row) {
    return (bf16*)step.buffers[buffer] + row * step.strides[buffer];
}

struct Range {
    int64_t from, to;
};

inline Range share(int64_t size, int thread, int num_threads) {
    return {size * thread / num_threads, size * (thread + 1) / num_threads};
}

// 1 / sqrt(mean of squares + eps), from four sums taken in turn.
inline float inverse_rms(const bf16* x, int64_t size, float eps) {
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
inline void normalize(const bf16* x, const float* weight, int64_t size, float eps, bool is_added,
                      bf16* out) {
    const Vec inverse = splat(inverse_rms(x, size, eps));
    for (int64_t i = 0; i < size; i += HR_LANES) {
        const int64_t rest = size - i;
        const Vec scaled = mul(mul(load_some(x + i, rest), inverse), load_some(weight + i, rest));
        store_some(out + i, is_added ? add(load_some(out + i, rest), scaled) : scaled, rest);
    }
}

inline void run_norm(const hr_op& op, const hr_step& step, Range rows, bool is_added, bf16* out,
                     int64_t out_stride) {
    for (int64_t row = rows.from; row < rows.to; ++row)
        normalize(bf16_row(step, op.input, row), op.norm, op.num_inputs, op.eps, is_added,
                  out + row * out_stride);
}

// One head, half-split: (a, b) -> (a cos - b sin, b cos + a sin). In place where `out` is `x`.
inline void rotate(const bf16* x, const float* norm, float eps, const float* angles, int64_t size,
                   bf16* out) {
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

// Head norms and rotary embedding of some heads of one token: queries in place; the new keys and
// values go to the cache.
inline void rotate_token(const hr_op& op, const hr_step& step, int64_t token, int64_t slot,
                         int64_t kv_head, int64_t num_kv_heads) {
    const int64_t dim = op.head_dim, heads = op.num_heads / op.num_kv_heads;
    const int64_t cache_row = op.num_kv_heads * dim;
    bf16* qkv = bf16_row(step, op.input, token);
    const float* angles = step.ropes[op.rope] + step.positions[token] * dim;
    bf16* key = (bf16*)op.pages + slot * cache_row;
    const auto rotate_heads = [&](int64_t first, int64_t count, bf16* out) {
        for (int64_t head = first; head < first + count; ++head, out += dim)
            rotate(qkv + head * dim, op.norm == nullptr ? nullptr : op.norm + head * dim, op.eps,
                   angles, dim, out);
    };
    rotate_heads(kv_head * heads, num_kv_heads * heads, qkv + kv_head * heads * dim);
    rotate_heads(op.num_heads + kv_head, num_kv_heads, key + kv_head * dim);
    memcpy(key + step.block_size * cache_row + kv_head * dim,
           qkv + (op.num_heads + op.num_kv_heads + kv_head) * dim,
           num_kv_heads * dim * sizeof(bf16));
}

// One block's share of one row: `sums` are 32 floats.
inline void finish_block(const hr_op& op, const hr_step& step, int64_t row, int64_t block,
                         const float* sums) {
    const bool is_gated = op.epilogue == HR_SILU_MUL || op.epilogue == HR_GELU_MUL;
    const int64_t width = is_gated ? kBlockRows / 2 : kBlockRows;
    const int64_t num_outputs = is_gated ? op.num_outputs / 2 : op.num_outputs;
    for (int64_t lane = 0; lane < width; lane += HR_LANES) {
        const int64_t n = block * width + lane, rest = num_outputs - n;
        if (rest <= 0) return;
        Vec value = load(sums + lane);
        if (op.bias != nullptr) value = add(value, load_some((const bf16*)op.bias + n, rest));
        if (op.epilogue == HR_STORE_F32) {
            float* out = (float*)step.buffers[op.output] + row * step.strides[op.output] +
                         op.output_column;
            store_some(out + n, value, rest);
            continue;
        }
        bf16* out = bf16_row(step, op.output, row) + op.output_column + n;
        if (is_gated) {
            Vec up = load(sums + width + lane);
            if (op.bias != nullptr) up = add(up, load_some((const bf16*)op.bias + num_outputs + n, rest));
            value = mul(op.epilogue == HR_SILU_MUL ? silu(value) : gelu_tanh(value), up);
        } else if (op.epilogue == HR_ADD) {
            value = add(load_some(out, rest), value);
        }
        store_some(out, value, rest);
    }
}

// Rows of a product's input.
struct Rows {
    const bf16* data;
    int64_t stride;
};

template <int B>
inline void multiply_and_finish(const hr_op& op, const hr_step& step, const Rows& x,
                                int64_t first_row, int64_t end_row, int64_t block) {
    alignas(64) float sums[kMaxRows * B * kBlockRows];
    const int64_t block_stride = block_size(op.num_inputs);
    const bf16* weight = (const bf16*)op.weight + block * block_stride;
    for (int64_t row = first_row; row < end_row; row += kMaxRows) {
        const int rows = end_row - row < kMaxRows ? (int)(end_row - row) : kMaxRows;
        multiply_rows<B>(rows, x.data + row * x.stride, x.stride, weight,
                         block_stride, op.num_inputs, sums, B * kBlockRows);
        for (int r = 0; r < rows; ++r)
            for (int b = 0; b < B; ++b)
                finish_block(op, step, row + r, block + b, sums + (r * B + b) * kBlockRows);
    }
}

// Every thread has its own rows of the weights, and no k is split. Rows of x come in groups that
// the second-level cache holds.
inline void run_product(const hr_op& op, const hr_step& step, const Rows& x, int thread,
                        int num_threads) {
    constexpr int64_t kRowsInCache = 16 * kMaxRows;
    const int64_t num_blocks = (op.num_outputs + kBlockRows - 1) / kBlockRows;
    const Range blocks = share(num_blocks, thread, num_threads);
    for (int64_t row = 0; row < step.num_tokens; row += kRowsInCache) {
        const int64_t end =
            row + kRowsInCache < step.num_tokens ? row + kRowsInCache : step.num_tokens;
        int64_t block = blocks.from;
        for (; block + 2 <= blocks.to; block += 2) multiply_and_finish<2>(op, step, x, row, end, block);
        if (block < blocks.to) multiply_and_finish<1>(op, step, x, row, end, block);
    }
}

}  // namespace
