// The cache: where keys and values of a token lie, how new ones get there, and tiles of them.
//
// A block of one layer is one range of memory. It holds, head after head, K as [dims / P]
// [block_size][P] and V as [block_size / P][dims][P], in elements of the cache: as the products
// read them. P is 2 where rows are bf16, whose products take pairs, and 1 otherwise; an odd block's
// last row of V has one key. Blocks of int8 go on with fp32 scales, [heads][K, V][block_size]: one
// per token and head.
#pragma once

#include "items.h"
#include "rows.h"

namespace {

constexpr int64_t kKeyGroup = 16;  // keys that are read together
constexpr int kTileGroups = kTile / kKeyGroup;

template <typename E>
constexpr int64_t kPair = 1;
template <>
constexpr int64_t kPair<bf16> = 2;

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

// One layer's part of the cache, for rows of E and a cache of C.
template <typename E, typename C>
struct Pages {
    static constexpr bool kHasScales = kSame<C, int8_t>;
    static constexpr int64_t P = kPair<E>;

    char* data;
    int64_t block_size, dim, num_heads;

    int64_t head_size() const { return block_size * dim; }
    int64_t block_bytes() const {
        const int64_t scales = kHasScales ? block_size * (int64_t)sizeof(float) : 0;
        return 2 * num_heads * (head_size() * (int64_t)sizeof(C) + scales);
    }

    // One head's part of a token's block.
    struct Place {
        C* keys;
        C* values;
        float* key_scales;    // [block_size]
        float* value_scales;
        int64_t offset;       // of the token in the block
    };

    Place place(int64_t slot, int64_t head) const {
        const int64_t block = slot / (2 * block_size);
        char* start = data + block * block_bytes();
        C* keys = (C*)start + 2 * head * head_size();
        float* scales = (float*)((C*)start + 2 * num_heads * head_size()) + 2 * head * block_size;
        return {keys, keys + head_size(), scales, scales + block_size,
                slot - 2 * block * block_size};
    }

    int64_t key_index(int64_t offset, int64_t d) const {
        return (d / P * block_size + offset) * P + d % P;
    }
    // Keys whose values lie side by side with those of this one, itself included.
    int64_t value_width(int64_t offset) const {
        return offset / P * P + P <= block_size ? P : 1;
    }
    int64_t value_index(int64_t offset, int64_t d) const {
        return offset / P * P * dim + d * value_width(offset) + offset % P;
    }

