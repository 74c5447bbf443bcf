// How quantized matrices lie in memory once packed: shared by packing and by the kernels.
//
// A block of 32 rows is a run of chunks of 32 inputs, so that a product reads it from its first byte
// to its last. A chunk, of which every part begins at a multiple of 32 bytes:
//
//   codes     lines of [32 rows][4 inputs] bytes:
//             8 bits: line j (0 ... 7) has inputs 4 j ... 4 j + 3;
//             fewer: line j (0 ... 3) has the low 4 bits of them in its low halves, and those of
//             inputs 16 + 4 j ... in its high halves
//   high bits of 5 bits, one line, whose bit j is the fifth bit of inputs 4 j ...; of 6 bits, two
//             lines for 16 inputs each, with 2 bits for each j (0 ... 3)
//   scales    [num_scales][32 rows], fp16 or, in blocks of 256 inputs, bytes
//   minima    [32 rows], as the scales
//
// With blocks of 256 inputs, 8 chunks follow a header: fp16 scales [32 rows], then fp16 minima
// [32 rows] where the format has them. Their minima are stored with the sign turned, so that every
// format adds its minimum. A block of INT8 ends with its fp32 scales [32 rows].
//
// A code means code - offset, so bytes of 8 bits are stored with 128 added.
#pragma once

#include <stdint.h>

#include "interface.h"

namespace {

constexpr int kChunkInputs = 32;
constexpr int kChunkRows = 32;
constexpr int kSuperChunks = 8;  // after one header
constexpr int kLineBytes = 128;  // [32 rows][4 inputs]

struct QuantizedLayout {
    int file_inputs;  // of a block in a file; 0: not read from files
    int file_bytes;
    int code_bits;
    int offset_bits;  // the offset is 1 << offset_bits; -1: no offset
    int num_scales;   // per row and chunk; 0: one per row
    bool has_minimum;
    bool is_super;

    constexpr int scale_bytes() const { return is_super ? 1 : 2; }
    constexpr int high_at() const { return kLineBytes * (code_bits == 8 ? 8 : 4); }
    constexpr int scales_at() const {
        return high_at() + (code_bits == 8 ? 0 : kLineBytes * (code_bits - 4));
    }
    constexpr int minima_at() const { return scales_at() + num_scales * kChunkRows * scale_bytes(); }
    constexpr int chunk_bytes() const {
        return minima_at() + (has_minimum ? kChunkRows * scale_bytes() : 0);
    }
    constexpr int header_bytes() const { return is_super ? 2 * kChunkRows * (1 + has_minimum) : 0; }
    constexpr int offset() const { return offset_bits < 0 ? 0 : 1 << offset_bits; }

    // Where the chunk of these inputs, and the header before it, lie in their block.
    constexpr int64_t header_at(int64_t chunk) const {
        return chunk / kSuperChunks * (header_bytes() + kSuperChunks * chunk_bytes());
    }
    constexpr int64_t chunk_at(int64_t chunk) const {
        if (!is_super) return chunk * chunk_bytes();
        return header_at(chunk) + header_bytes() + chunk % kSuperChunks * chunk_bytes();
    }
    constexpr int64_t row_scales_at(int64_t num_inputs) const {
        return chunk_at((num_inputs + kChunkInputs - 1) / kChunkInputs);
    }
    constexpr int64_t block_bytes(int64_t num_inputs) const {
        const int64_t num_chunks = (num_inputs + kChunkInputs - 1) / kChunkInputs;
        if (is_super) return header_at(num_chunks);
        return chunk_at(num_chunks) + (num_scales == 0 ? 4 * kChunkRows : 0);
    }
};

constexpr QuantizedLayout layout_of(int format) {
    switch (format) {
        case HR_INT8: return {0, 0, 8, 7, 0, false, false};
        case HR_Q8_0: return {32, 34, 8, 7, 1, false, false};
        case HR_Q4_0: return {32, 18, 4, 3, 1, false, false};
        case HR_Q4_1: return {32, 20, 4, -1, 1, true, false};
        case HR_Q5_0: return {32, 22, 5, 4, 1, false, false};
        case HR_Q5_1: return {32, 24, 5, -1, 1, true, false};
        case HR_Q4_K: return {256, 144, 4, -1, 1, true, true};
        case HR_Q5_K: return {256, 176, 5, -1, 1, true, true};
        default: return {256, 210, 6, 5, 2, false, true};  // HR_Q6_K
    }
}

constexpr bool is_quantized(int format) { return format >= HR_INT8 && format <= HR_Q6_K; }

}  // namespace
