// Packing of float matrices, and rows out of packed ones. Both are exact but for one rounding, so
// one version, with 8 lanes, serves all instruction sets of a kind of processor.
#pragma once

#include "integers.h"
#include "rows.h"

namespace {

constexpr int64_t kChunk = 256;  // inputs of a row at a time
constexpr int64_t kGroup = 16;   // rows at a time
constexpr int64_t kSourcePrefetch = 512;  // bytes

// Where input k of a lane lies in its block.
template <typename W>
inline int64_t place(int64_t k, int64_t lane) {
    if (kFormat<W> == HR_BF16) return k / 2 * 2 * kBlockRows + 2 * lane + k % 2;
    return k * kBlockRows + lane;
}

#if defined(__aarch64__)

// Rows of 4 dwords become columns.
inline void transpose(uint32x4_t (&rows)[4]) {
    const auto wide = [](uint32x4_t a) { return vreinterpretq_u64_u32(a); };
    const auto words = [](uint64x2_t a) { return vreinterpretq_u32_u64(a); };
    const uint32x4_t even[2] = {vtrn1q_u32(rows[0], rows[1]), vtrn1q_u32(rows[2], rows[3])};
    const uint32x4_t odd[2] = {vtrn2q_u32(rows[0], rows[1]), vtrn2q_u32(rows[2], rows[3])};
    rows[0] = words(vtrn1q_u64(wide(even[0]), wide(even[1])));
    rows[1] = words(vtrn1q_u64(wide(odd[0]), wide(odd[1])));
    rows[2] = words(vtrn2q_u64(wide(even[0]), wide(even[1])));
    rows[3] = words(vtrn2q_u64(wide(odd[0]), wide(odd[1])));
}

// 8 rows of 8 dwords, turned.
template <typename W>
inline void transpose(const W* const* rows, int64_t k, Ints* turned) {
    constexpr int64_t kQuarter = 16 / sizeof(W);
    for (int i = 0; i < 8; ++i) prefetch((const char*)(rows[i] + k) + kSourcePrefetch);
    for (int half = 0; half < 2; ++half) {
        uint32x4_t low[4], high[4];
        for (int i = 0; i < 4; ++i) {
            low[i] = vld1q_u32((const uint32_t*)(rows[i] + k + half * kQuarter));
            high[i] = vld1q_u32((const uint32_t*)(rows[4 + i] + k + half * kQuarter));
        }
        transpose(low);
        transpose(high);
        for (int j = 0; j < 4; ++j)
            turned[4 * half + j] = {vreinterpretq_s32_u32(low[j]), vreinterpretq_s32_u32(high[j])};
    }
}

// Of 16 dwords, the first and the second halves.
inline Ints first_halves(Ints low, Ints high) {
    const auto joined = [](int32x4_t a, int32x4_t b) {
        return vreinterpretq_s32_s16(vuzp1q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
    };
    return {joined(low.low, low.high), joined(high.low, high.high)};
}
inline Ints second_halves(Ints low, Ints high) {
    const auto joined = [](int32x4_t a, int32x4_t b) {
        return vreinterpretq_s32_s16(vuzp2q_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)));
    };
    return {joined(low.low, low.high), joined(high.low, high.high)};
}

#else

// 8 rows of 8 dwords, turned.
template <typename W>
inline void transpose(const W* const* rows, int64_t k, Ints* turned) {
    Ints a[8], b[8];
    for (int i = 0; i < 8; ++i) {
        prefetch((const char*)(rows[i] + k) + kSourcePrefetch);
        a[i] = load_ints(rows[i] + k);
    }
    for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
            a[4 * i + 2 * j] = _mm256_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
            a[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
        }
    }
    // a[4 i + j] holds dwords j and 4 + j of rows 4 i ... 4 i + 3.
    for (int j = 0; j < 4; ++j) {
        turned[j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x20);
        turned[4 + j] = _mm256_permute2x128_si256(a[j], a[4 + j], 0x31);
    }
}

// Of 16 dwords, the first and the second halves.
inline Ints first_halves(Ints low, Ints high) {
    const Ints mask = splat_int(0xffff);
    const Ints halves = _mm256_packus_epi32(bits_and(low, mask), bits_and(high, mask));
    return _mm256_permute4x64_epi64(halves, 0xd8);
}
inline Ints second_halves(Ints low, Ints high) {
    const Ints halves = _mm256_packus_epi32(shifted_right<16>(low), shifted_right<16>(high));
    return _mm256_permute4x64_epi64(halves, 0xd8);
}

#endif

