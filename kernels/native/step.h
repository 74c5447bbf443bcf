// One thread's way through a step's operations, compiled once per instruction set.
#pragma once

#include "attention.h"

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
        rotate_token<bf16>(op, *work.step, token, slots[token], 0, op.num_kv_heads);
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
            rotate_token<bf16>(op, *work.step, item.first_row, group.token_slots[item.first_row],
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
template <typename E>
inline Rows<E> product_input(const Work& work, const hr_op& op, int thread, int num_threads) {
    const hr_step& step = *work.step;
    if (op.norm == nullptr) return {row_of<E>(step, op.input, 0), step.strides[op.input]};
    if (normed_bytes(op, step.num_tokens, sizeof(E)) > 0) {
        E* out = (E*)(work.scratch + thread * work.scratch_bytes);
        const int64_t stride = row_stride(op.num_inputs, sizeof(E));
        run_norm(op, step, {0, step.num_tokens}, false, out, stride);
        return {out, stride};
    }
    E* out = row_of<E>(step, op.normed, 0);
    const int64_t stride = step.strides[op.normed];
    run_norm(op, step, share(step.num_tokens, thread, num_threads), false, out, stride);
    work.meet(work.barrier);
    return {out, stride};
}

template <typename E>
inline void run_op(const Work& work, int64_t index, int thread, int num_threads) {
    const hr_step& step = *work.step;
    const hr_op& op = work.ops[index];
    switch (op.kind) {
        case HR_NORM:
        case HR_NORM_ADD:
            return run_norm(op, step, share(step.num_tokens, thread, num_threads),
                            op.kind == HR_NORM_ADD, row_of<E>(step, op.output, 0),
                            step.strides[op.output]);
        case HR_PRODUCT:
            return run_product(work, op, product_input<E>(work, op, thread, num_threads), thread,
                               num_threads);
        case HR_ATTENTION:
            if constexpr (kFormat<E> == HR_BF16) run_attention(work, index, thread, num_threads);
    }
}

// All operations, with rows of E.
template <typename E>
inline void run_ops(const Work& work, int thread, int num_threads) {
    double* seconds = thread == 0 ? work.step->op_seconds : nullptr;
    double before = seconds == nullptr ? 0.0 : work.seconds();
    for (int64_t i = 0; i < work.num_ops; ++i) {
        run_op<E>(work, i, thread, num_threads);
        // The caller waits for all threads after the last one, unless that is to be counted.
        if (i + 1 < work.num_ops || work.step->op_seconds != nullptr) work.meet(work.barrier);
        if (seconds == nullptr) continue;
        const double now = work.seconds();
        seconds[i] += now - before;
        before = now;
    }
}

inline void run_step(const Work& work, int thread, int num_threads) {
    switch (work.step->format) {
        case HR_F16: return run_ops<f16>(work, thread, num_threads);
        case HR_F32: return run_ops<float>(work, thread, num_threads);
        default: return run_ops<bf16>(work, thread, num_threads);
    }
}

}  // namespace
