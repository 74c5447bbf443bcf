// What a step's threads share: work lists, counters, scratch memory.
#pragma once

#include <stdint.h>

#include "items.h"

// Up to this many elements every thread normalizes all rows for itself, which is cheaper than
// meeting the others.
constexpr int64_t kNormAlone = 1 << 16;

struct Work {
    const hr_op* ops;
    int64_t num_ops;
    const hr_step* step;
    const GroupWork* groups;
    float* partials;
    char* scratch;
    int64_t scratch_bytes;  // per thread
    // Next free item of each operation, twice: computing and joining.
    int32_t* counters;  // [num_ops][2], used atomically
    void (*meet)(void* barrier);
    void* barrier;
};

// Rows of scores to draw from, shared out over the threads.
struct Draw {
    float* scores;  // [num_rows, vocab]
    int64_t num_rows;
    int64_t vocab;
    const hr_draw_row* rows;
    int64_t* token_ids;
};

// Instruction-set versions of one thread's share of a step.
extern "C" void hr_work_avx2(const Work& work, int thread, int num_threads);
extern "C" void hr_work_avx512(const Work& work, int thread, int num_threads);
extern "C" void hr_work_avx512_bf16(const Work& work, int thread, int num_threads);

// Instruction-set versions of one thread's share of the rows to draw from.
extern "C" void hr_draw_avx2(const Draw& draw, int thread, int num_threads);
extern "C" void hr_draw_avx512(const Draw& draw, int thread, int num_threads);
