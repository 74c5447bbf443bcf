// Products of bf16 by tiles: many rows of x at once, bit for bit as `multiply_rows` without bf16
// instructions, since a tile product adds what rule N1 adds per 32 k.
//
// Two tiles of 16 rows of x times two of 16 outputs: per 32 k, four tiles are loaded for four
// products, which take 16 cycles each. A block of weights is taken in panels of inputs that the
// first-level cache holds while all rows of a pass go by; sums wait in memory between panels. The
// rows come from the second-level cache: a pass has few enough of them, or, where their inputs are
// many, several blocks share each panel's columns of x.
#pragma once

#include "product.h"
#include "tiles.h"
#include "work.h"

// Of how many rows on tiles are used: fewer ones stream the weights as well without. A build with
// CXXFLAGS=-DHR_MIN_TILE_ROWS=N moves it, to measure where tiles begin to pay.
#ifndef HR_MIN_TILE_ROWS
#define HR_MIN_TILE_ROWS 4
#endif

namespace {

constexpr int64_t kStepInputs = 32;     // k of one tile product
constexpr int64_t kMaxPanelSteps = 20;  // of 32 k: 40 KB of weights
constexpr int64_t kPassBytes = 1 << 20;  // of x, half of a second-level cache
constexpr int64_t kStepLines = 2 * kTileRows;  // cache lines of weights per 32 k
constexpr int64_t kTileSums = kTileRows * kBlockRows;

// Brings the next panel into the second-level cache while this one is multiplied, evenly.
struct TilesAhead {
    const char* line;
    int64_t lines_per_step;

