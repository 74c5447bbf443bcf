// Paged attention (numerics rule N3): softmax(scale * q k^T) v, causal, grouped heads, window.
//
// Keys come in tiles of 64 at absolute positions, tiles in parts of 512 keys. Within a part the
// softmax runs online over ascending tiles; parts are joined in ascending order. Both orders depend
// on positions alone, so a query's result is the same in a prompt, in a chunk and in decoding, and
// with any number of threads. Products follow rule N1, with probabilities rounded to bf16. The
// query heads that share a K and V head are rows of one product.
#pragma once

#include <stddef.h>

#include "rows.h"
#include "work.h"

namespace {

constexpr int kTile = 64;
constexpr float kInfinity = __builtin_inff();

// Scratch memory of one thread, for rows of one item.
struct Scratch {
    bf16* queries;         // [rows][dim]
    bf16* keys;            // packed: 2 blocks of 32 keys; inputs: dims of all heads of the item
    bf16* values;          // packed: blocks of 32 dims of all heads of the item; inputs: kTile
    float* scores;         // [rows][kTile]
    bf16* probabilities;   // [rows][kTile]
    float* products;       // [rows][padded dim]
    float* part;           // [rows][padded dim]: sums of the part
    float* whole;          // [rows][padded dim]: sums of all parts so far
    float* part_max;       // [rows]
    float* part_sum;       // [rows]
    float* whole_max;      // [rows]
    float* whole_sum;      // [rows]
};

inline int64_t padded_dim(int64_t dim) { return (dim + kBlockRows - 1) / kBlockRows * kBlockRows; }

inline Scratch cut_scratch(char* memory, int64_t rows, int64_t dim, int64_t kv_heads) {
    const auto take = [&](int64_t bytes) {
        char* taken = memory;
        memory += (bytes + 63) / 64 * 64;
        return taken;
    };
    const int64_t wide = padded_dim(dim);
    Scratch s;
    s.queries = (bf16*)take(rows * dim * sizeof(bf16));
    s.keys = (bf16*)take(kTile * kv_heads * (dim + 1) * sizeof(bf16));
    s.values = (bf16*)take(kTile * kv_heads * wide * sizeof(bf16));
    s.scores = (float*)take(rows * kTile * sizeof(float));
    s.probabilities = (bf16*)take(rows * kTile * sizeof(bf16));
    s.products = (float*)take(rows * wide * sizeof(float));
    s.part = (float*)take(rows * wide * sizeof(float));
    s.whole = (float*)take(rows * wide * sizeof(float));
    s.part_max = (float*)take(rows * sizeof(float));
    s.part_sum = (float*)take(rows * sizeof(float));
    s.whole_max = (float*)take(rows * sizeof(float));
    s.whole_sum = (float*)take(rows * sizeof(float));
    return s;
}

#if HR_LANES == 16

// 16 rows of 16 dwords, `from` their beginnings, turned: out[i * stride + r] = from[r][i].
inline void transpose(const uint32_t* const* from, uint32_t* out, int64_t stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(from[i]);
    for (int i = 0; i < 8; ++i) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        for (int j = 0; j < 2; ++j) {
            a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
            a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
        }
    }
    // a[4 i + j] holds, per 128-bit lane l, dword 4 l + j of rows 4 i ... 4 i + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512i even01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        const __m512i odd01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i even23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(out + (0 + j) * stride, _mm512_shuffle_i32x4(even01, even23, 0x88));
        _mm512_storeu_si512(out + (8 + j) * stride, _mm512_shuffle_i32x4(even01, even23, 0xdd));
        _mm512_storeu_si512(out + (4 + j) * stride, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
        _mm512_storeu_si512(out + (12 + j) * stride, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
    }
}

inline void pair_dims(const bf16* first, const bf16* second, bf16* out, __m512i* most) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)first));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)second));
    const __m512i pairs = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    *most = _mm512_max_epu16(*most, _mm512_and_si512(pairs, _mm512_set1_epi16(0x7f80)));
    _mm512_storeu_si512(out, pairs);
}

#endif

