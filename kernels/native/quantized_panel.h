// A packed block of quantized weights as products take it: its codes and scales unpacked in registers,
// or, for many rows of x, some chunks at a time in memory.
#pragma once

#include <type_traits>

#include "quantize_rows.h"
#include "quantized_layout.h"

namespace {

constexpr int kCacheLine = 64;
// Bytes that are fetched before they are needed, all measured with 8 rows: a whole number of pages
// costs INT8 10 %, whose chunks divide a page; what serves it costs Q6_K as much.
template <int kFormat>
constexpr int kAhead = kFormat == HR_INT8 ? 12928 : 12288;
constexpr int kPanelChunks = 8;  // at most: what the first-level cache holds beside rows of x

// Rows of a product's input, quantized.
struct QuantizedRows {
    const QuantizedBlock* data;
    int64_t stride;  // blocks
};

// Calls f(0) ... f(7) with numbers that are constants.
template <typename Function>
inline __attribute__((always_inline)) void each_step(Function f) {
    f(std::integral_constant<int, 0>());
    f(std::integral_constant<int, 1>());
    f(std::integral_constant<int, 2>());
    f(std::integral_constant<int, 3>());
    f(std::integral_constant<int, 4>());
    f(std::integral_constant<int, 5>());
    f(std::integral_constant<int, 6>());
    f(std::integral_constant<int, 7>());
}

// Bits moved to the left or, below 0, to the right. Only those of `mask` are kept in every byte, so
// what crosses from one to another does not matter.
template <int kShift>
inline Ints bits_moved(Ints a, int mask) {
    if constexpr (kShift >= 0) return bits_and(shifted_left<kShift>(a), splat_byte(mask));
    return bits_and(shifted_right<kShift >= 0 ? 0 : -kShift>(a), splat_byte(mask));
}

// A chunk of a packed block: codes and scales of its lanes, unpacked in registers.
template <int kFormat>
struct PackedChunk {
    static constexpr QuantizedLayout kLayout = layout_of(kFormat);
    const uint8_t* data;
    const uint8_t* header;

    static PackedChunk at(const uint8_t* block, int64_t chunk) {
        return {block + kLayout.chunk_at(chunk), block + kLayout.header_at(chunk)};
    }

    // Of inputs 4 step ... 4 step + 3.
    template <int kStep>
    Ints codes(int lane) const {
        const uint8_t* low = data + 4 * lane;
        if constexpr (kLayout.code_bits == 8) return load_ints(low + kStep * kLineBytes);
        const Ints line = load_ints(low + kStep % 4 * kLineBytes);
        const Ints lower = bits_moved<kStep < 4 ? 0 : -4>(line, 15);
        if constexpr (kLayout.code_bits == 4) return lower;
        const uint8_t* high = low + kLayout.high_at();
        if constexpr (kLayout.code_bits == 5)
            return bits_or(lower, bits_moved<4 - kStep>(load_ints(high), 16));
        const Ints pairs = load_ints(high + kStep / 4 * kLineBytes);
        return bits_or(lower, bits_moved<4 - kStep % 4 * 2>(pairs, 48));
    }

    // One of 8 parts of what will be needed soon. With one or two rows of x the processor sees for
    // itself what comes next.
    template <int kStep, int R>
    void fetch() const {
        if (R <= 2) return;
        constexpr int kLines = kLayout.chunk_bytes() / kCacheLine;
#pragma GCC unroll 16
        for (int i = kLines * kStep / 8; i < kLines * (kStep + 1) / 8; ++i)
            prefetch_far(data + kAhead<kFormat> + i * kCacheLine);
    }

    Vec scale(int lane, int part) const {
        const uint8_t* at = data + kLayout.scales_at() + part * kChunkRows * kLayout.scale_bytes();
        if constexpr (!kLayout.is_super) return load_halves(at + 2 * lane);
        const Vec bytes = kFormat == HR_Q6_K ? load_signed_bytes(at + lane)
                                             : load_unsigned_bytes(at + lane);
        return mul(load_halves(header + 2 * lane), bytes);
    }

