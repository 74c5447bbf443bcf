// Paged attention (numerics rule N3): softmax(scale * q k^T) v, causal, grouped heads, window,
// sinks.
//
// Keys come in tiles of 64 at absolute positions, tiles in parts of 512 keys. Within a part the
// softmax runs online over ascending tiles; parts are joined in ascending order. Both orders depend
// on positions alone, so a query's result is the same in a prompt, in a chunk and in decoding, and
// with any number of threads. The query heads that share a K and V head are rows of one product.
#pragma once

#include <stddef.h>

#include "attention_tile.h"
#include "work.h"

namespace {

// Sums of rows, [rows][wide], with the largest score [rows] and the sum of the probabilities, in
// lanes [rows][HR_LANES].
struct Sums {
    float* rows;
    float* most;
    float* totals;

    void clear(int64_t num_rows, int64_t wide) const {
        memset(rows, 0, num_rows * wide * sizeof(float));
        memset(totals, 0, num_rows * HR_LANES * sizeof(float));
        for (int64_t row = 0; row < num_rows; ++row) most[row] = -kInfinity;
    }

    Sums at(int64_t row, int64_t wide) const {
        return {rows + row * wide, most + row, totals + row * HR_LANES};
    }

    // Of the first row: whether it is as it was cleared.
    bool is_clear() const { return *most == -kInfinity && sum(load(totals)) == 0.0f; }
};

// sums = sums * factor.
inline void scale_row(float* sums, float factor, int64_t wide) {
    for (int64_t i = 0; i < wide; i += HR_LANES)
        store(sums + i, mul(load(sums + i), splat(factor)));
}

// Join a row of a part to that of the parts before it; `factor` as in `ScoreRule`.
inline void join_part(const Sums& part, float factor, int64_t wide, const Sums& whole) {
    if (part.is_clear()) return;  // nothing seen in it
    if (whole.is_clear()) {
        memcpy(whole.rows, part.rows, wide * sizeof(float));
        memcpy(whole.totals, part.totals, HR_LANES * sizeof(float));
        *whole.most = *part.most;
        return;
    }
    const float most = *part.most > *whole.most ? *part.most : *whole.most;
    const Vec old_scale = power_of_two(splat((*whole.most - most) * factor));
    const Vec new_scale = power_of_two(splat((*part.most - most) * factor));
    const auto join = [&](float* old, const float* added) {
        store(old, fma(load(added), new_scale, mul(load(old), old_scale)));
    };
    for (int64_t i = 0; i < wide; i += HR_LANES) join(whole.rows + i, part.rows + i);
    join(whole.totals, part.totals);
    *whole.most = most;
}

// One layer's attention on one thread.
template <typename E, typename C>
class Attention {
  public:
    Attention(const hr_op& op, const hr_step& step, char* scratch)
        : op_(op),
          step_(step),
          pages_(pages_of<E, C>(op, step)),
          rule_(score_rule(op)),
          window_(step.groups[op.group].window),
          dim_(op.head_dim),
          wide_(padded_dim(op.head_dim)),
          heads_(op.num_heads / op.num_kv_heads) {
        const ScratchLayout s = scratch_layout(dim_);
        queries_ = (Factor<E>*)(scratch + s.queries);
        keys_ = (E*)(scratch + s.keys);
        values_ = (E*)(scratch + s.values);
        key_scales_ = (float*)(scratch + s.key_scales);
        value_scales_ = (float*)(scratch + s.value_scales);
        scores_ = (float*)(scratch + s.scores);
        probabilities_ = (Factor<E>*)(scratch + s.probabilities);
        part_ = {(float*)(scratch + s.part), (float*)(scratch + s.part_most),
                 (float*)(scratch + s.part_totals)};
        whole_ = {(float*)(scratch + s.whole), (float*)(scratch + s.whole_most),
                  (float*)(scratch + s.whole_totals)};
        row_ends_ = (int64_t*)(scratch + s.row_ends);
    }

    void rotate(int64_t token, int64_t slot, int64_t kv_head) const {
        rotate_token(op_, step_, pages_, token, slot, kv_head);
    }

