// The C interface of the native kernels: plain structs, sizes in elements, no ownership.
//
// A step runs as one call, `hr_run`: a list of operations over numbered row buffers, each row
// holding one token. The list is made once; what changes from step to step is in `hr_step`.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    HR_INTERFACE_VERSION = 5,
    HR_MAX_BUFFERS = 10,
    HR_MAX_ROPES = 4,
    HR_SHARD_LINE = 16,  // words of a cache line
};

// What a call may run on. Results depend on the family: AVX512, AVX512_VNNI and AMX are one, NEON
// and NEON_DOTPROD another.
enum hr_isa {
    HR_AVX2 = 0,
    HR_AVX512 = 1,
    HR_AVX512_VNNI = 2,
    HR_AVX512_BF16 = 3,  // with VNNI
    HR_AMX = 4,          // with VNNI; bf16 and int8 tiles
    HR_NEON = 5,          // of any 64-bit Arm processor
    HR_NEON_DOTPROD = 6,  // with dot products of bytes
    HR_NUM_ISAS = 7,
};

// Of numbers: rows of a step have one of the first three, packed matrices any, and the cache the
// first three or INT8. From Q8_0 on these are the blocks of GGUF files.
enum hr_format {
    HR_BF16 = 0,
    HR_F16 = 1,
    HR_F32 = 2,
    HR_INT8 = 3,  // a scale per row of a matrix; per token and head of the cache
    HR_Q8_0 = 4,
    HR_Q4_0 = 5,
    HR_Q4_1 = 6,
    HR_Q5_0 = 7,
    HR_Q5_1 = 8,
    HR_Q4_K = 9,
    HR_Q5_K = 10,
    HR_Q6_K = 11,
};

enum hr_kind {
    HR_NORM = 0,       // output = norm(input) * weight
    HR_NORM_ADD = 1,   // output += norm(input) * weight
    HR_PRODUCT = 2,    // output = epilogue(input W^T + bias), perhaps of the normalized input
    HR_ATTENTION = 3,  // input: qkv, of which queries are turned in place; new K and V go to the
                       // cache; output: [tokens, heads * head_dim]
    HR_SUM = 4,        // output = (ADD: +=) the sum of all shards' parts in area `input`
    HR_MEET = 5,       // wait for all shards
};

enum hr_epilogue {
    HR_STORE = 0,      // in the step's format
    HR_STORE_F32 = 1,  // the output buffer holds floats
    HR_ADD = 2,        // output += product, one rounding
    HR_SILU_MUL = 3,   // output = silu(gate) * up; outputs are half of the product's
    HR_GELU_MUL = 4,   // output = gelu_tanh(gate) * up
};

// How a packed matrix orders its rows; in blocks of 32, or of 16 gate rows and 16 up rows.
enum hr_lanes { HR_PLAIN = 0, HR_GATE = 1, HR_UP = 2 };

typedef struct {
    int32_t kind;
    int32_t epilogue;
    int32_t input;         // buffer
    int32_t output;        // buffer
    int32_t normed;        // buffer for the normalized input of a product
    int32_t rope;          // of attention: which table; -1: queries and cache are ready
    const void* weight;    // packed matrix
    const float* norm;     // [size] of a norm or before a product; [heads + kv_heads, head_dim] of
                           // attention with head norms; or null
    const void* bias;      // [num_outputs] in the step's format or null; gate first, then up
    int64_t num_outputs;   // rows of the weight matrix; size of a norm
    int64_t num_inputs;
    float eps;             // of the norm
    float scale;           // of attention scores
    float soft_cap;        // of attention scores; 0: none
    int32_t group;         // which KV group
    void* pages;           // of attention: the layer's part of the cache; of SUM and MEET: hr_shards
    const float* sinks;    // of attention: [num_heads] scores of a key without a value, or null
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t format;        // of the packed matrix
    int32_t cache_format;  // of attention
    int32_t is_input_kept;  // the operation before was a product of the same input and norm
    int64_t output_column;  // where the product's outputs begin in the rows of the output
} hr_op;

// One KV group of a step.
typedef struct {
    const int64_t* const* slots;  // [num_sequences]: K row of every token of the sequence
    int64_t window;               // tokens a query sees; 0: all
} hr_group;

typedef struct {
    int64_t num_tokens;
    int64_t num_sequences;
    int64_t block_size;
    int64_t num_groups;
    const int64_t* query_starts;   // [num_sequences + 1]: flat rows
    const int64_t* context_lens;   // [num_sequences]: tokens in the cache after this step
    const int64_t* positions;      // [num_tokens]: for rotary
    const hr_group* groups;
    void* buffers[HR_MAX_BUFFERS];
    int64_t strides[HR_MAX_BUFFERS];   // elements from row to row
    const float* ropes[HR_MAX_ROPES];  // [positions, head_dim]: cosines, then sines
    double* op_seconds;  // [num_ops]: the time that each took is added; or null
    int32_t format;      // of row buffers, but for those that STORE_F32 writes
    int32_t unused;      // keeps the size a multiple of 8
} hr_step;

