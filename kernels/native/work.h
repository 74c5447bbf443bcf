// What a step's threads share: the work list of attention, the slots of new tokens, scratch memory.
#pragma once

#include <stdint.h>

#include "interface.h"

constexpr int64_t kPart = 512;        // keys; absolute boundaries
constexpr int64_t kMaxItemRows = 96;  // tokens x query heads
// Up to this many elements every thread normalizes all rows for itself, which is cheaper than
// meeting the others.
constexpr int64_t kNormAlone = 1 << 16;

// The same for quantizing rows, which every thread might do for itself.
constexpr int64_t kQuantizeAlone = 1 << 14;

// Some tokens of one sequence, some K and V heads with their query heads, a range of keys.
struct Item {
    int64_t sequence;
    int64_t kv_head;         // the first
    int64_t num_kv_heads;
    int64_t first_row;       // flat row of the first token
    int64_t first_position;  // its position in the sequence
    int64_t num_tokens;
    int64_t from, to;        // keys
    int64_t part;            // -1: all parts; else which of `num_parts` items of this token
    int64_t num_parts;
    int64_t partial;         // where its sums go, in rows of the partial sums
};

struct GroupWork {
    const Item* items;
    int64_t num_items;
    bool has_parts;
    bool is_alone;  // no item needs what another one writes: single tokens in one part
    const int64_t* token_slots;  // [num_tokens]
};

struct Work {
    const hr_op* ops;
    int64_t num_ops;
    const hr_step* step;
    const GroupWork* groups;
    float* partials;
    char* scratch;
    int64_t scratch_bytes;  // per thread
    int64_t quantized_at;   // in the scratch of a thread: rows that it quantized for itself
    char* quantized;        // rows that all threads quantized together
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