    // One item and K and V head. Its sums go to `partial` [rows][partial_size], if that is not
    // null, and its results to the output otherwise. `next`: what this thread will attend to
    // afterwards, or null.
    void attend(const Item& item, int64_t kv_head, float* partial, const TileSource* next) const {
        const int64_t rows = item.num_tokens * heads_;
        load_queries(item, kv_head);
        for (int64_t t = 0, row = 0; t < item.num_tokens; ++t)
            for (int64_t h = 0; h < heads_; ++h) row_ends_[row++] = item.first_position + t + 1;
        add_parts(item, kv_head, 0, rows, false, next);
        // Values that a row does not see have the weight 0, which is enough if they are finite.
        bool is_finite[kMaxItemRows];
        for (int64_t t = 0, row = 0; t < item.num_tokens; ++t) {
            for (int64_t h = 0; h < heads_; ++h, ++row) {
                const Sums sums = whole_.at(row, wide_);
                is_finite[row] = are_finite(sums.rows);
                if (is_finite[row]) finish(item, kv_head, t, h, sums, partial);
            }
        }
        for (int64_t row = 0; row < rows; ++row) {
            if (is_finite[row]) continue;
            add_parts(item, kv_head, row, row + 1, true, nullptr);
            finish(item, kv_head, row / heads_, row % heads_, whole_.at(row, wide_), partial);
        }
    }

    // The first tile of an item.
    TileSource first_tile(const Item& item, int64_t kv_head) const {
        const int64_t seen = window_ == 0 ? 0 : item.first_position + 1 - window_;
        const int64_t start = (seen > item.from ? seen : item.from) / kTile * kTile;
        const int64_t end = item.first_position + item.num_tokens;
        return {step_.groups[op_.group].slots[item.sequence], kv_head, start,
                (item.to < end ? item.to : end) - start};
    }

    // The parts of some tokens, which different threads have computed; `first` is the first part's.
    void join(const Item& first, int64_t kv_head, float* partials) const {
        const int64_t rows = first.num_tokens * heads_, row_size = partial_size(dim_);
        float* sums = partials + (first.partial + kv_head * rows) * row_size;
        for (int64_t t = 0; t < first.num_tokens; ++t) {
            for (int64_t h = 0; h < heads_; ++h, sums += row_size) {
                whole_.clear(1, wide_);
                for (int64_t part = 0; part < first.num_parts; ++part)
                    join_part(packed(sums + part * op_.num_kv_heads * rows * row_size),
                              rule_.factor, wide_, whole_);
                finish(first, kv_head, t, h, whole_, nullptr);
            }
        }
    }

  private:
    void load_queries(const Item& item, int64_t kv_head) const {
        for (int64_t t = 0; t < item.num_tokens; ++t) {
            const E* from = row_of<E>(step_, op_.input, item.first_row + t);
            convert(from + kv_head * heads_ * dim_, heads_ * dim_, queries_ + t * heads_ * dim_);
        }
    }

    bool are_finite(const float* sums) const {
        Vec zeros = splat(0.0f);
        for (int64_t i = 0; i < dim_; i += HR_LANES)
            zeros = fma(load_some(sums + i, dim_ - i), splat(0.0f), zeros);
        return sum(zeros) == 0.0f;
    }

    // First position that a row sees.
    int64_t row_start(int64_t row) const {
        const int64_t start = row_ends_[row] - window_;
        return window_ == 0 || start < 0 ? 0 : start;
    }