    Vec minimum(int lane) const {
        const uint8_t* at = data + kLayout.minima_at();
        if constexpr (!kLayout.is_super) return load_halves(at + 2 * lane);
        return mul(load_halves(header + 2 * (kChunkRows + lane)), load_unsigned_bytes(at + lane));
    }
};

// Chunks of a block, unpacked once for many rows of x: bytes and floats. With kIsCentred the bytes
// are code - offset, else codes, of which those of 8 bits stay where they are.
template <int kFormat, bool kIsCentred = false>
struct Panel {
    static constexpr QuantizedLayout kLayout = layout_of(kFormat);
    static constexpr bool kIsCopied = kIsCentred || kLayout.code_bits != 8;
    alignas(64) uint8_t copies[kIsCopied ? kPanelChunks : 1][8 * kLineBytes];
    alignas(64) float scales[kPanelChunks][kLayout.num_scales == 2 ? 2 : 1][kChunkRows];
    alignas(64) float minima[kLayout.has_minimum ? kPanelChunks : 1][kChunkRows];
    const uint8_t* packed;
    const uint8_t* ahead;  // what to fetch meanwhile: so many cache lines with every chunk
    int64_t ahead_lines;

    void unpack(const uint8_t* block, int64_t first, int64_t count) {
        packed = block + kLayout.chunk_at(first);
        for (int64_t n = 0; n < count; ++n) {
            const auto chunk = PackedChunk<kFormat>::at(block, first + n);
            for (int lane = 0; lane < kChunkRows; lane += HR_LANES) unpack(chunk, n, lane);
        }
    }

    const uint8_t* codes(int64_t n) const {
        return kIsCopied ? copies[n] : packed + n * kLayout.chunk_bytes();
    }

    void fetch(int64_t n) const {
        const uint8_t* from = ahead + n * ahead_lines * kCacheLine;
        for (int64_t i = 0; i < ahead_lines; ++i) prefetch_far(from + i * kCacheLine);
    }

  private:
    void unpack(const PackedChunk<kFormat>& chunk, int64_t n, int lane) {
        if constexpr (kIsCopied)
            each_step([&](auto step) __attribute__((always_inline)) {
                constexpr int kStep = decltype(step)::value;
                Ints codes = chunk.template codes<kStep>(lane);
                if constexpr (kIsCentred && kLayout.offset() > 0)
                    codes = sub_bytes(codes, splat_byte(kLayout.offset()));
                store_ints(copies[n] + 4 * lane + kStep * kLineBytes, codes);
            });
        for (int part = 0; part < kLayout.num_scales; ++part)
            store(scales[n][part] + lane, chunk.scale(lane, part));
        if constexpr (kLayout.has_minimum) store(minima[n] + lane, chunk.minimum(lane));
    }
};

// Takes a block of 32 outputs apart into panels and calls multiply(row, from, count) for each of
// them and all rows in turn, `together` at a time; `from`: the panel's first chunk.
template <typename Panel, typename Multiply>
inline void each_panel(Panel& panel, const uint8_t* block, int64_t num_rows, int64_t together,
                       int64_t num_chunks, const Multiply& multiply) {
    const int64_t turns = (num_rows + together - 1) / together;
    const int64_t num_panels = (num_chunks + kPanelChunks - 1) / kPanelChunks;
    for (int64_t i = 0; i < num_panels; ++i) {
        const int64_t from = num_chunks * i / num_panels, to = num_chunks * (i + 1) / num_panels;
        const int64_t count = to - from;
        panel.unpack(block, from, count);
        const int64_t bytes = Panel::kLayout.chunk_at(to) - Panel::kLayout.chunk_at(from);
        const int64_t lines = turns * count * kCacheLine;  // bytes, if each chunk fetches a line
        panel.ahead = block + Panel::kLayout.chunk_at(to);
        panel.ahead_lines = (bytes + lines - 1) / lines;
        const uint8_t* ahead_end = panel.ahead + bytes;
        for (int64_t row = 0; row < num_rows; row += together) {
            multiply(row, from, count);
            panel.ahead += panel.ahead_lines * count * kCacheLine;
            if (panel.ahead >= ahead_end) panel.ahead_lines = 0;
        }
    }
}

}  // namespace
