// One thread's way through a step's operations, compiled once per instruction set.
#pragma once

#include "attention.h"

namespace {

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
                run_product(op, step, product_input(work, op, thread, num_threads), thread,
                            num_threads);
                break;
            case HR_ATTENTION:
                if (step.format == HR_F32) {
                    run_attention<float>(work, i, thread, num_threads);
                } else if (step.format == HR_F16) {
                    run_attention<f16>(work, i, thread, num_threads);
                } else {
                    run_attention<bf16>(work, i, thread, num_threads);
                }
                break;
        }
        if (i + 1 < work.num_ops) work.meet(work.barrier);
    }
}

}  // namespace
