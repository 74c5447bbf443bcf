// The work list of attention: items, which threads take one after the other, and scratch memory.
#pragma once

#include <stdint.h>

#include "interface.h"

constexpr int64_t kTile = 64;         // keys; absolute boundaries
constexpr int64_t kPart = 512;        // keys; absolute boundaries
constexpr int64_t kMaxItemRows = 96;  // tokens x query heads of one K and V head
constexpr int64_t kMaxLanes = 16;     // of a vector of floats
constexpr int64_t kMaxSoftmaxRows = 32;  // of an item that are between two products at once

// Some tokens of one sequence and a range of keys. Every K and V head, with the query heads that
// share it, is a piece of work of its own.
struct Item {
    int64_t sequence;
    int64_t first_row;       // flat row of the first token
    int64_t first_position;  // its position in the sequence
    int64_t num_tokens;
    int64_t from, to;        // keys
    int64_t part;            // -1: all parts; else which of `num_parts` items of these tokens
    int64_t num_parts;
    int64_t partial;         // where its sums go, in rows of the partial sums: [kv_heads][rows]
};

struct GroupWork {
    const Item* items;
    int64_t num_items;
    bool has_parts;
    bool is_alone;  // no item needs what another one writes: single tokens in one part
    const int64_t* token_slots;  // [num_tokens]
};

namespace {

inline int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

// A row of partial sums: the sums, the sum of the probabilities in lanes, the largest score.
inline int64_t partial_size(int64_t dim) { return padded_dim(dim) + kMaxLanes + 1; }

// Where the pieces of one thread's scratch memory begin, in bytes.
struct ScratchLayout {
    int64_t queries;        // [kMaxItemRows][dim] bf16 or float
    int64_t keys;           // a tile: [dim][kTile] of any element type
    int64_t values;         // a tile: [kTile][padded dim] of any element type
    int64_t key_scales;     // [kTile] floats
    int64_t value_scales;   // [kTile] floats
    int64_t scores;         // [kMaxSoftmaxRows][kTile] floats
    int64_t probabilities;  // [kMaxSoftmaxRows][kTile] bf16 or float
    int64_t part;           // [kMaxItemRows][padded dim] floats: sums of the part
    int64_t part_most;      // [kMaxItemRows] floats
    int64_t part_totals;    // [kMaxItemRows][kMaxLanes] floats
    int64_t whole;          // the same three of all parts so far
    int64_t whole_most;
    int64_t whole_totals;
    int64_t row_ends;       // [kMaxItemRows] int64
    int64_t bytes;
};

inline ScratchLayout scratch_layout(int64_t dim) {
    const int64_t wide = padded_dim(dim);
    int64_t bytes = 0;
    const auto take = [&](int64_t elements) {
        const int64_t start = bytes;
        bytes += (4 * elements + 63) / 64 * 64;
        return start;
    };
    ScratchLayout s;
    s.queries = take(kMaxItemRows * dim);
    s.keys = take(kTile * dim);
    s.values = take(kTile * wide);
    s.key_scales = take(kTile);
    s.value_scales = take(kTile);
    s.scores = take(kMaxSoftmaxRows * kTile);
    s.probabilities = take(kMaxSoftmaxRows * kTile);
    s.part = take(kMaxItemRows * wide);
    s.part_most = take(kMaxItemRows);
    s.part_totals = take(kMaxItemRows * kMaxLanes);
    s.whole = take(kMaxItemRows * wide);
    s.whole_most = take(kMaxItemRows);
    s.whole_totals = take(kMaxItemRows * kMaxLanes);
    s.row_ends = take(2 * kMaxItemRows);
    s.bytes = bytes;
    return s;
}

}  // namespace
