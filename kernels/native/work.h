// What a step's threads share: work lists, counters, scratch memory.
#pragma once

#include <stdint.h>

#include "items.h"

constexpr int64_t kBlockRows = 32;  // of a packed matrix
// Up to this many elements every thread normalizes all rows for itself, which is cheaper than
// meeting the others.
constexpr int64_t kNormAlone = 1 << 16;
// A product takes this many rows at a time and, if they need more than one pass over the weights,
// at most this many inputs, in bf16 twice as many: what the second-level cache holds.
constexpr int64_t kRowsTogether = 96;
constexpr int64_t kTileInputs = 512;
// Rows of x that one pass of a product by tiles takes, and blocks of 32 outputs whose sums wait at
// once: the scratch memory of one thread for it.
constexpr int64_t kPassRows = 256;
constexpr int64_t kGroupBlocks = 8;
constexpr int64_t kTileSumsBytes = kPassRows * kGroupBlocks * 32 * 4;

// The same for quantizing rows, which every thread might do for itself.
constexpr int64_t kQuantizeAlone = 1 << 14;

// Of rows and float matrices.
inline int64_t format_bytes(int32_t format) { return format == HR_F32 ? 4 : 2; }

// Of one block of a packed float matrix. BF16 is padded with zeros to the 32 k of AMX's tiles.
inline int64_t block_bytes(int32_t format, int64_t num_inputs) {
    const int64_t inputs = format == HR_BF16 ? (num_inputs + 31) / 32 * 32 : num_inputs;
    return inputs * kBlockRows * format_bytes(format);
}

// Elements from row to row, at least `size`, for rows in scratch memory: an odd number of cache
// lines, so that several rows do not compete for the same places of the first-level cache.
inline int64_t row_stride(int64_t size, int64_t element_bytes) {
    const int64_t per_line = 64 / element_bytes;
    return ((size + per_line - 1) / per_line | 1) * per_line;
}

inline int64_t even(int64_t size) { return (size + 1) & ~(int64_t)1; }

// What one thread's scratch memory holds during a product: first the rows that it has normalized,
// then, for f16, rows and weights as floats, for bf16 rows in pairs or sums of tiles.
inline int64_t normed_bytes(const hr_op& op, int64_t num_tokens, int64_t element_bytes) {
    if (op.norm == nullptr || num_tokens * op.num_inputs > kNormAlone) return 0;
    return num_tokens * row_stride(op.num_inputs, element_bytes) * element_bytes;
}

inline int64_t product_scratch_bytes(const hr_op& op, const hr_step& step) {
    const int64_t normed = normed_bytes(op, step.num_tokens, format_bytes(step.format));
    if (op.format == HR_F32) return normed;
    const int64_t rows = step.num_tokens < kRowsTogether ? step.num_tokens : kRowsTogether;
    if (op.format == HR_BF16) {
        const int64_t paired = rows * even(op.num_inputs) * 2;
        return normed + (paired > kTileSumsBytes ? paired : kTileSumsBytes);
    }
    return normed + (rows * row_stride(op.num_inputs, 4) + 2 * kBlockRows * kTileInputs) * 4;
}

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
    double (*seconds)();  // of a clock
};

// The largest of some scores, and where it is; token -1: there are none.
struct Best {
    float score;
    int64_t token;
};

// Rows whose best scores are sought, by every thread in a part of their columns.
struct Argmax {
    const float* scores;  // [num_rows, vocab]
    int64_t num_rows;
    int64_t vocab;
    Best* bests;  // [num_threads, num_rows]
};

// Rows of logits to draw from, shared out over the threads.
struct Draw {
    const float* logits;  // [*, vocab]
    int64_t num_rows;
    int64_t vocab;
    const hr_draw_row* rows;
    float* scores;  // [num_rows, vocab], or null
    int64_t* token_ids;
    float* memory;  // [num_threads, draw_memory(vocab)]
};

// Floats of scratch memory for a thread that draws: scores twice, and what it writes behind some.
inline int64_t draw_memory(int64_t vocab) { return 2 * vocab + kMaxLanes; }

// Rows of which some tokens are to be scored, as `hr_score` takes them.
struct Scoring {
    const float* logits;
    int64_t num_rows;
    int64_t vocab;
    const int64_t* rows;
    const int64_t* token_ids;
    const int64_t* num_tops;
    const float* maxima;
    int64_t stride;
    float* scores;
    int64_t* ids;
    int64_t* ranks;
};

// Rows for a packed matrix, as `hr_pack` takes them.
struct Packing {
    const void* rows;
    int32_t rows_format;
    int64_t num_rows, num_inputs;
    void* packed;
    int32_t format;
    int64_t first_row;
    int32_t lanes;
};

// Rows of a packed matrix, as `hr_lookup` takes them.
struct Lookup {
    const void* packed;
    int32_t format;
    int64_t num_inputs;
    const int64_t* ids;
    int64_t num_ids;
    float scale;
    int32_t out_format;
    void* out;
};

// Instruction-set versions of one thread's share of a step.
extern "C" void hr_work_avx2(const Work& work, int thread, int num_threads);
extern "C" void hr_work_avx512(const Work& work, int thread, int num_threads);
extern "C" void hr_work_avx512_vnni(const Work& work, int thread, int num_threads);
extern "C" void hr_work_avx512_bf16(const Work& work, int thread, int num_threads);
extern "C" void hr_work_amx(const Work& work, int thread, int num_threads);
extern "C" void hr_work_neon(const Work& work, int thread, int num_threads);
extern "C" void hr_work_neon_dotprod(const Work& work, int thread, int num_threads);

// Instruction-set versions of one thread's share of what is done with rows of scores.
extern "C" void hr_argmax_avx2(const Argmax& argmax, int thread, int num_threads);
extern "C" void hr_argmax_avx512(const Argmax& argmax, int thread, int num_threads);
extern "C" void hr_draw_avx2(const Draw& draw, int thread, int num_threads);
extern "C" void hr_draw_avx512(const Draw& draw, int thread, int num_threads);
extern "C" void hr_score_avx2(const Scoring& scoring, int thread, int num_threads);
extern "C" void hr_score_avx512(const Scoring& scoring, int thread, int num_threads);
extern "C" void hr_argmax_neon(const Argmax& argmax, int thread, int num_threads);
extern "C" void hr_draw_neon(const Draw& draw, int thread, int num_threads);
extern "C" void hr_score_neon(const Scoring& scoring, int thread, int num_threads);

// One thread's share of packing and looking up; every processor of its kind that runs anything runs
// these.
extern "C" void hr_pack_avx2(const Packing& packing, int thread, int num_threads);
extern "C" void hr_pack_neon(const Packing& packing, int thread, int num_threads);
extern "C" void hr_lookup_avx2(const Lookup& lookup, int thread, int num_threads);
extern "C" void hr_lookup_neon(const Lookup& lookup, int thread, int num_threads);