    // Whether the products can read 16 keys where they lie.
    bool has_groups() const { return block_size % kKeyGroup == 0 && dim % kKeyGroup == 0; }
};

template <typename E, typename C>
inline Pages<E, C> pages_of(const hr_op& op, const hr_step& step) {
    return {(char*)op.pages, step.block_size, op.head_dim, op.num_kv_heads};
}

// 127 over the largest magnitude, and its inverse as `scale`, which is not a number if one of the
// row is not finite.
template <typename E>
inline float int8_scale(const E* row, int64_t size, float* scale) {
    Vec most = splat(0.0f), zeros = splat(0.0f);
    for (int64_t i = 0; i < size; i += HR_LANES) {
        const Vec v = load_some(row + i, size - i);
        most = max(max(v, sub(splat(0.0f), v)), most);
        zeros = fma(v, splat(0.0f), zeros);
    }
    const float amax = largest(most);
    *scale = amax / 127.0f + sum(zeros);
    return amax > 0.0f ? 127.0f / amax : 0.0f;
}

// One head's K or V of a token: kRun elements lie together, the next ones `stride` elements further.
template <int kRun, typename E, typename C>
inline void write_row(const E* row, int64_t size, C* out, int64_t stride, float* scale) {
    float factor = 1.0f;
    if constexpr (kSame<C, int8_t>) factor = int8_scale(row, size, scale);
    for (int64_t i = 0; i < size; i += HR_LANES) {
        const int64_t count = size - i < HR_LANES ? size - i : HR_LANES;
        const Vec v = load_some(row + i, count);
        C lanes[HR_LANES];
        store(lanes, kSame<C, int8_t> ? mul(v, splat(factor)) : v);
        // Run by run: what lies between may be another thread's token.
        for (int64_t lane = 0; lane < count; lane += kRun, out += stride)
            memcpy(out, lanes + lane, kRun * sizeof(C));
    }
}

// Head norms and rotary embedding of one token, of one K and V head and its query heads: queries
// and keys in place, then the new key and value go to the cache.
template <typename E, typename C>
inline void rotate_token(const hr_op& op, const hr_step& step, const Pages<E, C>& pages,
                         int64_t token, int64_t slot, int64_t kv_head) {
    const int64_t dim = op.head_dim, heads = op.num_heads / op.num_kv_heads;
    E* qkv = row_of<E>(step, op.input, token);
    const float* angles = step.ropes[op.rope] + step.positions[token] * dim;
    const auto rotate_head = [&](int64_t head) {
        rotate(qkv + head * dim, op.norm == nullptr ? nullptr : op.norm + head * dim, op.eps,
               angles, dim, qkv + head * dim);
    };
    for (int64_t head = kv_head * heads; head < (kv_head + 1) * heads; ++head) rotate_head(head);
    rotate_head(op.num_heads + kv_head);
    const E* key = qkv + (op.num_heads + kv_head) * dim;
    const auto place = pages.place(slot, kv_head);
    constexpr int64_t P = kPair<E>;
    write_row<P>(key, dim, place.keys + place.offset * P, pages.block_size * P,
                 place.key_scales + place.offset);
    write_row<1>(key + op.num_kv_heads * dim, dim,
                 place.values + pages.value_index(place.offset, 0),
                 pages.value_width(place.offset), place.value_scales + place.offset);
}

// 64 keys of one head at an absolute position, as the products read them. Groups of keys that were
// not asked for are not there; keys and dims beyond what there is may hold anything.
template <typename E>
struct Tile {
    const E* keys[kTileGroups];    // of 16 keys: [dims / P] rows of `key_stride`, [16][P] each
    const E* values[kTileGroups];  // of 16 keys: [16 / P] rows of `value_stride`, [dims][P] each
    int64_t key_stride, value_stride;  // elements
    const float* key_scales;           // [kTile] or null
    const float* value_scales;
    // What to prefetch on the way: the same of the tile that will be next, or null.
    const E* next_keys[kTileGroups];
    const E* next_values[kTileGroups];
};

// Rounded to nearest even; without care for denormals, which are 0 here.
template <typename E>
inline void store_quick(E* p, Vec v) {
    store(p, v);
}
#if defined(__AVX512BF16__) && !defined(HR_AMX_EMULATED)  // which runs without it
inline void store_quick(bf16* p, Vec v) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v));
}
#endif

// `count` elements in another format, which can hold them.
template <typename C, typename E>
inline void convert(const C* from, int64_t count, E* to) {
    for (; count >= HR_LANES; count -= HR_LANES, from += HR_LANES, to += HR_LANES)
        store_quick(to, load(from));
    if (count > 0) store_some(to, load_some(from, count), count);
}
template <typename E>
inline void convert(const E* from, int64_t count, E* to) {
    memcpy(to, from, count * sizeof(E));
}

inline float element(int8_t value) { return value; }
template <typename C>
inline float element(C value) {
    return to_float(value);
}

inline void set_element(float* out, float value) { *out = value; }
inline void set_element(f16* out, float value) { *out = to_f16(value); }
inline void set_element(bf16* out, float value) {  // which bf16 can hold
    uint32_t bits;
    memcpy(&bits, &value, 4);
    *out = (bf16)(bits >> 16);
}

// Where a tile will come from.
struct TileSource {
    const int64_t* slots;  // of the sequence
    int64_t head;
    int64_t start;  // position of the first key
    int64_t count;  // of keys, or more
};

// Loads tiles.
template <typename E, typename C>
struct TileLoader {
    static constexpr int64_t P = kPair<E>;
    static constexpr bool kInPlace = kSame<C, E>;

    Pages<E, C> pages;
    E* keys;              // scratch: [dims / P][kTile][P]
    E* values;            // scratch: [kTile / P][padded dims][P]
    float* key_scales;    // scratch: [kTile]
    float* value_scales;

