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

    // The numbers of a token's K row and its head's, as `interface.h` counts them.
    struct Place {
        C* keys;              // of its block and one head
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
    int64_t value_index(int64_t offset, int64_t d) const {
        const int64_t row = offset / P * P;
        const int64_t width = row + P <= block_size ? P : 1;
        return row * dim + d * width + offset % P;
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

// One head's K or V of a token: `index` says where in `out` each dim goes.
template <typename E, typename C, typename Index>
inline void write_row(const E* row, int64_t size, Index index, C* out, float* scale) {
    float factor = 1.0f;
    if constexpr (kSame<C, int8_t>) factor = int8_scale(row, size, scale);
    for (int64_t i = 0; i < size; i += HR_LANES) {
        const int64_t count = size - i < HR_LANES ? size - i : HR_LANES;
        const Vec v = load_some(row + i, count);
        C lanes[HR_LANES];
        store(lanes, kSame<C, int8_t> ? mul(v, splat(factor)) : v);
        // Element by element: a neighbour in memory may be another thread's token.
        for (int64_t lane = 0; lane < count; ++lane) out[index(i + lane)] = lanes[lane];
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
    write_row(key, dim, [&](int64_t d) { return pages.key_index(place.offset, d); }, place.keys,
              place.key_scales + place.offset);
    write_row(key + op.num_kv_heads * dim, dim,
              [&](int64_t d) { return pages.value_index(place.offset, d); }, place.values,
              place.value_scales + place.offset);
}

// 64 keys of one head at an absolute position, as the products read them. Keys and dims beyond what
// there is may hold anything; values beyond `kTile` groups asked for are not there.
template <typename E>
struct Tile {
    const E* keys[kTileGroups];    // of 16 keys: [dims / P] rows of `key_stride`, [16][P] each
    const E* values[kTileGroups];  // of 16 keys: [16 / P] rows of `value_stride`, [dims][P] each
    int64_t key_stride, value_stride;  // elements
    const float* key_scales;           // [kTile] or null
    const float* value_scales;
};

// `count` elements in another format.
template <typename C, typename E>
inline void convert(const C* from, int64_t count, E* to) {
    for (int64_t i = 0; i < count; i += HR_LANES)
        store_some(to + i, load_some(from + i, count - i), count - i);
}

inline float element(int8_t value) { return value; }
template <typename C>
inline float element(C value) { return to_float(value); }

inline void set_element(float* out, float value) { *out = value; }
inline void set_element(f16* out, float value) { out->bits = _cvtss_sh(value, 0); }
inline void set_element(bf16* out, float value) {  // which bf16 can hold
    uint32_t bits;
    memcpy(&bits, &value, 4);
    *out = (bf16)(bits >> 16);
}

// Loads tiles of one sequence and head.
template <typename E, typename C>
struct TileLoader {
    static constexpr int64_t P = kPair<E>;

    Pages<E, C> pages;
    const int64_t* slots;  // of the sequence
    int64_t head;
    E* keys;              // scratch: [dims / P][kTile][P]
    E* values;            // scratch: [kTile / P][padded dims][P]
    float* key_scales;    // scratch: [kTile]
    float* value_scales;

    // Keys `from` to `to` of the tile that begins at position `start`. `is_exact`: values of all
    // other keys are 0.
    Tile<E> tile_at(int64_t start, int64_t from, int64_t to, bool is_exact) const {
        if (is_exact || !pages.has_groups()) return gather(start, from, to);
        Tile<E> tile = buffers();
        for (int64_t group = from / kKeyGroup; group * kKeyGroup < to; ++group) {
            const auto place = pages.place(slots[start + group * kKeyGroup], head);
            const C* k = place.keys + place.offset * P;
            const C* v = place.values + place.offset * pages.dim;
            if constexpr (kSame<C, E>) {
                tile.keys[group] = k;
                tile.values[group] = v;
            } else {
                for (int64_t d = 0; d < pages.dim; d += P, k += pages.block_size * P)
                    convert(k, kKeyGroup * P, keys + (d / P * kTile + group * kKeyGroup) * P);
                convert(v, kKeyGroup * pages.dim, values + group * kKeyGroup * pages.dim);
            }
            if constexpr (Pages<E, C>::kHasScales) {
                const int64_t bytes = kKeyGroup * sizeof(float);
                memcpy(key_scales + group * kKeyGroup, place.key_scales + place.offset, bytes);
                memcpy(value_scales + group * kKeyGroup, place.value_scales + place.offset, bytes);
            }
        }
        if constexpr (kSame<C, E>) {
            tile.key_stride = pages.block_size * P;
            tile.value_stride = pages.dim * P;
        }
        return tile;
    }

  private:
    Tile<E> buffers() const {
        Tile<E> tile;
        tile.key_stride = kTile * P;
        tile.value_stride = padded_dim(pages.dim) * P;
        for (int group = 0; group < kTileGroups; ++group) {
            tile.keys[group] = keys + group * kKeyGroup * P;
            tile.values[group] = values + group * kKeyGroup * padded_dim(pages.dim);
        }
        tile.key_scales = Pages<E, C>::kHasScales ? key_scales : nullptr;
        tile.value_scales = Pages<E, C>::kHasScales ? value_scales : nullptr;
        return tile;
    }

    // Key by key, whatever the size of a block.
    Tile<E> gather(int64_t start, int64_t from, int64_t to) const {
        const Tile<E> tile = buffers();
        memset(values, 0, kTile * padded_dim(pages.dim) * sizeof(E));
        for (int64_t key = from; key < to; ++key) {
            const auto place = pages.place(slots[start + key], head);
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
        return tile;
    }
};

}  // namespace