// Keys `from` to `to` of a tile as a packed matrix: a key is a row, the other rows are 0. Rows may
// hold several heads, since they lie side by side: `dim` values in all.
inline void pack_keys(const bf16* const* rows, int64_t from, int64_t to, int64_t dim, bf16* out) {
    const int64_t pairs = (dim + 1) / 2;
    if (from > 0 || to < kTile || dim % 2 != 0) memset(out, 0, kTile * pairs * 2 * sizeof(bf16));
    for (int64_t group = 0; group < kTile; group += 16) {
        if (to <= group || from >= group + 16) continue;
        uint32_t* block = (uint32_t*)out + (group / kBlockRows) * pairs * kBlockRows +
                          group % kBlockRows;
        int64_t pair = 0;
#if HR_LANES == 16
        if (from <= group && to >= group + 16) {
            for (; pair + 16 <= dim / 2; pair += 16) {
                const uint32_t* starts[16];
                for (int i = 0; i < 16; ++i)
                    starts[i] = (const uint32_t*)(rows[group + i] + 2 * pair);
                transpose(starts, block + pair * kBlockRows, kBlockRows);
            }
        }
#endif
        const int64_t low = from > group ? from : group, high = to < group + 16 ? to : group + 16;
        for (int64_t key = low; key < high; ++key)
            for (int64_t p = pair; p < pairs; ++p)
                block[p * kBlockRows + key - group] = pair_at(rows[key], 2 * p, dim);
    }
}

// Values `from` to `to` of a tile as a packed matrix whose inputs are the keys and whose outputs
// are the dims, of several heads if these fill whole blocks; the others are 0. Returns whether all
// of them are finite.
inline bool pack_values(const bf16* const* rows, int64_t from, int64_t to, int64_t dim, bf16* out) {
    static const bf16 zeros[HR_LANES] = {};
    bool is_finite = true;
#if HR_LANES == 16
    __m512i most = _mm512_setzero_si512();
#endif
    const int64_t wide = padded_dim(dim);
    if (wide != dim) memset(out, 0, kTile * wide * sizeof(bf16));
    for (int64_t key = 0; key < kTile; key += 2) {
        const bool has_first = key >= from && key < to, has_second = key + 1 >= from && key + 1 < to;
        bf16* pair = out + key * kBlockRows;
        if (!has_first && !has_second) {
            for (int64_t d = 0; d < wide; d += kBlockRows)
                memset(pair + d * kTile, 0, 2 * kBlockRows * sizeof(bf16));
            continue;
        }
        int64_t d = 0;
#if HR_LANES == 16
        for (; d + 16 <= dim; d += 16)
            pair_dims(has_first ? rows[key] + d : zeros, has_second ? rows[key + 1] + d : zeros,
                      pair + d / kBlockRows * kBlockRows * kTile + d % kBlockRows * 2, &most);
#endif
        for (; d < dim; ++d) {
            const bf16 low = has_first ? rows[key][d] : zeros[0];
            const bf16 high = has_second ? rows[key + 1][d] : zeros[0];
            bf16* place = pair + d / kBlockRows * kBlockRows * kTile + d % kBlockRows * 2;
            place[0] = low;
            place[1] = high;
            is_finite &= (low & 0x7f80) != 0x7f80 && (high & 0x7f80) != 0x7f80;
        }
    }
#if HR_LANES == 16
    is_finite &= _mm512_cmpeq_epu16_mask(most, _mm512_set1_epi16(0x7f80)) == 0;
#endif
    return is_finite;
}

// Scale and cap the scores of one row, fold its largest into `most`, and make them probabilities.
// Keys outside `from` to `to` get exactly 0. Returns what the sums so far are to be scaled with.
inline float make_probabilities(const hr_op& op, float* scores, int64_t from, int64_t to,
                                float* most, float* total, bf16* probabilities) {
    if (from >= to) {
        memset(probabilities, 0, kTile * sizeof(bf16));
        return 1.0f;
    }
    for (int64_t i = 0; i < kTile; i += HR_LANES) {
        Vec score = mul(load(scores + i), splat(op.scale));
        if (op.soft_cap != 0.0f)
            score = mul(splat(op.soft_cap), tanh_of(div(score, splat(op.soft_cap))));
        store(scores + i, score);
    }
    for (int64_t i = 0; i < from; ++i) scores[i] = -kInfinity;
    for (int64_t i = to; i < kTile; ++i) scores[i] = -kInfinity;
    Vec highest = splat(*most);
    for (int64_t i = 0; i < kTile; i += HR_LANES) highest = max(load(scores + i), highest);
    const float new_most = largest(highest);
    const Vec shift = splat(new_most);
    Vec sums = splat(0.0f);
    for (int64_t i = 0; i < kTile; i += HR_LANES) {
        store(probabilities + i, exponential(sub(load(scores + i), shift)));
        sums = add(sums, load(probabilities + i));
    }
    float kept = 1.0f;
    if (new_most != *most) {
        float lanes[HR_LANES];
        store(lanes, exponential(splat(*most - new_most)));
        kept = lanes[0];
    }
    *most = new_most;
    *total = *total * kept + sum(sums);
    return kept;
}