    // Keys from number `from` of the tile on. `is_exact`: values of keys that were not asked for
    // are 0. `is_joined`: those of one group follow those of the group before it. `next`, if not
    // null, is prefetched.
    Tile<E> tile_at(const TileSource& source, int64_t from, bool is_exact, bool is_joined,
                    const TileSource* next) const {
        Tile<E> tile = buffers();
        if (is_exact || !pages.has_groups()) {
            gather(source, from, tile);
            return tile;
        }
        if constexpr (kInPlace) {
            tile.key_stride = pages.block_size * P;
            tile.value_stride = pages.dim * P;
        }
        for (int64_t group = from / kKeyGroup; has_group(source, group); ++group)
            load_group(source, group, is_joined && pages.block_size % kTile != 0, tile);
        if (next != nullptr)
            for (int64_t group = 0; has_group(*next, group); ++group)
                announce_group(*next, group, tile);
        return tile;
    }

  private:
    // A tile in scratch memory.
    Tile<E> buffers() const {
        Tile<E> tile;
        tile.key_stride = kTile * P;
        tile.value_stride = padded_dim(pages.dim) * P;
        for (int group = 0; group < kTileGroups; ++group) {
            tile.keys[group] = keys + group * kKeyGroup * P;
            tile.values[group] = values + group * kKeyGroup * padded_dim(pages.dim);
            tile.next_keys[group] = tile.next_values[group] = nullptr;
        }
        tile.key_scales = Pages<E, C>::kHasScales ? key_scales : nullptr;
        tile.value_scales = Pages<E, C>::kHasScales ? value_scales : nullptr;
        return tile;
    }

    static bool has_group(const TileSource& source, int64_t group) {
        return group < kTileGroups && group * kKeyGroup < source.count;
    }

    struct Group {
        typename Pages<E, C>::Place place;
        const C* keys;
        const C* values;
    };

    Group find_group(const TileSource& source, int64_t group) const {
        const int64_t slot = source.slots[source.start + group * kKeyGroup];
        const auto place = pages.place(slot, source.head);
        return {place, place.keys + place.offset * P, place.values + place.offset * pages.dim};
    }

    void load_group(const TileSource& source, int64_t group, bool are_values_copied,
                    Tile<E>& tile) const {
        const Group found = find_group(source, group);
        if constexpr (kInPlace) {
            tile.keys[group] = found.keys;
            if (are_values_copied)
                convert(found.values, kKeyGroup * pages.dim, values + group * kKeyGroup * pages.dim);
            else
                tile.values[group] = found.values;
        } else {
            const int64_t first = group * kKeyGroup;
            const C* k = found.keys;
            for (int64_t row = 0; row < pages.dim / P; ++row, k += pages.block_size * P)
                convert(k, kKeyGroup * P, keys + (row * kTile + first) * P);
            convert(found.values, kKeyGroup * pages.dim, values + first * pages.dim);
        }
        if constexpr (Pages<E, C>::kHasScales) {
            const auto copy = [&](const float* from, float* to) {
                memcpy(to + group * kKeyGroup, from + found.place.offset, kKeyGroup * sizeof(float));
            };
            copy(found.place.key_scales, key_scales);
            copy(found.place.value_scales, value_scales);
        }
    }

    void announce_group(const TileSource& source, int64_t group, Tile<E>& tile) const {
        const Group found = find_group(source, group);
        if constexpr (kInPlace) {
            tile.next_keys[group] = found.keys;
            tile.next_values[group] = found.values;
        } else {
            const int64_t row_bytes = kKeyGroup * P * sizeof(C), num_rows = pages.dim / P;
            for (int64_t row = 0; row < num_rows; ++row) {
                prefetch_far(found.keys + row * pages.block_size * P);
                prefetch_far((const char*)found.values + row * row_bytes);
            }
        }
    }

    // Key by key, whatever the size of a block.
    void gather(const TileSource& source, int64_t from, const Tile<E>& tile) const {
        memset(values, 0, kTile * padded_dim(pages.dim) * sizeof(E));
        const int64_t to = source.count < kTile ? source.count : kTile;
        for (int64_t key = from; key < to; ++key) {
            const auto place = pages.place(source.slots[source.start + key], source.head);
            E* value_row = values + key / P * tile.value_stride + key % P;
            for (int64_t d = 0; d < pages.dim; ++d) {
                const C k = place.keys[pages.key_index(place.offset, d)];
                const C v = place.values[pages.value_index(place.offset, d)];
                set_element(keys + d / P * tile.key_stride + key * P + d % P, element(k));
                set_element(value_row + d * P, element(v));
            }
            if constexpr (Pages<E, C>::kHasScales) {
                key_scales[key] = place.key_scales[place.offset];
                value_scales[key] = place.value_scales[place.offset];
            }
        }
    }
};

}  // namespace
