// The C interface: instruction sets, packing, and running a step.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "interface.h"
#include "machine.h"
#include "pack_quantized.h"
#include "peak.h"
#include "plan.h"
#include "pool.h"
#include "quantized_layout.h"
#include "work.h"

namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kLookupTogether = 16;  // rows below which one thread looks them up

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t rounded_up(int64_t a, int64_t b) { return divided_up(a, b) * b; }

// Kept from step to step, so that a step allocates nothing once the sizes have been met.
struct StepMemory {
    std::vector<GroupPlan> plans;
    std::vector<GroupWork> groups;
    std::vector<int32_t> counters;
    std::vector<float> partials;
    std::vector<char> scratch;
    std::vector<char> quantized;
    std::vector<Best> bests;
    std::vector<char> drawing;
};

// What quantized products need: rows in blocks of a cache line, and a row for its norm.
struct QuantizedSizes {
    int64_t row = 0, alone = 0, together = 0;

    void add(const hr_op& op, int64_t num_tokens) {
        const int64_t rows = num_tokens * divided_up(op.num_inputs, kChunkInputs) * kCacheLine;
        int64_t& size = num_tokens * op.num_inputs <= kQuantizeAlone ? alone : together;
        size = std::max(size, rows);
        if (op.norm != nullptr)
            row = std::max(row, rounded_up(op.num_inputs * (int64_t)sizeof(float), kCacheLine));
    }
};

char* aligned(std::vector<char>& memory, int64_t bytes) {
    memory.resize(bytes + kCacheLine);
    const auto address = (uintptr_t)memory.data();
    return memory.data() + (rounded_up(address, kCacheLine) - address);
}

void prepare(StepMemory& memory, Work& work, int num_threads) {
    memory.plans.resize(work.step->num_groups);
    memory.groups.resize(work.step->num_groups);
    for (GroupPlan& plan : memory.plans) plan.clear();
    memory.counters.assign(2 * work.num_ops, 0);
    int64_t widest = 0, scratch = 0;
    QuantizedSizes quantized;
    for (int64_t i = 0; i < work.num_ops; ++i) {
        const hr_op& op = work.ops[i];
        if (op.kind == HR_PRODUCT && is_quantized(op.format))
            quantized.add(op, work.step->num_tokens);
        else if (op.kind == HR_PRODUCT)
            scratch = std::max(scratch, product_scratch_bytes(op, *work.step));
        if (op.kind != HR_ATTENTION) continue;
        widest = std::max<int64_t>(widest, op.head_dim);
        scratch = std::max(scratch, scratch_layout(op.head_dim).bytes);
        GroupPlan& plan = memory.plans[op.group];
        if (!plan.token_slots.empty()) continue;
        plan.make(*work.step, work.step->groups[op.group], op, num_threads);
        const bool is_alone = !plan.has_parts && work.step->num_tokens == work.step->num_sequences;
        memory.groups[op.group] = {plan.items.data(), (int64_t)plan.items.size(), plan.has_parts,
                                   is_alone, plan.token_slots.data()};
    }
    int64_t num_partials = 0;
    for (const GroupPlan& plan : memory.plans)
        num_partials = std::max(num_partials, plan.num_partials);
    memory.partials.resize(num_partials * partial_size(widest));
    work.quantized_at = quantized.row;
    work.scratch_bytes = rounded_up(std::max(scratch, quantized.row + quantized.alone), 4096);
    work.scratch = aligned(memory.scratch, work.scratch_bytes * num_threads);
    work.quantized = aligned(memory.quantized, quantized.together);
    work.groups = memory.groups.data();
    work.partials = memory.partials.data();
    work.counters = memory.counters.data();
}

}  // namespace

struct hr_pool {
    hr_pool(int num_threads, const int32_t* cpus) : threads(num_threads, cpus) {}

    ThreadPool threads;
    StepMemory memory;
};