// Inputs of 16 rows from `k` on, as many as fill 32 bytes at a time; returns where it stops.
template <typename W>
inline int64_t pack_group(const W* const* rows, int64_t k, int64_t end, W* block, int64_t lane) {
    constexpr int64_t kPerDword = 4 / sizeof(W);
    for (; k + 8 * kPerDword <= end; k += 8 * kPerDword) {
        Ints turned[2][8];
        transpose(rows, k, turned[0]);
        transpose(rows + 8, k, turned[1]);
        for (int i = 0; i < 8; ++i) {
            const Ints low = turned[0][i], high = turned[1][i];
            char* out = (char*)(block + place<W>(k + i * kPerDword, lane));
            if constexpr (kFormat<W> == HR_F16) {  // two inputs in a dword, for two places
                store_ints(out, first_halves(low, high));
                store_ints(out + kBlockRows * sizeof(W), second_halves(low, high));
            } else {
                store_ints(out, low);
                store_ints(out + sizeof(Ints), high);
            }
        }
    }
    return k;
}

// Inputs `k` to `end`, at most kChunk, of some rows, at most 16, to the lanes from `lane` on.
template <typename R, typename W>
inline void pack_chunk(const R* rows, int64_t stride, int64_t num_rows, int64_t k, int64_t end,
                       W* block, int64_t lane) {
    W staged[kGroup][kChunk];
    const W* sources[kGroup];  // `+ k` is input k
    for (int64_t r = 0; r < num_rows; ++r) {
        if constexpr (kFormat<R> == kFormat<W>) {
            sources[r] = rows + r * stride;
        } else {
            for (int64_t i = 0; i < end - k; i += HR_LANES)
                store_some(staged[r] + i, load_some(rows + r * stride + k + i, end - k - i),
                           end - k - i);
            sources[r] = staged[r] - k;
        }
    }
    if (num_rows == kGroup) k = pack_group(sources, k, end, block, lane);
    for (; k < end; ++k)
        for (int64_t r = 0; r < num_rows; ++r) block[place<W>(k, lane + r)] = sources[r][k];
}

// One thread's blocks of the target.
template <typename R, typename W>
inline void pack_blocks(const Packing& p, int thread, int num_threads) {
    const int64_t width = p.lanes == HR_PLAIN ? kBlockRows : kBlockRows / 2;
    const int64_t offset = p.lanes == HR_UP ? width : 0;
    const int64_t first = p.first_row / width, end_row = p.first_row + p.num_rows;
    const Range blocks = share((end_row + width - 1) / width - first, thread, num_threads);
    const int64_t size = block_bytes(kFormat<W>, p.num_inputs) / (int64_t)sizeof(W);
    for (int64_t block = first + blocks.from; block < first + blocks.to; ++block) {
        const int64_t start = block * width;
        const int64_t low = start > p.first_row ? start : p.first_row;
        const int64_t high = start + width < end_row ? start + width : end_row;
        for (int64_t k = 0; k < p.num_inputs; k += kChunk) {
            const int64_t end = k + kChunk < p.num_inputs ? k + kChunk : p.num_inputs;
            for (int64_t row = low; row < high; row += kGroup) {
                const int64_t num_rows = row + kGroup < high ? kGroup : high - row;
                pack_chunk((const R*)p.rows + (row - p.first_row) * p.num_inputs, p.num_inputs,
                           num_rows, k, end, (W*)p.packed + block * size, offset + row - start);
            }
        }
    }
}

// One thread's rows.
template <typename W, typename E>
inline void look_up(const Lookup& l, int thread, int num_threads) {
    const Range ids = share(l.num_ids, thread, num_threads);
    const int64_t size = block_bytes(kFormat<W>, l.num_inputs) / (int64_t)sizeof(W);
    for (int64_t i = ids.from; i < ids.to; ++i) {
        const W* block = (const W*)l.packed + l.ids[i] / kBlockRows * size;
        E* out = (E*)l.out + i * l.num_inputs;
        for (int64_t k = 0; k < l.num_inputs; k += HR_LANES) {
            const int64_t rest = l.num_inputs - k;
            W values[HR_LANES] = {};
            for (int64_t j = 0; j < HR_LANES && j < rest; ++j)
                values[j] = block[place<W>(k + j, l.ids[i] % kBlockRows)];
            const Vec wide = load(values);
            store_some(out + k, l.scale == 1.0f ? wide : mul(wide, splat(l.scale)), rest);
        }
    }
}

// Calls `function` with a value of the format's element type.
template <typename F>
inline void with_format(int32_t format, F function) {
    switch (format) {
        case HR_F16: return function(f16());
        case HR_F32: return function(float());
        default: return function(bf16());
    }
}

inline void run_pack(const Packing& packing, int thread, int num_threads) {
    with_format(packing.rows_format, [&](auto row) {
        with_format(packing.format, [&](auto weight) {
            pack_blocks<decltype(row), decltype(weight)>(packing, thread, num_threads);
        });
    });
}

inline void run_lookup(const Lookup& lookup, int thread, int num_threads) {
    with_format(lookup.format, [&](auto weight) {
        with_format(lookup.out_format, [&](auto out) {
            look_up<decltype(weight), decltype(out)>(lookup, thread, num_threads);
        });
    });
}

}  // namespace