    void step() {
        for (int64_t i = 0; i < lines_per_step; ++i, line += 64)
            asm volatile("prefetcht1 %0" : : "m"(*line));
    }
};

// R row tiles, whose rows begin at `x`, times N tiles of 16 outputs, whose weights begin at `w`, over
// `num_steps` times 32 k, or less as the tiles are configured. Strides in bytes, `w_stride` from one
// pair of k to the next. The sums of row tile r and output tile n begin at c + r * 16 rows + n * 16,
// rows `c_stride` floats apart; they are added to, or begin at `is_first`.
template <int R, int N>
inline void multiply_tiles(const bf16* const* x, int64_t x_stride, const bf16* const* w,
                           int64_t w_stride, int64_t num_steps, bool is_first, float* c,
                           int64_t c_stride, TilesAhead& shared_ahead) {
    TilesAhead ahead = shared_ahead;  // not read again after every instruction on memory
    const int64_t c_bytes = c_stride * (int64_t)sizeof(float);
    float* lower = c + kTileRows * c_stride;
    if (is_first) {
        zero_tile<kTileC00>();
        if (N == 2) zero_tile<kTileC01>();
        if (R == 2) zero_tile<kTileC10>();
        if (R == 2 && N == 2) zero_tile<kTileC11>();
    } else {
        load_tile<kTileC00>(c, c_bytes);
        if (N == 2) load_tile<kTileC01>(c + kTileRows, c_bytes);
        if (R == 2) load_tile<kTileC10>(lower, c_bytes);
        if (R == 2 && N == 2) load_tile<kTileC11>(lower + kTileRows, c_bytes);
    }
    const char *first = (const char*)w[0], *second = (const char*)w[N - 1];
    for (int64_t step = 0; step < num_steps; ++step) {
        load_tile<kTileB0>(first, w_stride);
        first += kTileRows * w_stride;
        load_tile<kTileA0>(x[0] + step * kStepInputs, x_stride);
        multiply_bf16_tiles<kTileC00, kTileA0, kTileB0>();
        if (N == 2) {
            load_tile<kTileB1>(second, w_stride);
            second += kTileRows * w_stride;
            multiply_bf16_tiles<kTileC01, kTileA0, kTileB1>();
        }
        if (R == 2) {
            load_tile<kTileA1>(x[R - 1] + step * kStepInputs, x_stride);
            multiply_bf16_tiles<kTileC10, kTileA1, kTileB0>();
            if (N == 2) multiply_bf16_tiles<kTileC11, kTileA1, kTileB1>();
        }
        ahead.step();
    }
    store_tile<kTileC00>(c, c_bytes);
    if (N == 2) store_tile<kTileC01>(c + kTileRows, c_bytes);
    if (R == 2) store_tile<kTileC10>(lower, c_bytes);
    if (R == 2 && N == 2) store_tile<kTileC11>(lower + kTileRows, c_bytes);
    shared_ahead = ahead;
}

// c[r][n] = the product of row r of x with output n, or is added to unless `is_first`, for the tiles
// of 16 outputs from `first` to `end` and `num_steps` steps of as many k as a row of A is configured
// for. `weights(t)`: of output tile t, pairs of k, `w_stride` elements apart, of [16][2]. Tiles must
// be configured for 16 rows; x must be readable and c writable up to the next multiple of 16 rows,
// whose surplus may hold anything.
template <typename Weights>
inline void tile_product_bf16(int64_t num_rows, const bf16* x, int64_t x_stride, Weights weights,
                              int64_t w_stride, int64_t num_steps, int64_t first, int64_t end,
                              bool is_first, float* c, int64_t c_stride) {
    const int64_t x_bytes = x_stride * (int64_t)sizeof(bf16);
    const int64_t w_bytes = w_stride * (int64_t)sizeof(bf16);
    TilesAhead none = {nullptr, 0};
    for (int64_t tile = first; tile < end; tile += 2) {
        const bool is_paired = tile + 1 < end;
        const bf16* w[2] = {weights(tile), is_paired ? weights(tile + 1) : nullptr};
        for (int64_t row = 0; row < num_rows; row += 2 * kTileRows) {
            const bf16* rows[2] = {x + row * x_stride, x + (row + kTileRows) * x_stride};
            const auto multiply = num_rows - row > kTileRows
                ? (is_paired ? multiply_tiles<2, 2> : multiply_tiles<2, 1>)
                : (is_paired ? multiply_tiles<1, 2> : multiply_tiles<1, 1>);
            multiply(rows, x_bytes, w, w_bytes, num_steps, is_first,
                     c + row * c_stride + tile * kTileRows, c_stride, none);
        }
    }
}

// Which part of a product one thread computes: rows of x and blocks of outputs.
struct ProductShare {
    int64_t first_row, end_row, first_block, end_block;
};

// Blocks alone are too few for many threads, so rows may be split too, in pairs of tiles: as evenly
// as it goes, and else as rarely, since each part of the rows reads the weights again.
inline ProductShare share_product(int64_t num_rows, int64_t num_blocks, int thread,
                                  int num_threads) {
    constexpr int64_t kPairRows = 2 * kTileRows;
    const int64_t num_pairs = (num_rows + kPairRows - 1) / kPairRows;
    int64_t row_parts = 1, least = INT64_MAX;
    for (int64_t parts = 1; parts <= num_threads && parts <= num_pairs; ++parts) {
        const int64_t block_parts = num_threads / parts;
        const int64_t work = ((num_pairs + parts - 1) / parts) *
                             ((num_blocks + block_parts - 1) / block_parts);
        if (work >= least) continue;
        least = work;
        row_parts = parts;
    }
    const int64_t block_parts = num_threads / row_parts;
    const int64_t row_part = thread / block_parts, block_part = thread % block_parts;
    if (row_part >= row_parts) return {0, 0, 0, 0};
    const int64_t end_row = num_pairs * (row_part + 1) / row_parts * kPairRows;
    return {num_pairs * row_part / row_parts * kPairRows, end_row < num_rows ? end_row : num_rows,
            num_blocks * block_part / block_parts, num_blocks * (block_part + 1) / block_parts};
}

// Whether tiles multiply such rows.
inline bool are_tiles_used(int64_t num_rows, int64_t num_inputs) {
    return num_rows >= HR_MIN_TILE_ROWS && num_inputs % kStepInputs == 0;
}

// All of x and the weights that a pass of one thread over its rows has to do with.
struct TilePass {
    const bf16* x;
    int64_t x_stride;
    int64_t num_rows;  // of x
    const bf16* weight;
    int64_t num_steps;  // of 32 k
    int64_t first_row, end_row;

    int64_t num_tiles() const { return (end_row - first_row + kTileRows - 1) / kTileRows; }

