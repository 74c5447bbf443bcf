#include "plan.h"

#include <algorithm>

namespace {

// Fewer pieces of work than this per thread, and tokens that could be one item are split by keys.
constexpr int64_t kPiecesPerThread = 4;

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t first_key(const Item& item, int64_t window) {
    return window == 0 ? 0 : std::max<int64_t>(0, item.first_position + 1 - window);
}

int64_t end_key(const Item& item) { return item.first_position + item.num_tokens; }

// Of one item, about: its rows times the keys that it goes through.
int64_t cost(const Item& item, int64_t window) {
    const int64_t from = std::max(item.from, first_key(item, window));
    return item.num_tokens * (std::min(item.to, end_key(item)) - from);
}

}  // namespace

void GroupPlan::clear() {
    items.clear();
    token_slots.clear();
    has_parts = false;
    num_partials = 0;
}

void GroupPlan::add(Item item, int64_t window, int64_t rows, bool is_split) {
    const int64_t first = first_key(item, window) / kPart;
    const int64_t count = divided_up(end_key(item), kPart) - first;
    if (count == 1 || !is_split) {
        items.push_back(item);
        return;
    }
    has_parts = true;
    item.num_parts = count;
    for (item.part = 0; item.part < count; ++item.part) {
        item.from = (first + item.part) * kPart;
        item.to = item.from + kPart;
        item.partial = num_partials;
        num_partials += rows;
        items.push_back(item);
    }
}

void GroupPlan::make(const hr_step& step, const hr_group& group, const hr_op& op,
                     int num_threads) {
    const int64_t heads = op.num_heads / op.num_kv_heads;
    const int64_t tokens_together = std::max<int64_t>(1, kMaxItemRows / heads);
    token_slots.resize(step.num_tokens);
    int64_t num_pieces = 0;
    for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence) {
        const int64_t first_row = step.query_starts[sequence];
        const int64_t num_queries = step.query_starts[sequence + 1] - first_row;
        const int64_t computed = step.context_lens[sequence] - num_queries;
        std::copy_n(group.slots[sequence] + computed, num_queries, &token_slots[first_row]);
        num_pieces += divided_up(num_queries, tokens_together) * op.num_kv_heads;
    }
    const bool are_few = num_pieces < kPiecesPerThread * num_threads;
    for (int64_t sequence = 0; sequence < step.num_sequences; ++sequence) {
        const int64_t first_row = step.query_starts[sequence];
        const int64_t num_queries = step.query_starts[sequence + 1] - first_row;
        const int64_t computed = step.context_lens[sequence] - num_queries;
        for (int64_t start = 0; start < num_queries; start += tokens_together) {
            const int64_t num_tokens = std::min(tokens_together, num_queries - start);
            const Item item = {sequence, first_row + start, computed + start, num_tokens, 0,
                               INT64_MAX, -1, 1, 0};
            add(item, group.window, num_tokens * op.num_heads, are_few || num_tokens == 1);
        }
    }
    const auto is_longer = [&](const Item& a, const Item& b) {
        return cost(a, group.window) > cost(b, group.window);
    };
    if (!std::is_sorted(items.begin(), items.end(), is_longer))
        std::sort(items.begin(), items.end(), is_longer);
}
