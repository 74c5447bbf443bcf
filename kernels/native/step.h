// One thread's way through a step's operations, compiled once per instruction set.
#pragma once

#include "attention.h"
#include "quantized.h"
#include "shards.h"

namespace {

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

// Whether the operation finds its quantized input where the one before left it.
inline bool has_quantized_input(const Work& work, int64_t index) {
    return work.ops[index].is_input_kept && index > 0 && is_quantized(work.ops[index - 1].format);
}

// The input of a quantized product, normalized if it asks for that: made by every thread for
// itself where that is cheaper than meeting the others.
template <typename E>
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
        const E* x = row_of<E>(step, op.input, row);
        if (op.norm != nullptr) {
            normalize(x, op.norm, op.num_inputs, op.eps, false, (E*)own);
            x = (const E*)own;
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
            if (is_quantized(op.format))
                return run_quantized_product<E>(op, step,
                                                quantized_input<E>(work, index, thread, num_threads),
                                                thread, num_threads);
            return run_product(work, op, product_input<E>(work, op, thread, num_threads), thread,
                               num_threads);
        case HR_ATTENTION:
            return run_attention<E>(work, index, thread, num_threads);
        case HR_SUM:
            return run_sum<E>(op, step, thread, num_threads);
        case HR_MEET:
            return meet_shards(*(const hr_shards*)op.pages, thread);
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
        const bool is_last = i + 1 == work.num_ops;
        if (work.step->op_seconds != nullptr || (!is_last && !is_next_independent(work, i)))
            work.meet(work.barrier);
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
