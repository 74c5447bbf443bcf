// Scores and weighted values of many bf16 rows by tiles, bit for bit as without them.
//
// A tile product adds what rule N1 adds per 32 dims or keys, and one of half as many inputs what it
// adds where only 16 are there or asked for: nothing is padded. Tiles of keys are read where they
// lie. Rows of values have to follow one another over all 32 keys, which the loader sees to.
#pragma once

#include "cache.h"
#include "product_amx.h"

namespace {

// While it lives, tiles are configured for half rows of A.
struct HalfTiles {
    HalfTiles() { configure_tiles(kTileRows, kHalfTileBytes); }
    ~HalfTiles() { configure_tiles(kTileRows, kTileBytes); }
};

// Scores [num_rows][kTile] of queries [num_rows][dim] and the keys of some groups of a tile; `dim`:
// a multiple of 16.
inline void keys_by_tiles(int64_t num_rows, const bf16* queries, int64_t dim,
                          const Tile<bf16>& tile, int64_t first_group, int64_t end_group,
                          float* scores) {
    const auto multiply = [&](int64_t first_dim, int64_t num_steps) {
        const bf16* const* keys = tile.keys;
        const int64_t offset = first_dim / 2 * tile.key_stride;
        tile_product_bf16(
            num_rows, queries + first_dim, dim, [&](int64_t group) { return keys[group] + offset; },
            tile.key_stride, num_steps, first_group, end_group, first_dim == 0, scores, kTile);
    };
    const int64_t num_steps = dim / kStepInputs, rest = num_steps * kStepInputs;
    if (num_steps > 0) multiply(0, num_steps);
    if (rest == dim) return;
    const HalfTiles half;
    multiply(rest, 1);
}

// Adds the values of some groups of a tile, weighted with probabilities [num_rows][kTile], to sums
// [num_rows][wide]. Values of a group follow those of the group before it.
inline void values_by_tiles(int64_t num_rows, const bf16* probabilities, const Tile<bf16>& tile,
                            int64_t first_group, int64_t end_group, int64_t wide, float* sums) {
    const auto add = [&](int64_t group, int64_t num_steps) {
        const bf16* values = tile.values[group];
        tile_product_bf16(
            num_rows, probabilities + group * kKeyGroup, kTile,
            [&](int64_t n) { return values + n * kTileRows * 2; }, tile.value_stride, num_steps, 0,
            wide / kTileRows, false, sums, wide);
    };
    const auto add_half = [&](int64_t group) {
        const HalfTiles half;
        add(group, 1);
    };
    int64_t group = first_group;
    if (group % 2 != 0) add_half(group++);
    const int64_t num_steps = (end_group - group) / 2;
    if (num_steps > 0) add(group, num_steps);
    group += 2 * num_steps;
    if (group < end_group) add_half(group);
}

}  // namespace
