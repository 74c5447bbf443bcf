// One thread's way through a step's operations, compiled once per instruction set.
#pragma once

#include "attention.h"
#include "quantized.h"

namespace {

inline int64_t take(int32_t* counter) {
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

// Each item turns its own queries and writes its own keys and values where it reads no others' new
// ones; otherwise that is done, and waited for, first.
inline void rotate_all(const Work& work, const hr_op& op, int thread, int num_threads) {
    const Range tokens = share(work.step->num_tokens, thread, num_threads);
    const int64_t* slots = work.groups[op.group].token_slots;
    for (int64_t token = tokens.from; token < tokens.to; ++token)
        rotate_token(op, *work.step, token, slots[token], 0, op.num_kv_heads);
    work.meet(work.barrier);
}

inline void run_attention(const Work& work, int64_t index, int thread, int num_threads) {
    const hr_op& op = work.ops[index];
    const GroupWork& group = work.groups[op.group];
    const bool is_rotated = op.rope < 0;
    if (!is_rotated && !group.is_alone) rotate_all(work, op, thread, num_threads);
    const Scratch scratch = cut_scratch(work.scratch + thread * work.scratch_bytes, kMaxItemRows,
                                        op.head_dim, op.num_kv_heads);
    const int64_t row_size = padded_dim(op.head_dim) + 2, count = group.num_items;
    int32_t* counters = work.counters + 2 * index;
    for (int64_t i; (i = take(counters)) < count;) {
        const Item& item = group.items[i];
        if (!is_rotated && group.is_alone)
            rotate_token(op, *work.step, item.first_row, group.token_slots[item.first_row],
                         item.kv_head, item.num_kv_heads);
        float* partial = item.part < 0 ? nullptr : work.partials + item.partial * row_size;
        attend(op, *work.step, item, partial, scratch);
    }
    if (!group.has_parts) return;
    work.meet(work.barrier);
    for (int64_t i; (i = take(counters + 1)) < count;) {
        const Item& item = group.items[i];
        if (item.part == 0)
            join_items(op, *work.step, item, work.partials + item.partial * row_size, scratch);
    }
}

// The input of a product, normalized if it asks for that.
inline Rows product_input(const Work& work, const hr_op& op, int thread, int num_threads) {
    const hr_step& step = *work.step;
    if (op.norm == nullptr) return {bf16_row(step, op.input, 0), step.strides[op.input]};
    if (step.num_tokens * op.num_inputs <= kNormAlone) {
        bf16* out = (bf16*)(work.scratch + thread * work.scratch_bytes);
        run_norm(op, step, {0, step.num_tokens}, false, out, op.num_inputs);
        return {out, op.num_inputs};
    }
    bf16* out = bf16_row(step, op.normed, 0);
    const int64_t stride = step.strides[op.normed];
    run_norm(op, step, share(step.num_tokens, thread, num_threads), false, out, stride);
    work.meet(work.barrier);
    return {out, stride};
}

// Whether the operation finds its quantized input where the one before left it.
inline bool has_quantized_input(const Work& work, int64_t index) {
    return work.ops[index].is_input_kept && index > 0 && is_quantized(work.ops[index - 1].format);
}

// The input of a quantized product, normalized if it asks for that: made by every thread for
// itself where that is cheaper than meeting the others.
inline QuantizedRows quantized_input(const Work& work, int64_t index, int thread,
                                     int num_threads) {
    const hr_op& op = work.ops[index];
    const hr_step& step = *work.step;
    const int64_t stride = num_quantized_blocks(op.num_inputs);
    const bool is_alone = step.num_tokens * op.num_inputs <= kQuantizeAlone;
    char* own = work.scratch + thread * work.scratch_bytes;
    QuantizedBlock* out = (QuantizedBlock*)(is_alone ? own + work.quantized_at : work.quantized);
    if (has_quantized_input(work, index)) return {out, stride};
    const Range rows = is_alone ? Range{0, step.num_tokens}
                                : share(step.num_tokens, thread, num_threads);
    for (int64_t row = rows.from; row < rows.to; ++row) {
        const bf16* x = bf16_row(step, op.input, row);
        if (op.norm != nullptr) {
            normalize(x, op.norm, op.num_inputs, op.eps, false, (bf16*)own);
            x = (const bf16*)own;
        }
        quantize_row(x, op.num_inputs, out + row * stride);
    }
    if (!is_alone) work.meet(work.barrier);
    return {out, stride};
}

// Whether the next operation neither reads what this one writes nor writes what it reads.
inline bool is_next_independent(const Work& work, int64_t index) {
    const hr_op& next = work.ops[index + 1];
    return next.kind == HR_PRODUCT && is_quantized(next.format) &&
           has_quantized_input(work, index + 1);
}

inline void run_step(const Work& work, int thread, int num_threads) {
    const hr_step& step = *work.step;
    for (int64_t i = 0; i < work.num_ops; ++i) {
        const hr_op& op = work.ops[i];
        switch (op.kind) {
            case HR_NORM:
            case HR_NORM_ADD:
                run_norm(op, step, share(step.num_tokens, thread, num_threads),
                         op.kind == HR_NORM_ADD, bf16_row(step, op.output, 0),
                         step.strides[op.output]);
                break;
            case HR_PRODUCT:
                if (is_quantized(op.format)) {
                    run_quantized_product(op, step, quantized_input(work, i, thread, num_threads),
                                          thread, num_threads);
                } else {
                    run_product(op, step, product_input(work, op, thread, num_threads), thread,
                                num_threads);
                }
                break;
            case HR_ATTENTION: run_attention(work, i, thread, num_threads); break;
        }
        if (i + 1 < work.num_ops && !is_next_independent(work, i)) work.meet(work.barrier);
    }
}

}  // namespace