    // Where a tile's rows begin. The last one ends with x, so that it is whole if x has 16 rows: it
    // may compute rows again that another tile has.
    int64_t tile_row(int64_t tile) const {
        const int64_t row = first_row + tile * kTileRows, last = num_rows - kTileRows;
        return row < last || last < 0 ? row : last;
    }
};

// Some steps of one block, times all rows of the pass; `sums`: [tiles][16 rows][32].
inline void multiply_panel(const TilePass& pass, int64_t block, int64_t first_step,
                           int64_t num_steps, const char* next_panel, float* sums) {
    const int64_t num_tiles = pass.num_tiles(), num_pairs = (num_tiles + 1) / 2;
    const int64_t x_bytes = pass.x_stride * (int64_t)sizeof(bf16);
    const bf16* panel = pass.weight + (block * pass.num_steps + first_step) * kStepInputs * kBlockRows;
    const bf16* outputs[2] = {panel, panel + kTileBytes / sizeof(bf16)};
    TilesAhead ahead = {next_panel, (kStepLines + num_pairs - 1) / num_pairs};
    for (int64_t tile = 0; tile < num_tiles; tile += 2) {
        const bf16* x = pass.x + first_step * kStepInputs;
        const bf16* tiles[2] = {x + pass.tile_row(tile) * pass.x_stride,
                                x + pass.tile_row(tile + 1) * pass.x_stride};
        const auto multiply = tile + 1 < num_tiles ? multiply_tiles<2, 2> : multiply_tiles<1, 2>;
        multiply(tiles, x_bytes, outputs, 2 * kTileBytes, num_steps, first_step == 0,
                 sums + tile * kTileSums, kBlockRows, ahead);
    }
}

// Blocks `from` to `to`, at most kGroupBlocks, for all rows of the pass.
template <typename Finish>
inline void multiply_group(const TilePass& pass, int64_t from, int64_t to, float* sums,
                           const Finish& finish) {
    const int64_t num_panels = (pass.num_steps + kMaxPanelSteps - 1) / kMaxPanelSteps;
    const auto panel_step = [&](int64_t i) { return pass.num_steps * i / num_panels; };
    const auto sums_of = [&](int64_t block) {
        return sums + (block - from) * kPassRows * kBlockRows;
    };
    for (int64_t i = 0; i < num_panels; ++i) {
        const int64_t step = panel_step(i);
        for (int64_t block = from; block < to; ++block) {
            // The last one is followed by the next group, in which the next block comes first.
            const bool is_last_block = block + 1 == to, is_last_panel = i + 1 == num_panels;
            const int64_t next_block = is_last_block && !is_last_panel ? from : block + 1;
            const int64_t next_step =
                !is_last_block ? step : is_last_panel ? 0 : panel_step(i + 1);
            const bf16* next = pass.weight + (next_block * pass.num_steps + next_step) *
                                                 kStepInputs * kBlockRows;
            multiply_panel(pass, block, step, panel_step(i + 1) - step, (const char*)next,
                           sums_of(block));
        }
    }
    for (int64_t block = from; block < to; ++block)
        for (int64_t row = pass.first_row; row < pass.end_row; ++row) {
            const int64_t tile = (row - pass.first_row) / kTileRows;
            finish(row, block, sums_of(block) + tile * kTileSums +
                                   (row - pass.tile_row(tile)) * kBlockRows);
        }
}

// One thread's share of a product by tiles, where `are_tiles_used`; `weight` is packed.
// `finish(row, block, sums)` is called once per row and block with 32 sums. `scratch`: kTileSumsBytes.
template <typename Finish>
inline void run_tile_product(const bf16* x, int64_t x_stride, int64_t num_rows, const bf16* weight,
                             int64_t num_outputs, int64_t num_inputs, void* scratch, int thread,
                             int num_threads, const Finish& finish) {
    const int64_t num_blocks = (num_outputs + kBlockRows - 1) / kBlockRows;
    const ProductShare share = share_product(num_rows, num_blocks, thread, num_threads);
    if (num_rows < kTileRows) configure_tiles((int)num_rows, kTileBytes);
    for (int64_t row = share.first_row; row < share.end_row; row += kPassRows) {
        const int64_t end = row + kPassRows < share.end_row ? row + kPassRows : share.end_row;
        const TilePass pass = {x, x_stride, num_rows, weight, num_inputs / kStepInputs, row, end};
        const bool is_x_cached = (end - row) * num_inputs * (int64_t)sizeof(bf16) <= kPassBytes;
        const int64_t together = is_x_cached ? 1 : kGroupBlocks;
        for (int64_t block = share.first_block; block < share.end_block; block += together) {
            const int64_t stop =
                block + together < share.end_block ? block + together : share.end_block;
            multiply_group(pass, block, stop, (float*)scratch, finish);
        }
    }
    if (num_rows < kTileRows) configure_tiles(kTileRows, kTileBytes);
}

}  // namespace
