// AMX tiles: eight registers of up to 16 rows of 64 bytes, and products of them.
//
// C tiles hold 16 outputs of up to 16 rows as dwords. An A tile holds those rows' inputs side by
// side: 32 bf16, 64 int8 or 32 or 16 int8. A B tile holds the weights of 16 outputs: a row of it
// has one dword of inputs (2 bf16 or 4 int8) of each output. Rows of a tile may lie any number of
// bytes apart in memory.
//
// A thread says what shapes its registers have before it uses them (`configure_tiles`) and lets go
// of them afterwards: other libraries in the process change them too, so a shape lasts no longer
// than a call.
//
// These are instructions, not intrinsics: those of gcc 12 do not tell the compiler what memory they
// read and write, and take no template parameter as a register.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef HR_AMX_EMULATED
#include <stdlib.h>

#include "tile_model.h"
#endif

namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;      // of a whole row
constexpr int kHalfTileBytes = 32;  // of a row of A with 32 int8
constexpr int kQuarterTileBytes = 16;

enum TileRegister {
    kTileC00 = 0,  // row tile 0, output tile 0
    kTileC01 = 1,
    kTileC10 = 2,
    kTileC11 = 3,
    kTileA0 = 4,
    kTileA1 = 5,
    kTileB0 = 6,
    kTileB1 = 7,
};

// What ldtilecfg reads.
struct alignas(64) TileShapes {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};
static_assert(sizeof(TileShapes) == 64, "the processor's layout");

constexpr TileShapes make_shapes(int num_rows, int input_bytes) {
    TileShapes shapes = {};
    shapes.palette = 1;
    for (int i = kTileC00; i <= kTileB1; ++i) {
        const bool is_a = i == kTileA0 || i == kTileA1, is_b = i >= kTileB0;
        shapes.row_bytes[i] = (uint16_t)(is_a ? input_bytes : kTileBytes);
        shapes.num_rows[i] = (uint8_t)(is_b ? input_bytes / 4 : num_rows);
    }
    return shapes;
}

struct AllShapes {
    TileShapes whole[kTileRows + 1];  // by number of rows
    TileShapes half[kTileRows + 1];
    TileShapes quarter[kTileRows + 1];
};

constexpr AllShapes make_all_shapes() {
    AllShapes all = {};
    for (int rows = 1; rows <= kTileRows; ++rows) {
        all.whole[rows] = make_shapes(rows, kTileBytes);
        all.half[rows] = make_shapes(rows, kHalfTileBytes);
        all.quarter[rows] = make_shapes(rows, kQuarterTileBytes);
    }
    return all;
}

constexpr AllShapes kAllShapes = make_all_shapes();

inline const TileShapes& tile_shapes(int num_rows, int input_bytes) {
    switch (input_bytes) {
        case kQuarterTileBytes: return kAllShapes.quarter[num_rows];
        case kHalfTileBytes: return kAllShapes.half[num_rows];
        default: return kAllShapes.whole[num_rows];
    }
}

#ifdef HR_AMX_EMULATED

// One thread's registers. Where the processor would raise a fault, the process ends.
struct EmulatedTiles {
    TileShapes shapes;
    alignas(64) uint8_t data[8][kTileRows][kTileBytes];

    void check(bool is_right) const {
        if (shapes.palette != 1 || !is_right) abort();
    }
    void check_product(int c, int a, int b) const {
        check(shapes.num_rows[c] == shapes.num_rows[a] &&
              shapes.row_bytes[c] == shapes.row_bytes[b] &&
              shapes.row_bytes[a] == 4 * shapes.num_rows[b]);
    }
};

static thread_local EmulatedTiles emulated;

inline void configure_tiles(int num_rows, int input_bytes) {
    emulated = {};
    emulated.shapes = tile_shapes(num_rows, input_bytes);
    emulated.check(num_rows > 0 && num_rows <= kTileRows);
}

inline void release_tiles() { emulated = {}; }

template <TileRegister T>
inline void zero_tile() {
    emulated.check(true);
    memset(emulated.data[T], 0, sizeof emulated.data[T]);
}

template <TileRegister T>
inline void load_tile(const void* from, int64_t stride_bytes) {
    zero_tile<T>();
    for (int row = 0; row < emulated.shapes.num_rows[T]; ++row)
        memcpy(emulated.data[T][row], (const char*)from + row * stride_bytes,
               emulated.shapes.row_bytes[T]);
}

template <TileRegister T>
inline void store_tile(void* to, int64_t stride_bytes) {
    emulated.check(true);
    for (int row = 0; row < emulated.shapes.num_rows[T]; ++row)
        memcpy((char*)to + row * stride_bytes, emulated.data[T][row],
               emulated.shapes.row_bytes[T]);
}

template <TileRegister C, TileRegister A, TileRegister B>
inline void multiply_bf16_tiles() {
    emulated.check_product(C, A, B);
    model_bf16((const uint16_t(*)[32])emulated.data[A], (const uint16_t(*)[32])emulated.data[B],
               (float(*)[16])emulated.data[C], emulated.shapes.num_rows[C],
               emulated.shapes.num_rows[B]);
}

template <TileRegister C, TileRegister A, TileRegister B>
inline void multiply_int8_tiles() {
    emulated.check_product(C, A, B);
    model_int8((const int8_t(*)[64])emulated.data[A], (const int8_t(*)[64])emulated.data[B],
               (int32_t(*)[16])emulated.data[C], emulated.shapes.num_rows[C],
               emulated.shapes.num_rows[B]);
}

#else

// C and A tiles get `num_rows` rows, 16 at most; `input_bytes` is that of a row of A: 64, or 32 or 16
// for as many int8. All registers become 0.
inline void configure_tiles(int num_rows, int input_bytes) {
    asm volatile("ldtilecfg %0" : : "m"(tile_shapes(num_rows, input_bytes)));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <TileRegister T>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"((int)T));
}

template <TileRegister T>
inline void load_tile(const void* from, int64_t stride_bytes) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0"
                 :
                 : "i"((int)T), "r"(from), "r"(stride_bytes)
                 : "memory");
}

template <TileRegister T>
inline void store_tile(void* to, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)"
                 :
                 : "i"((int)T), "r"(to), "r"(stride_bytes)
                 : "memory");
}

// C += A B, of bf16: per 32 inputs as numerics rule N1 says.
template <TileRegister C, TileRegister A, TileRegister B>
inline void multiply_bf16_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"((int)C), "i"((int)A), "i"((int)B));
}

// C += A B, of signed bytes, exactly.
template <TileRegister C, TileRegister A, TileRegister B>
inline void multiply_int8_tiles() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0"
                 :
                 : "i"((int)C), "i"((int)A), "i"((int)B));
}

#endif

// c[r][n] = the sum over the inputs of a[r][k] * b[n][k], exactly, for the rows and the number of
// inputs (`input_bytes`: 64, 32 or 16) that `configure_tiles` was called with. Rows of `a` lie
// `a_stride` bytes apart. `b`: [inputs / 4][16 outputs][4], `b_stride` bytes from one group of 4
// inputs to the next: 64 if they are packed densely.
inline void multiply_tile_int8(const int8_t* a, int64_t a_stride, const int8_t* b,
                               int64_t b_stride, int32_t (*c)[16]) {
    load_tile<kTileA0>(a, a_stride);
    load_tile<kTileB0>(b, b_stride);
    zero_tile<kTileC00>();
    multiply_int8_tiles<kTileC00, kTileA0, kTileB0>();
    store_tile<kTileC00>(c, sizeof *c);
}

}  // namespace