namespace {

using WorkFunction = void (*)(const Work&, int, int);

// What is done with rows of scores. Nothing of it is a product, so that it has fewer versions.
struct ScoresFunctions {
    void (*argmax)(const Argmax&, int, int);
    void (*draw)(const Draw&, int, int);
    void (*score)(const Scoring&, int, int);
};

// The code for instruction sets; null for those of other processors.
#if defined(__aarch64__)
constexpr WorkFunction kWork[HR_NUM_ISAS] = {
    nullptr, nullptr, nullptr, nullptr, nullptr, hr_work_neon, hr_work_neon_dotprod,
};
constexpr ScoresFunctions kNeonScores = {hr_argmax_neon, hr_draw_neon, hr_score_neon};
constexpr ScoresFunctions kScores[HR_NUM_ISAS] = {{}, {}, {}, {}, {}, kNeonScores, kNeonScores};
constexpr auto kPack = hr_pack_neon;
constexpr auto kLookup = hr_lookup_neon;
#else
#ifdef HR_WITHOUT_AMX
constexpr WorkFunction kWorkAmx = nullptr;
#else
constexpr WorkFunction kWorkAmx = hr_work_amx;
#endif
constexpr WorkFunction kWork[HR_NUM_ISAS] = {
    hr_work_avx2, hr_work_avx512, hr_work_avx512_vnni, hr_work_avx512_bf16, kWorkAmx,
    nullptr, nullptr,
};
constexpr ScoresFunctions kAvx2Scores = {hr_argmax_avx2, hr_draw_avx2, hr_score_avx2};
constexpr ScoresFunctions kAvx512Scores = {hr_argmax_avx512, hr_draw_avx512, hr_score_avx512};
constexpr ScoresFunctions kScores[HR_NUM_ISAS] = {
    kAvx2Scores, kAvx512Scores, kAvx512Scores, kAvx512Scores, kAvx512Scores, {}, {},
};
constexpr auto kPack = hr_pack_avx2;
constexpr auto kLookup = hr_lookup_avx2;
#endif

struct Call {
    const Work* work;
    WorkFunction function;
};

void run_call(void* argument, int thread, int num_threads) {
    const Call& call = *(const Call*)argument;
    call.function(*call.work, thread, num_threads);
}

void meet(void* barrier) { ((Barrier*)barrier)->wait(); }

double seconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now).count();
}

void pack_quantized_share(void* argument, int thread, int num_threads) {
    pack_quantized(*(const QuantizedPacking*)argument, thread, num_threads);
}

bool is_float(int32_t format) { return format >= HR_BF16 && format <= HR_F32; }

// Whether there is code for this operation on rows of this format.
bool can_run(const hr_op& op, const hr_step& step) {
    if (!is_float(step.format)) return false;
    if (op.kind == HR_ATTENTION)
        return op.cache_format == step.format || op.cache_format == HR_INT8 ||
               (step.format == HR_F32 && is_float(op.cache_format));
    return op.kind != HR_PRODUCT || op.format == step.format || is_quantized(op.format);
}

void pack_share(void* argument, int thread, int num_threads) {
    kPack(*(const Packing*)argument, thread, num_threads);
}

void lookup_share(void* argument, int thread, int num_threads) {
    kLookup(*(const Lookup*)argument, thread, num_threads);
}

struct QuantizedLookup {
    const void* packed;
    int32_t format;
    int64_t num_inputs;
    const int64_t* ids;
    int64_t num_ids;
    float scale;
    int32_t out_format;
    char* out;
};

void lookup_quantized_share(void* argument, int thread, int num_threads) {
    const QuantizedLookup& l = *(const QuantizedLookup*)argument;
    const int64_t from = l.num_ids * thread / num_threads;
    const int64_t to = l.num_ids * (thread + 1) / num_threads;
    for (int64_t i = from; i < to; ++i)
        lookup_quantized(l.packed, l.format, l.num_inputs, l.ids[i], l.scale, l.out_format,
                         l.out + i * l.num_inputs * (l.out_format == HR_F32 ? 4 : 2));
}

template <typename Work>
struct ScoresCall {
    const Work& work;
    void (*function)(const Work&, int, int);
};

template <typename Work>
void run_on_scores(hr_pool* pool, const Work& work, void (*function)(const Work&, int, int)) {
    ScoresCall<Work> call = {work, function};
    const auto share = [](void* argument, int thread, int num_threads) {
        const ScoresCall<Work>& call = *(const ScoresCall<Work>*)argument;
        call.function(call.work, thread, num_threads);
    };
    pool->threads.run(share, &call);
}

// Of all parts of a row, in order.
Best best_of_parts(const Best* parts, int64_t stride, int num_parts) {
    Best best = {0.0f, -1};
    for (int i = 0; i < num_parts; ++i) {
        const Best& part = parts[i * stride];
        if (part.token < 0) continue;
        if (part.score != part.score) return part;
        if (best.token < 0 || part.score > best.score) best = part;
    }
    return best;
}

}  // namespace

int32_t hr_interface_version(void) { return HR_INTERFACE_VERSION; }

int64_t hr_op_bytes(void) { return sizeof(hr_op); }
int64_t hr_group_bytes(void) { return sizeof(hr_group); }
int64_t hr_step_bytes(void) { return sizeof(hr_step); }
int64_t hr_draw_row_bytes(void) { return sizeof(hr_draw_row); }

int32_t hr_machine(void) { return usable_isas(); }

const char* hr_why_not(int32_t isa) { return why_not(isa); }

hr_pool* hr_pool_new(int32_t num_threads, const int32_t* cpus) {
    try {
        return new hr_pool(num_threads, cpus);
    } catch (...) {
        return nullptr;
    }
}

void hr_pool_free(hr_pool* pool) { delete pool; }

