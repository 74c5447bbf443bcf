// One thread's way through a step's operations, compiled once per instruction set.
#pragma once

#include "attention.h"

namespace {

// The input of a product, normalized if it asks for that.
template <typename E>
inline Rows<E> product_input(const Work& work, const hr_op& op, int thread, int num_threads) {
    const hr_step& step = *work.step;
    if (op.norm == nullptr) return {row_of<E>(step, op.input, 0), step.strides[op.input]};
    if (step.num_tokens * op.num_inputs <= kNormAlone) {
        E* out = (E*)(work.scratch + thread * work.scratch_bytes);
        run_norm(op, step, {0, step.num_tokens}, false, out, op.num_inputs);
        return {out, op.num_inputs};
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
            return run_attention<E>(work, index, thread, num_threads);
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
