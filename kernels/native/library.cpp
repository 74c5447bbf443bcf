// The C interface: instruction sets, packing, and running a step.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "interface.h"
#include "pool.h"
#include "work.h"

namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kLookupTogether = 16;  // rows below which one thread looks them up

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t rounded_up(int64_t a, int64_t b) { return divided_up(a, b) * b; }

// The work list of one KV group, for operations with these heads.
struct GroupPlan {
    std::vector<Item> items;
    std::vector<int64_t> token_slots;  // empty: not planned yet
    bool has_parts = false;
    int64_t num_partials = 0;

    void clear() {
        items.clear();
        token_slots.clear();
        has_parts = false;
        num_partials = 0;
    }
};

// Parts of the keys that a token at `position` sees: the first, and how many.
struct Parts {
    int64_t first, count;
};

Parts parts_of(int64_t position, int64_t window) {
    const int64_t start = window == 0 ? 0 : std::max<int64_t>(0, position + 1 - window);
    const int64_t first = start / kPart;
    return {first, divided_up(position + 1, kPart) - first};
}

void add_single(GroupPlan& plan, Item item, int64_t window, int64_t heads) {
    const Parts parts = parts_of(item.first_position, window);
    if (parts.count == 1) {
        plan.items.push_back(item);
        return;
    }
    plan.has_parts = true;
    item.num_parts = parts.count;
    for (item.part = 0; item.part < parts.count; ++item.part) {
        item.from = (parts.first + item.part) * kPart;
        item.to = item.from + kPart;
        item.partial = plan.num_partials;
        plan.num_partials += heads * item.num_kv_heads;
        plan.items.push_back(item);
    }
}

// Whether all K and V heads of a single token go to one thread. They lie side by side in memory, so
// that is faster, if there is enough to do for all threads.
bool are_heads_together(const hr_step& step, int64_t window, const hr_op& op, int num_threads) {
    if (op.num_heads > kMaxItemRows || op.head_dim % kBlockRows != 0) return false;
    int64_t num_parts = 0;
    for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence)
        if (step.query_starts[sequence + 1] - step.query_starts[sequence] == 1)
            num_parts += parts_of(step.context_lens[sequence] - 1, window).count;
    return num_parts >= num_threads;
}

void plan_group(GroupPlan& plan, const hr_step& step, const hr_group& group, const hr_op& op,
                int num_threads) {
    const int64_t heads = op.num_heads / op.num_kv_heads;
    const int64_t tokens_together = std::max<int64_t>(1, kMaxItemRows / heads);
    const bool heads_together = are_heads_together(step, group.window, op, num_threads);
    plan.token_slots.resize(step.num_tokens);
    for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence) {
        const int64_t first_row = step.query_starts[sequence];
        const int64_t num_queries = step.query_starts[sequence + 1] - first_row;
        const int64_t computed = step.context_lens[sequence] - num_queries;
        for (int64_t i = 0; i < num_queries; ++i)
            plan.token_slots[first_row + i] = group.slots[sequence][computed + i];
        const int64_t num_chunks = divided_up(num_queries, tokens_together);
        for (int64_t chunk = num_chunks - 1; chunk >= 0; --chunk) {  // the longest ones first
            const int64_t start = chunk * tokens_together;
            const int64_t num_tokens = std::min(tokens_together, num_queries - start);
            const int64_t kv_heads = num_tokens == 1 && heads_together ? op.num_kv_heads : 1;
            for (int64_t head = 0; head < op.num_kv_heads; head += kv_heads) {
                const Item item = {sequence, head, kv_heads, first_row + start, computed + start,
                                   num_tokens, 0, INT64_MAX, -1, 1, 0};
                if (num_tokens == 1) {
                    add_single(plan, item, group.window, heads);
                } else {
                    plan.items.push_back(item);
                }
            }
        }
    }
}

// As `cut_scratch` of attention.h takes it, with a cache line for the rounding of each piece.
int64_t scratch_bytes(int64_t dim, int64_t kv_heads) {
    const int64_t wide = rounded_up(dim, kBlockRows), rows = kMaxItemRows;
    const int64_t tile = kv_heads * 64 * (dim + 1 + wide) * 2;
    const int64_t bytes = tile + rows * dim * 2 + rows * 64 * 6 + 3 * rows * wide * 4 + 16 * rows;
    return rounded_up(bytes + 12 * kCacheLine, 4096);
}

// Kept from step to step, so that a step allocates nothing once the sizes have been met.
struct StepMemory {
    std::vector<GroupPlan> plans;
    std::vector<GroupWork> groups;
    std::vector<int32_t> counters;
    std::vector<float> partials;
    std::vector<char> scratch;
};