    // Keys of the item that rows see, from `first` to `end`, into the sums of these rows.
    // `is_exact`: other values do not even get the weight 0.
    void add_parts(const Item& item, int64_t kv_head, int64_t first, int64_t end, bool is_exact,
                   const TileSource* next) const {
        const TileLoader<E, C> loader = {pages_, keys_, values_, key_scales_, value_scales_};
        const int64_t last_key = item.to < row_ends_[end - 1] ? item.to : row_ends_[end - 1];
        const int64_t first_key = item.from > row_start(first) ? item.from : row_start(first);
        const bool is_streamed = end - first <= kStripRows<E>;  // one pass over each tile
        const bool is_tiled = kHasTiles<E> && !is_streamed && dim_ % kKeyGroup == 0;
        TileSource source = {step_.groups[op_.group].slots[item.sequence], kv_head,
                             first_key / kTile * kTile, 0};
        whole_.at(first, wide_).clear(end - first, wide_);
        for (int64_t& start = source.start; start < last_key;) {
            const int64_t part_end = (start / kPart + 1) * kPart;
            part_.at(first, wide_).clear(end - first, wide_);
            for (; start < last_key && start < part_end; start += kTile) {
                source.count = last_key - start;
                const TileSource following = {source.slots, kv_head, start + kTile,
                                              source.count - kTile};
                const bool is_last = following.count <= 0;
                const Tile<E> tile =
                    loader.tile_at(source, first_key > start ? first_key - start : 0, is_exact,
                                   is_tiled, !is_streamed ? nullptr : is_last ? next : &following);
                constexpr int64_t kRows = kSoftmaxRows<E>;
                for (int64_t row = first; row < end; row += kRows)
                    add_tile(tile, start, row, end - row < kRows ? end : row + kRows, is_tiled);
            }
            for (int64_t row = first; row < end; ++row)
                join_part(part_.at(row, wide_), rule_.factor, wide_, whole_.at(row, wide_));
        }
    }

    // One tile, whose first key is at position `start`, into the part's sums of some rows.
    void add_tile(const Tile<E>& tile, int64_t start, int64_t first, int64_t end,
                  bool is_tiled) const {
        const int64_t from = row_start(first) - start, to = row_ends_[end - 1] - start;
        if (to <= 0 || from >= kTile) return;
        const int64_t first_group = from < 0 ? 0 : from / kKeyGroup;
        const int64_t end_group = to > kTile ? kTileGroups : (to + kKeyGroup - 1) / kKeyGroup;
        const int64_t rows = end - first;
        multiply_keys<E>(is_tiled, rows, queries_ + first * dim_, dim_, tile, first_group,
                         end_group, scores_);
        const Softmax<E, Pages<E, C>::kHasScales> softmax = {
            rule_, tile, (int)(first_group * kKeyGroup), (int)(end_group * kKeyGroup)};
        uint64_t seen[kMaxSoftmaxRows];
        float kept[kMaxSoftmaxRows + HR_LANES], most[kMaxSoftmaxRows];
        for (int64_t r = 0; r < rows; ++r) {
            seen[r] = seen_keys(row_start(first + r) - start, row_ends_[first + r] - start);
            const float before = part_.most[first + r];
            most[r] = softmax.fold_scores(scores_ + r * kTile, seen[r], before);
            kept[r] = most[r] == before ? 0.0f : (before - most[r]) * rule_.factor;
            part_.most[first + r] = most[r];
        }
        for (int64_t r = 0; r < rows; r += HR_LANES) store(kept + r, power_of_two(load(kept + r)));
        for (int64_t r = 0; r < rows; ++r) {
            const Sums sums = part_.at(first + r, wide_);
            softmax.exponentiate(scores_ + r * kTile, seen[r], most[r], kept[r],
                                 probabilities_ + r * kTile, sums.totals);
            if (kept[r] != 1.0f) scale_row(sums.rows, kept[r], wide_);
        }
        add_values<E>(is_tiled, rows, probabilities_, tile, first_group, end_group, wide_,
                      part_.rows + first * wide_);
    }

    // A row of partial sums.
    Sums packed(float* place) const { return {place, place + wide_ + HR_LANES, place + wide_}; }

    // The row of query head `h`, of those that share the K and V head, and of the item's token `t`.
    void finish(const Item& item, int64_t kv_head, int64_t t, int64_t h, const Sums& sums,
                float* partial) const {
        if (partial != nullptr) {
            const Sums place = packed(partial + (t * heads_ + h) * partial_size(dim_));
            memcpy(place.rows, sums.rows, wide_ * sizeof(float));
            memcpy(place.totals, sums.totals, HR_LANES * sizeof(float));
            *place.most = *sums.most;
            return;
        }
        const int64_t head = kv_head * heads_ + h;
        E* out = row_of<E>(step_, op_.output, item.first_row + t) + head * dim_;
        float scale = 1.0f, total = sum(load(sums.totals));
        if (op_.sinks != nullptr) {  // one more key, whose value is 0
            const float sink = op_.sinks[head] * 1.44269504f - *sums.most * rule_.factor;
            if (sink > 0.0f) scale = power_of_two(-sink);
            total = total * scale + power_of_two(sink < 0.0f ? sink : 0.0f);
        }
        for (int64_t i = 0; i < dim_; i += HR_LANES) {
            const Vec value = div(mul(load(sums.rows + i), splat(scale)), splat(total));
            // Adding 0 makes one of -0 and +0, which keys of weight 0 may decide between.
            store_some(out + i, add(value, splat(0.0f)), dim_ - i);
        }
    }

