// The instructions are written out: no compiler leaves such a loop away, and this file needs no
// instruction set of its own. There are more independent chains than an instruction takes cycles
// times instructions a cycle.
#include "peak.h"

namespace {

#if defined(__x86_64__)

constexpr int kChains = 14;     // of vectors; the last two of 16 registers are the operands
constexpr int kTileChains = 4;  // and two operands each, as products have them

#define HR_ON(instruction, kind, n) instruction " %%" kind "14, %%" kind "15, %%" kind #n "\n\t"

#define HR_VECTOR_LOOP(name, instruction, kind)                                                  \
    void name(int64_t rounds) {                                                                  \
        asm volatile("1:\n\t" HR_ON(instruction, kind, 0) HR_ON(instruction, kind, 1)            \
                     HR_ON(instruction, kind, 2) HR_ON(instruction, kind, 3)                     \
                     HR_ON(instruction, kind, 4) HR_ON(instruction, kind, 5)                     \
                     HR_ON(instruction, kind, 6) HR_ON(instruction, kind, 7)                     \
                     HR_ON(instruction, kind, 8) HR_ON(instruction, kind, 9)                     \
                     HR_ON(instruction, kind, 10) HR_ON(instruction, kind, 11)                   \
                     HR_ON(instruction, kind, 12) HR_ON(instruction, kind, 13)                   \
                     "dec %0\n\tjnz 1b\n\tvzeroupper"                                            \
                     : "+r"(rounds)                                                              \
                     :                                                                           \
                     : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",     \
                       "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");    \
    }

HR_VECTOR_LOOP(fma_256, "vfmadd231ps", "ymm")
HR_VECTOR_LOOP(fma_512, "vfmadd231ps", "zmm")
HR_VECTOR_LOOP(bytes_256, "vpmaddubsw", "ymm")
HR_VECTOR_LOOP(bytes_512, "vpmaddubsw", "zmm")
HR_VECTOR_LOOP(vnni_512, "vpdpbusd", "zmm")
HR_VECTOR_LOOP(bf16_512, "vdpbf16ps", "zmm")

#if !defined(HR_WITHOUT_AMX)

// What ldtilecfg reads: eight registers of 16 rows of 64 bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t unused[15] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

const TileShapes kTileShapes;

// The calling thread holds no tiles before and after.
#define HR_TILE_LOOP(name, instruction)                              \
    void name(int64_t rounds) {                                      \
        asm volatile("ldtilecfg %1\n\t"                              \
                     "1:\n\t" instruction " %%tmm6, %%tmm4, %%tmm0\n\t" \
                     instruction " %%tmm7, %%tmm4, %%tmm1\n\t"       \
                     instruction " %%tmm6, %%tmm5, %%tmm2\n\t"       \
                     instruction " %%tmm7, %%tmm5, %%tmm3\n\t"       \
                     "dec %0\n\tjnz 1b\n\ttilerelease"               \
                     : "+r"(rounds)                                  \
                     : "m"(kTileShapes)                              \
                     : "cc");                                        \
    }

HR_TILE_LOOP(bf16_tiles, "tdpbf16ps")
HR_TILE_LOOP(int8_tiles, "tdpbssd")

#endif

constexpr double vector_round(int multiply_adds) { return 2.0 * kChains * multiply_adds; }
constexpr double tile_round(int inputs) { return 2.0 * kTileChains * 16 * 16 * inputs; }

#elif defined(__aarch64__)

constexpr int kChains = 24;  // of 32 registers; the last two are the operands

#define HR_EIGHT(on, instruction, r0, r1, r2, r3, r4, r5, r6, r7)                       \
    on(instruction, r0) on(instruction, r1) on(instruction, r2) on(instruction, r3)     \
    on(instruction, r4) on(instruction, r5) on(instruction, r6) on(instruction, r7)

#define HR_VECTOR_LOOP(name, on, instruction)                                                     \
    void name(int64_t rounds) {                                                                   \
        asm volatile("1:\n\t" HR_EIGHT(on, instruction, 0, 1, 2, 3, 4, 5, 6, 7)                   \
                     HR_EIGHT(on, instruction, 8, 9, 10, 11, 12, 13, 14, 15)                      \
                     HR_EIGHT(on, instruction, 16, 17, 18, 19, 20, 21, 22, 23)                    \
                     "subs %0, %0, #1\n\tb.ne 1b"                                                 \
                     : "+r"(rounds)                                                               \
                     :                                                                            \
                     : "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10",   \
                       "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20",      \
                       "v21", "v22", "v23", "v30", "v31");                                        \
    }

#define HR_ON_FLOATS(instruction, n) instruction " v" #n ".4s, v30.4s, v31.4s\n\t"
#define HR_ON_BYTES(instruction, n) instruction " v" #n ".8h, v30.8b, v31.8b\n\t"
// Written as a number: the assembler takes the name only with an option for all of the file.
#define HR_ON_QUADS(instruction, n) ".inst 0x4e9f97c0 + " #n "\n\t"  // sdot vn.4s, v30.16b, v31.16b

HR_VECTOR_LOOP(fma_128, HR_ON_FLOATS, "fmla")
HR_VECTOR_LOOP(bytes_128, HR_ON_BYTES, "smull")
HR_VECTOR_LOOP(dots_128, HR_ON_QUADS, "sdot")

constexpr double vector_round(int multiply_adds) { return 2.0 * kChains * multiply_adds; }

#endif

}  // namespace

Peak peak_of([[maybe_unused]] int32_t isa, [[maybe_unused]] int32_t format) {
#if defined(__x86_64__)
    const bool is_integer = format >= HR_INT8, is_bf16 = format == HR_BF16;
    switch (isa) {
        case HR_AVX2:
            return is_integer ? Peak{bytes_256, vector_round(32)} : Peak{fma_256, vector_round(8)};
        case HR_AVX512:
            return is_integer ? Peak{bytes_512, vector_round(64)} : Peak{fma_512, vector_round(16)};
        case HR_AVX512_BF16:
            if (is_bf16) return {bf16_512, vector_round(32)};
            break;
        case HR_AMX:
#if !defined(HR_WITHOUT_AMX)
            if (is_bf16) return {bf16_tiles, tile_round(32)};
            if (is_integer) return {int8_tiles, tile_round(64)};
#endif
            break;
        default: break;
    }
    if (isa == HR_AVX512_VNNI || isa == HR_AVX512_BF16 || isa == HR_AMX)
        return is_integer ? Peak{vnni_512, vector_round(64)} : Peak{fma_512, vector_round(16)};
#elif defined(__aarch64__)
    const bool is_integer = format >= HR_INT8;
    if (is_integer && isa == HR_NEON) return {bytes_128, vector_round(8)};
    if (is_integer && isa == HR_NEON_DOTPROD) return {dots_128, vector_round(16)};
    if (isa == HR_NEON || isa == HR_NEON_DOTPROD) return {fma_128, vector_round(4)};
#endif
    return {nullptr, 0.0};
}