// What one item's queries see.
struct Span {
    int64_t first_position;  // of the item's first token
    int64_t window;          // 0: all
    int64_t heads;           // rows per token

    int64_t to(int64_t row) const { return first_position + row / heads + 1; }
    int64_t from(int64_t row) const {
        const int64_t lowest = window == 0 ? 0 : to(row) - window;
        return lowest > 0 ? lowest : 0;
    }
};

inline int64_t within(int64_t position, int64_t start) {  // as a key of the tile at `start`
    return position < start ? 0 : position > start + kTile ? kTile : position - start;
}

// sums = sums * kept + products.
inline void accumulate(float* sums, const float* products, float kept, int64_t size) {
    for (int64_t i = 0; i < size; i += HR_LANES)
        store(sums + i, fma(load(sums + i), splat(kept), load(products + i)));
}

// Probabilities of some rows, at most kMaxRows, times the values of one head.
inline void multiply_values(const Scratch& s, int64_t row, int64_t rows, int64_t head,
                            int64_t wide) {
    const bf16* values = s.values + head * wide * kTile;
    for (int64_t d = 0; d < wide; d += kBlockRows)
        multiply_rows<1>((int)rows, s.probabilities + row * kTile, kTile, values + d * kTile,
                         kBlockRows * kTile, kTile, s.products + row * wide + d, wide);
}

// One tile, whose first key is at position `start`, into the sums of the part. Rows are those of
// the first K and V head of the item, then those of the next.
inline void add_tile(const hr_op& op, const hr_step& step, const Span& span, const Item& item,
                     int64_t start, int64_t rows, const Scratch& s) {
    const int64_t dim = op.head_dim, wide = padded_dim(dim), cache_row = op.num_kv_heads * dim;
    const int64_t width = item.num_kv_heads * dim, all_rows = item.num_kv_heads * rows;
    const int64_t from = within(span.from(0), start), to = within(span.to(rows - 1), start);
    const int64_t* slots = step.groups[op.group].slots[item.sequence] + start;
    const bf16* keys[kTile];
    const bf16* values[kTile];
    for (int64_t key = from; key < to; ++key) {
        keys[key] = (const bf16*)op.pages + slots[key] * cache_row + item.kv_head * dim;
        values[key] = keys[key] + step.block_size * cache_row;
    }
    pack_keys(keys, from, to, width, s.keys);
    for (int64_t head = 0; head < item.num_kv_heads; ++head) {
        for (int64_t row = head * rows; row < (head + 1) * rows; row += kMaxRows) {
            const int64_t rest = (head + 1) * rows - row;
            multiply_rows<2>((int)(rest < kMaxRows ? rest : kMaxRows), s.queries + row * dim, dim,
                             s.keys + head * dim * kBlockRows, (width + 1) / 2 * 2 * kBlockRows, dim,
                             s.scores + row * kTile, kTile);
        }
    }
    float kept[kMaxItemRows];
    for (int64_t row = 0; row < all_rows; ++row) {
        const int64_t own = row % rows;
        kept[row] = make_probabilities(op, s.scores + row * kTile, within(span.from(own), start),
                                       within(span.to(own), start), s.part_max + row,
                                       s.part_sum + row, s.probabilities + row * kTile);
    }
    const bool is_finite = pack_values(values, from, to, width, s.values);
    for (int64_t row = 0; row < all_rows;) {
        const int64_t own = row % rows, rest = rows - own;
        int64_t together = rest < kMaxRows ? rest : kMaxRows;
        if (!is_finite) {
            // 0 times what is not finite is not 0: every row gets only the values that it sees.
            together = 1;
            pack_values(values, within(span.from(own), start), within(span.to(own), start), width,
                        s.values);
        }
        multiply_values(s, row, together, row / rows, wide);
        row += together;
    }
    for (int64_t row = 0; row < all_rows; ++row)
        accumulate(s.part + row * wide, s.products + row * wide, kept[row], wide);
}

// Join a part's sums to those of the parts before it.
inline void join_part(const float* part, float part_max, float part_sum, float* whole,
                      float* whole_max, float* whole_sum, int64_t wide) {
    if (part_sum == 0.0f && part_max == -kInfinity) return;  // nothing seen in it
    if (*whole_sum == 0.0f && *whole_max == -kInfinity) {
        memcpy(whole, part, wide * sizeof(float));
        *whole_max = part_max;
        *whole_sum = part_sum;
        return;
    }
    const float most = part_max > *whole_max ? part_max : *whole_max;
    float lanes[HR_LANES];
    store(lanes, exponential(splat(*whole_max - most)));
    const float old_scale = lanes[0];
    store(lanes, exponential(splat(part_max - most)));
    const float new_scale = lanes[0];
    for (int64_t i = 0; i < wide; i += HR_LANES) {
        const Vec old_sums = mul(load(whole + i), splat(old_scale));
        store(whole + i, fma(load(part + i), splat(new_scale), old_sums));
    }
    *whole_max = most;
    *whole_sum = part_sum * new_scale + *whole_sum * old_scale;
}