int32_t hr_run(hr_pool* pool, int32_t isa, const hr_op* ops, int64_t num_ops, const hr_step* step) {
    for (int64_t i = 0; i < num_ops; ++i)
        if (!can_run(ops[i], *step)) return -2;
    try {
        Work work = {};
        work.ops = ops;
        work.num_ops = num_ops;
        work.step = step;
        work.meet = meet;
        work.barrier = &pool->threads.barrier;
        work.seconds = seconds;
        prepare(pool->memory, work, pool->threads.num_threads);
        Call call = {&work, kWork[isa]};
        pool->threads.run(run_call, &call);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

int64_t hr_packed_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs) {
    if (is_quantized(format)) return quantized_bytes(format, num_outputs, num_inputs);
    if (!is_float(format)) return -1;
    return divided_up(num_outputs, kBlockRows) * block_bytes(format, num_inputs);
}

int32_t hr_pack(hr_pool* pool, const void* rows, int32_t rows_format, int64_t num_rows,
                int64_t num_inputs, void* packed, int32_t format, int64_t first_row,
                int32_t lanes) {
    if (is_quantized(format)) {
        if (!can_pack_quantized(format, rows_format, num_inputs)) return -1;
        QuantizedPacking packing = {rows, rows_format, num_rows, num_inputs, (uint8_t*)packed,
                                    format, first_row, lanes};
        pool->threads.run(pack_quantized_share, &packing);
        return 0;
    }
    if (!is_float(format) || !is_float(rows_format)) return -1;
    Packing packing = {rows, rows_format, num_rows, num_inputs, packed, format, first_row, lanes};
    pool->threads.run(pack_share, &packing);
    return 0;
}

int32_t hr_lookup(hr_pool* pool, const void* packed, int32_t format, int64_t num_inputs,
                  const int64_t* ids, int64_t num_ids, float scale, int32_t out_format, void* out) {
    if (!is_float(out_format)) return -1;
    if (is_quantized(format)) {
        QuantizedLookup lookup = {packed,  format, num_inputs, ids,
                                  num_ids, scale,  out_format, (char*)out};
        if (num_ids < kLookupTogether) {
            pool->threads.run_alone(lookup_quantized_share, &lookup);
        } else {
            pool->threads.run(lookup_quantized_share, &lookup);
        }
        return 0;
    }
    if (!is_float(format)) return -1;
    Lookup lookup = {packed, format, num_inputs, ids, num_ids, scale, out_format, out};
    if (num_ids < kLookupTogether) {
        pool->threads.run_alone(lookup_share, &lookup);
    } else {
        pool->threads.run(lookup_share, &lookup);
    }
    return 0;
}

int32_t hr_argmax(hr_pool* pool, int32_t isa, const float* scores, int64_t num_rows, int64_t vocab,
                  float* maxima, int64_t* token_ids) {
    const int num_threads = pool->threads.num_threads;
    std::vector<Best>& bests = pool->memory.bests;
    try {
        bests.resize(num_threads * num_rows);
    } catch (const std::bad_alloc&) {
        return -1;
    }
    const Argmax argmax = {scores, num_rows, vocab, bests.data()};
    run_on_scores(pool, argmax, kScores[isa].argmax);
    for (int64_t row = 0; row < num_rows; ++row) {
        const Best best = best_of_parts(bests.data() + row, num_rows, num_threads);
        maxima[row] = best.score;
        token_ids[row] = best.token;
    }
    return 0;
}

int32_t hr_draw(hr_pool* pool, int32_t isa, const float* logits, int64_t vocab,
                const hr_draw_row* rows, int64_t num_rows, float* scores, int64_t* token_ids) {
    Draw draw = {logits, num_rows, vocab, rows, scores, token_ids, nullptr};
    try {
        const int64_t num_floats = pool->threads.num_threads * draw_memory(vocab);
        draw.memory = (float*)aligned(pool->memory.drawing, num_floats * sizeof(float));
    } catch (const std::bad_alloc&) {
        return -1;
    }
    run_on_scores(pool, draw, kScores[isa].draw);
    return 0;
}

void hr_score(hr_pool* pool, int32_t isa, const float* logits, int64_t vocab, const int64_t* rows,
              int64_t num_rows, const int64_t* token_ids, const int64_t* num_tops,
              const float* maxima, int64_t stride, float* scores, int64_t* ids, int64_t* ranks) {
    const Scoring scoring = {logits, num_rows, vocab,  rows, token_ids, num_tops,
                             maxima, stride,   scores, ids,  ranks};
    run_on_scores(pool, scoring, kScores[isa].score);
}

double hr_peak(hr_pool* pool, int32_t isa, int32_t format, int64_t rounds) {
    struct Call {
        Peak peak;
        int64_t rounds;
    } call = {peak_of(isa, format), rounds};
    if (call.peak.loop == nullptr || rounds < 1) return 0.0;
    const auto share = [](void* argument, int, int) {
        const Call& call = *(const Call*)argument;
        call.peak.loop(call.rounds);
    };
    pool->threads.run(share, &call);
    return call.peak.operations * rounds * pool->threads.num_threads;
}