void prepare(StepMemory& memory, Work& work, int num_threads) {
    memory.plans.resize(work.step->num_groups);
    memory.groups.resize(work.step->num_groups);
    for (GroupPlan& plan : memory.plans) plan.clear();
    memory.counters.assign(2 * work.num_ops, 0);
    int64_t widest = 0, scratch = 0;
    for (int64_t i = 0; i < work.num_ops; ++i) {
        const hr_op& op = work.ops[i];
        if (op.kind == HR_PRODUCT)
            scratch = std::max(scratch, product_scratch_bytes(op, *work.step));
        if (op.kind != HR_ATTENTION) continue;
        widest = std::max<int64_t>(widest, op.head_dim);
        scratch = std::max(scratch, scratch_bytes(op.head_dim, op.num_kv_heads));
        GroupPlan& plan = memory.plans[op.group];
        if (!plan.token_slots.empty()) continue;
        plan_group(plan, *work.step, work.step->groups[op.group], op,
                   num_threads);
        const bool is_alone = !plan.has_parts && work.step->num_tokens == work.step->num_sequences;
        memory.groups[op.group] = {plan.items.data(), (int64_t)plan.items.size(), plan.has_parts,
                                   is_alone, plan.token_slots.data()};
    }
    int64_t num_partials = 0;
    for (const GroupPlan& plan : memory.plans)
        num_partials = std::max(num_partials, plan.num_partials);
    memory.partials.resize(num_partials * (rounded_up(widest, kBlockRows) + 2));
    work.scratch_bytes = rounded_up(scratch, kCacheLine);
    memory.scratch.resize(work.scratch_bytes * num_threads + kCacheLine);
    const auto address = (uintptr_t)memory.scratch.data();
    work.scratch = memory.scratch.data() + (rounded_up(address, kCacheLine) - address);
    work.groups = memory.groups.data();
    work.partials = memory.partials.data();
    work.counters = memory.counters.data();
}

}  // namespace

struct hr_pool {
    explicit hr_pool(int num_threads) : threads(num_threads) {}

    ThreadPool threads;
    StepMemory memory;
};

namespace {

using WorkFunction = void (*)(const Work&, int, int);

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

bool is_float(int32_t format) { return format >= HR_BF16 && format <= HR_F32; }

// Whether there is code for this operation on rows of this format.
bool can_run(const hr_op& op, const hr_step& step) {
    if (!is_float(step.format)) return false;
    if (op.kind == HR_ATTENTION && step.format != HR_BF16) return false;
    return op.kind != HR_PRODUCT || op.format == step.format;
}

void pack_share(void* argument, int thread, int num_threads) {
    hr_pack_avx2(*(const Packing*)argument, thread, num_threads);
}

void lookup_share(void* argument, int thread, int num_threads) {
    hr_lookup_avx2(*(const Lookup*)argument, thread, num_threads);
}

using DrawFunction = void (*)(const Draw&, int, int);

struct DrawCall {
    Draw draw;
    DrawFunction function;
};

void draw_share(void* argument, int thread, int num_threads) {
    const DrawCall& call = *(const DrawCall*)argument;
    call.function(call.draw, thread, num_threads);
}

}  // namespace

int32_t hr_interface_version(void) { return HR_INTERFACE_VERSION; }

int64_t hr_op_bytes(void) { return sizeof(hr_op); }
int64_t hr_group_bytes(void) { return sizeof(hr_group); }
int64_t hr_step_bytes(void) { return sizeof(hr_step); }
int64_t hr_draw_row_bytes(void) { return sizeof(hr_draw_row); }

int32_t hr_machine(void) {
    __builtin_cpu_init();
    int32_t found = 0;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return found;
    found |= 1 << HR_AVX2;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return found;
    found |= 1 << HR_AVX512;
    if (__builtin_cpu_supports("avx512bf16")) found |= 1 << HR_AVX512_BF16;
    return found;
}

hr_pool* hr_pool_new(int32_t num_threads, const int32_t*) {
    try {
        return new hr_pool(num_threads);
    } catch (...) {
        return nullptr;
    }
}

void hr_pool_free(hr_pool* pool) { delete pool; }

int32_t hr_run(hr_pool* pool, int32_t isa, const hr_op* ops, int64_t num_ops, const hr_step* step) {
    constexpr WorkFunction kFunctions[HR_NUM_ISAS] = {
        hr_work_avx2, hr_work_avx512, hr_work_avx512, hr_work_avx512_bf16, hr_work_avx512, nullptr,
    };
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
        Call call = {&work, kFunctions[isa]};
        pool->threads.run(run_call, &call);
        return 0;
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

int64_t hr_packed_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs) {
    if (!is_float(format)) return -1;
    return divided_up(num_outputs, kBlockRows) * block_bytes(format, num_inputs);
}

int32_t hr_pack(hr_pool* pool, const void* rows, int32_t rows_format, int64_t num_rows,
                int64_t num_inputs, void* packed, int32_t format, int64_t first_row,
                int32_t lanes) {
    if (!is_float(format) || !is_float(rows_format)) return -1;
    Packing packing = {rows, rows_format, num_rows, num_inputs, packed, format, first_row, lanes};
    pool->threads.run(pack_share, &packing);
    return 0;
}

int32_t hr_lookup(hr_pool* pool, const void* packed, int32_t format, int64_t num_inputs,
                  const int64_t* ids, int64_t num_ids, float scale, int32_t out_format, void* out) {
    if (!is_float(format) || !is_float(out_format)) return -1;
    Lookup lookup = {packed, format, num_inputs, ids, num_ids, scale, out_format, out};
    if (num_ids < kLookupTogether) {
        const DenormalsAreZero guard;
        lookup_share(&lookup, 0, 1);
    } else {
        pool->threads.run(lookup_share, &lookup);
    }
    return 0;
}

void hr_draw(hr_pool* pool, int32_t isa, float* scores, int64_t num_rows, int64_t vocab,
             const hr_draw_row* rows, int64_t* token_ids) {
    // Nothing of it is a product of bf16.
    constexpr DrawFunction kFunctions[HR_NUM_ISAS] = {
        hr_draw_avx2, hr_draw_avx512, hr_draw_avx512, hr_draw_avx512, hr_draw_avx512, nullptr,
    };
    DrawCall call = {{scores, num_rows, vocab, rows, token_ids}, kFunctions[isa]};
    pool->threads.run(draw_share, &call);  // also one row: it sets what becomes of denormals
}