inline void clear_sums(float* sums, float* most, float* total, int64_t rows, int64_t wide) {
    memset(sums, 0, rows * wide * sizeof(float));
    memset(total, 0, rows * sizeof(float));
    for (int64_t row = 0; row < rows; ++row) most[row] = -kInfinity;
}

inline void write_row(const float* sums, float total, int64_t dim, bf16* out) {
    for (int64_t i = 0; i < dim; i += HR_LANES)
        store_some(out + i, div(load(sums + i), splat(total)), dim - i);
}

inline Span span_of(const hr_op& op, const hr_step& step, const Item& item) {
    return {item.first_position, step.groups[op.group].window, op.num_heads / op.num_kv_heads};
}

// All keys that the item's queries see, into the sums of `s`.
inline void add_parts(const hr_op& op, const hr_step& step, const Item& item, const Scratch& s) {
    const int64_t dim = op.head_dim, wide = padded_dim(dim);
    const Span span = span_of(op, step, item);
    const int64_t rows = item.num_tokens * span.heads, all_rows = rows * item.num_kv_heads;
    const int64_t end = item.to < span.to(rows - 1) ? item.to : span.to(rows - 1);
    int64_t start = (item.from > span.from(0) ? item.from : span.from(0)) / kTile * kTile;
    clear_sums(s.whole, s.whole_max, s.whole_sum, all_rows, wide);
    while (start < end) {
        const int64_t part_end = (start / kPart + 1) * kPart;
        clear_sums(s.part, s.part_max, s.part_sum, all_rows, wide);
        for (; start < end && start < part_end; start += kTile)
            add_tile(op, step, span, item, start, rows, s);
        for (int64_t row = 0; row < all_rows; ++row)
            join_part(s.part + row * wide, s.part_max[row], s.part_sum[row], s.whole + row * wide,
                      s.whole_max + row, s.whole_sum + row, wide);
    }
}

// One item. Its sums go to `partial`, if that is not null, and its results to the output otherwise.
inline void attend(const hr_op& op, const hr_step& step, const Item& item, float* partial,
                   const Scratch& s) {
    const int64_t dim = op.head_dim, wide = padded_dim(dim);
    const int64_t heads = op.num_heads / op.num_kv_heads, rows = item.num_tokens * heads;
    for (int64_t head = 0; head < item.num_kv_heads; ++head)
        for (int64_t t = 0; t < item.num_tokens; ++t)
            memcpy(s.queries + (head * rows + t * heads) * dim,
                   bf16_row(step, op.input, item.first_row + t) +
                       (item.kv_head + head) * heads * dim,
                   heads * dim * sizeof(bf16));
    add_parts(op, step, item, s);
    for (int64_t row = 0; row < rows * item.num_kv_heads; ++row) {
        if (partial != nullptr) {
            float* place = partial + row * (wide + 2);
            memcpy(place, s.whole + row * wide, wide * sizeof(float));
            place[wide] = s.whole_max[row];
            place[wide + 1] = s.whole_sum[row];
            continue;
        }
        const int64_t token = row % rows / heads, head = item.kv_head + row / rows;
        bf16* out = bf16_row(step, op.output, item.first_row + token);
        write_row(s.whole + row * wide, s.whole_sum[row], dim,
                  out + (head * heads + row % heads) * dim);
    }
}

// The parts of one token, which different threads have computed; `first` is the item of the first.
inline void join_items(const hr_op& op, const hr_step& step, const Item& first,
                       const float* partial, const Scratch& s) {
    const int64_t dim = op.head_dim, wide = padded_dim(dim);
    const int64_t heads = op.num_heads / op.num_kv_heads, rows = heads * first.num_kv_heads;
    clear_sums(s.whole, s.whole_max, s.whole_sum, rows, wide);
    bf16* out = bf16_row(step, op.output, first.first_row) + first.kv_head * heads * dim;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t part = 0; part < first.num_parts; ++part) {
            const float* place = partial + (part * rows + row) * (wide + 2);
            join_part(place, place[wide], place[wide + 1], s.whole + row * wide, s.whole_max + row,
                      s.whole_sum + row, wide);
        }
        write_row(s.whole + row * wide, s.whole_sum[row], dim, out + row * dim);
    }
}

}  // namespace
