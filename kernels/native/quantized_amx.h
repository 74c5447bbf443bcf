// Products of quantized weights by tiles, bit for bit as without: a tile product has the exact dots
// of 16 rows of x with 16 outputs, and the same operations make sums of them.
//
// Of a tile's 64 inputs a row only as many are used as have one scale: at most half of what tiles can
// do, and with 16 cycles for 256 dots about the time that the other operations on them take.
#pragma once

#include "quantized_panel.h"
#include "tiles.h"

namespace {

constexpr int64_t kMinRowsByTiles = kTileRows;

template <int kFormat>
constexpr int kTileInputsOf = layout_of(kFormat).num_scales == 2 ? kQuarterTileBytes
                                                                 : kHalfTileBytes;

// 16 rows of x, whose blocks lie `x_stride` apart, times the chunks of a panel: added to c [16][32].
// A dot is a product of tiles of its own, since what is made of it is not linear; the sums of 16
// outputs stay in registers meanwhile.
template <int kFormat>
__attribute__((noinline)) void multiply_row_tile(const QuantizedBlock* x, int64_t x_stride,
                                                 const Panel<kFormat, true>& panel,
                                                 int64_t num_chunks, float* c) {
    constexpr QuantizedLayout kLayout = layout_of(kFormat);
    constexpr int kParts = kLayout.num_scales == 2 ? 2 : 1;
    alignas(64) int32_t dots[kTileRows][HR_LANES];
    for (int lane = 0; lane < kChunkRows; lane += HR_LANES) {
        Vec sums[kTileRows];
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) sums[r] = load(c + r * kChunkRows + lane);
        for (int64_t n = 0; n < num_chunks; ++n) {
            const QuantizedBlock* blocks = x + n;
            if (lane == 0) panel.fetch(n);
            for (int part = 0; part < kParts; ++part) {
                const uint8_t* codes = panel.codes(n) + part * (8 / kParts) * kLineBytes + 4 * lane;
                multiply_tile_int8(blocks->codes + part * (kChunkInputs / kParts),
                                   x_stride * (int64_t)sizeof *x, (const int8_t*)codes, kLineBytes,
                                   dots);
                Vec weight_scale;
                if constexpr (kLayout.num_scales != 0)
                    weight_scale = load(panel.scales[n][part] + lane);
#pragma GCC unroll 16
                for (int r = 0; r < kTileRows; ++r) {
                    Vec scale = splat(blocks[r * x_stride].scale);
                    if constexpr (kLayout.num_scales != 0) scale = mul(scale, weight_scale);
                    sums[r] = fma(scale, to_floats(load_ints(dots[r])), sums[r]);
                }
            }
            if constexpr (kLayout.has_minimum) {
                const Vec minimum = load(panel.minima[n] + lane);
#pragma GCC unroll 16
                for (int r = 0; r < kTileRows; ++r)
                    sums[r] = fma(minimum, splat(blocks[r * x_stride].scaled_sum), sums[r]);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kTileRows; ++r) store(c + r * kChunkRows + lane, sums[r]);
    }
}

// As multiply_panels, for at least 16 rows. Tiles are configured for rows of 32 inputs, or 16 of
// Q6_K. The last tile ends with x and has its sums to itself: those of rows that another tile has,
// too, are left. c must have room up to the next multiple of 16 rows.
template <int kFormat>
inline void multiply_tile_panels(const uint8_t* block, const QuantizedRows& x, int64_t num_rows,
                                 int64_t num_chunks, float* c) {
    Panel<kFormat, true> panel;
    const int64_t rest = num_rows % kTileRows, last = num_rows - rest;
    const int64_t sums_rows = rest == 0 ? num_rows : last + kTileRows;
    memset(c + num_rows * kChunkRows, 0, (sums_rows - num_rows) * kChunkRows * sizeof(float));
    each_panel(panel, block, num_rows, kTileRows, num_chunks,
               [&](int64_t row, int64_t from, int64_t count) {
                   const int64_t first = row < last ? row : num_rows - kTileRows;
                   multiply_row_tile<kFormat>(x.data + first * x.stride + from, x.stride, panel,
                                              count, c + row * kChunkRows);
               });
    memmove(c + last * kChunkRows, c + (last + kTileRows - rest) * kChunkRows,
            rest * kChunkRows * sizeof(float));
}

}  // namespace