    const hr_op& op_;
    const hr_step& step_;
    Pages<E, C> pages_;
    ScoreRule rule_;
    int64_t window_, dim_, wide_, heads_;
    Factor<E>* queries_;
    E* keys_;
    E* values_;
    float* key_scales_;
    float* value_scales_;
    float* scores_;
    Factor<E>* probabilities_;
    Sums part_, whole_;
    int64_t* row_ends_;
};

constexpr int64_t kManyItems = 8;  // per thread

inline int64_t take(int32_t* counter) {
    return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
}

template <typename E, typename C>
inline void run_attention(const Work& work, int64_t index, int thread, int num_threads) {
    const hr_op& op = work.ops[index];
    const GroupWork& group = work.groups[op.group];
    const Attention<E, C> attention(op, *work.step, work.scratch + thread * work.scratch_bytes);
    const int64_t kv_heads = op.num_kv_heads, count = group.num_items * kv_heads;
    const int64_t row_size = partial_size(op.head_dim);
    // Each item turns its own queries and writes its own keys and values where it reads no others'
    // new ones; otherwise that is done, and waited for, first.
    const bool is_rotated = op.rope < 0;
    if (!is_rotated && !group.is_alone) {
        const Range tokens = share(work.step->num_tokens, thread, num_threads);
        for (int64_t token = tokens.from; token < tokens.to; ++token)
            for (int64_t head = 0; head < kv_heads; ++head)
                attention.rotate(token, group.token_slots[token], head);
        work.meet(work.barrier);
    }
    int32_t* counters = work.counters + 2 * index;
    // Where there are many, a thread takes its next one early, to prefetch what that begins with.
    const bool looks_ahead = count >= kManyItems * num_threads;
    for (int64_t i = take(counters), next = i; i < count; i = next) {
        const Item& item = group.items[i / kv_heads];
        const int64_t head = i % kv_heads, rows = item.num_tokens * (op.num_heads / kv_heads);
        if (!is_rotated && group.is_alone)
            attention.rotate(item.first_row, group.token_slots[item.first_row], head);
        TileSource source;
        if (looks_ahead && (next = take(counters)) < count)
            source = attention.first_tile(group.items[next / kv_heads], next % kv_heads);
        float* partial = item.part < 0
                             ? nullptr
                             : work.partials + (item.partial + head * rows) * row_size;
        attention.attend(item, head, partial, looks_ahead && next < count ? &source : nullptr);
        if (!looks_ahead) next = take(counters);
    }
    if (!group.has_parts) return;
    work.meet(work.barrier);
    for (int64_t i; (i = take(counters + 1)) < count;) {
        const Item& item = group.items[i / kv_heads];
        if (item.part == 0) attention.join(item, i % kv_heads, work.partials);
    }
}

// Chooses by the format of the cache: that of the rows, int8, or under fp32 a narrower one.
template <typename E>
inline void run_attention(const Work& work, int64_t index, int thread, int num_threads) {
    const int32_t format = work.ops[index].cache_format;
    if (format == kFormat<E>) return run_attention<E, E>(work, index, thread, num_threads);
    if (format == HR_INT8) return run_attention<E, int8_t>(work, index, thread, num_threads);
    if constexpr (kFormat<E> == HR_F32) {
        if (format == HR_BF16) return run_attention<E, bf16>(work, index, thread, num_threads);
        if (format == HR_F16) return run_attention<E, f16>(work, index, thread, num_threads);
    }
}

}  // namespace