// The workers that divide a model's layers, of which this is one. All run the same operations.
typedef struct {
    int32_t rank;
    int32_t size;
    uint32_t* arrivals;         // shared: [size][HR_SHARD_LINE]: how often each worker has met the others
    uint32_t* meetings;         // [num_threads][HR_SHARD_LINE]: how often each thread of this one has
    const float* const* parts;  // shared: [areas][size]: rows of `num_outputs` of the operation
} hr_shards;

// How one row of logits is drawn from.
typedef struct {
    int64_t row;            // which of the logits
    int64_t best;           // the lowest id of its largest logit, which is finite
    double top_p;           // 1: no limit
    uint64_t seed;
    int64_t top_k;          // 0: no limit
    float min_score;        // the lowest that stays; -Inf: all
    uint32_t choice_index;  // place in the random stream, with the next one
    uint32_t output_index;
    float temperature;
} hr_draw_row;

typedef struct hr_pool hr_pool;

#pragma GCC visibility push(default)

int32_t hr_interface_version(void);

// Sizes of the structs above, for callers that declare them in another language.
int64_t hr_op_bytes(void);
int64_t hr_group_bytes(void);
int64_t hr_step_bytes(void);
int64_t hr_draw_row_bytes(void);

// Bit i: this machine can run instruction set i. The first call tries tiles out, if it has them.
int32_t hr_machine(void);

// Why this machine cannot run an instruction set: a clause in English; null if it can.
const char* hr_why_not(int32_t isa);

// `num_threads` counts the calling thread. The others are pinned to `cpus` [num_threads - 1], if that
// is not null. Null if threads cannot be started or pinned.
hr_pool* hr_pool_new(int32_t num_threads, const int32_t* cpus);
void hr_pool_free(hr_pool* pool);

// 0; -1 if memory for the step's work list is missing; -2, before anything is computed, if there is
// no code for an operation: a float matrix must have the format of the rows. One call at a time per
// pool.
int32_t hr_run(hr_pool* pool, int32_t isa, const hr_op* ops, int64_t num_ops, const hr_step* step);

// Bytes of a packed matrix; -1 if the format cannot have rows of `num_inputs`.
int64_t hr_packed_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs);

// Put `num_rows` rows into a packed matrix, which holds zeros before the first call. The first of
// them becomes its row `first_row` (among the gate or up rows, if `lanes` says so). They lie in
// `rows_format`: that of the matrix, or bf16, f16 or f32 for a matrix of INT8 and of these three.
// 0, or -1 if the one cannot be made of the other.
int32_t hr_pack(hr_pool* pool, const void* rows, int32_t rows_format, int64_t num_rows,
                int64_t num_inputs, void* packed, int32_t format, int64_t first_row,
                int32_t lanes);

// Rows `ids` of a packed matrix, times `scale`, rounded to `out_format` (one of the first three):
// [num_ids, num_inputs]. 0, or -1 if there is no code for these formats.
int32_t hr_lookup(hr_pool* pool, const void* packed, int32_t format, int64_t num_inputs,
                  const int64_t* ids, int64_t num_ids, float scale, int32_t out_format, void* out);

// Of each row of `scores` [num_rows, vocab] the largest score and the lowest id that has it; the
// first that is not a number is larger than any. 0, or -1 if memory is missing.
int32_t hr_argmax(hr_pool* pool, int32_t isa, const float* scores, int64_t num_rows, int64_t vocab,
                  float* maxima, int64_t* token_ids);

// Draw one token from each of `num_rows` rows of `logits` [*, vocab], where -Inf excludes a token. A
// row's token depends on nothing else. `scores` [num_rows, vocab], if not null, become what is drawn
// from: logits less their maximum, over the temperature, at -Inf what the row's filters drop. 0, or
// -1 if memory is missing.
int32_t hr_draw(hr_pool* pool, int32_t isa, const float* logits, int64_t vocab,
                const hr_draw_row* rows, int64_t num_rows, float* scores, int64_t* token_ids);

// Scores of tokens of `num_rows` rows of `logits` [*, vocab], those with the numbers `rows`: log
// probabilities or, where `maxima` is null, the logits. `maxima` [num_rows] are the rows' largest
// logits, which are finite. What comes out has rows of `stride`, of which 1 + num_tops[i] <= 1 +
// vocab are filled: `token_ids[i]`, then the best, the lower id first among equal scores. `ranks`:
// 1 + how many tokens have a score above the first one's.
void hr_score(hr_pool* pool, int32_t isa, const float* logits, int64_t vocab, const int64_t* rows,
              int64_t num_rows, const int64_t* token_ids, const int64_t* num_tops,
              const float* maxima, int64_t stride, float* scores, int64_t* ids, int64_t* ranks);

// Arithmetic on registers, for measuring: `rounds` times, on every thread, some of the instruction
// that products of a matrix in `format` use. Returns the operations of all threads, a multiply-add
// being two; 0 if there is no code for this instruction set.
double hr_peak(hr_pool* pool, int32_t isa, int32_t format, int64_t rounds);

#pragma GCC visibility pop

#ifdef __cplusplus
}
#endif
