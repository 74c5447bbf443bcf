// Packing quantized matrices, from the blocks of GGUF files or from floats, and looking up rows.
#include "pack_quantized.h"

#include <algorithm>
#include <cstring>

#include "quantized_layout.h"

namespace {

constexpr int64_t kHalfRows = kChunkRows / 2;

// 32 inputs of one row. Scales and minimum are as packed: fp16 bits, or bytes.
struct Chunk {
    uint8_t codes[kChunkInputs];
    uint16_t scales[2];
    uint16_t minimum;
};

struct Header {
    uint16_t scale, minimum;
};

uint16_t half_at(const uint8_t* raw) {
    uint16_t bits;
    std::memcpy(&bits, raw, 2);
    return bits;
}

float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

float half_to_float(uint16_t half) {  // exact
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x400) return from_bits(sign | ((magnitude << 13) + (112u << 23)));
    return from_bits(sign | to_bits((float)magnitude * 0x1p-24f));  // denormal; 0 too
}

uint16_t float_to_bf16(float value) {  // to nearest even; not-a-number stays one
    const uint32_t bits = to_bits(value);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

uint16_t float_to_half(float value) {  // to nearest even; not-a-number stays one
    const uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffff;
    const auto sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x47800000) return sign | 0x7c00;  // 65536 and above
    if (magnitude < 0x38800000)  // denormal: units of 2^-24, rounded by adding to 2^-1
        return (uint16_t)(sign | (to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f)));
    return (uint16_t)(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

// 16 bytes have the codes of inputs 0 ... 15 in their low halves, of 16 ... 31 in their high ones.
void codes_of_16(const uint8_t* raw, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = raw[i] & 15;
        codes[16 + i] = raw[i] >> 4;
    }
}

// Sub-block `i` of Q4_K and Q5_K: its scale and minimum of 6 bits among 12 bytes.
void k_scales(const uint8_t* raw, int i, Chunk& chunk) {
    if (i < 4) {
        chunk.scales[0] = raw[i] & 63;
        chunk.minimum = raw[4 + i] & 63;
    } else {
        chunk.scales[0] = (raw[4 + i] & 15) | raw[i - 4] >> 6 << 4;
        chunk.minimum = raw[4 + i] >> 4 | raw[i] >> 6 << 4;
    }
}

// Of Q4_K and Q5_K: 32 bytes hold the low 4 bits of two sub-blocks.
void k_codes(const uint8_t* raw, int i, uint8_t* codes) {
    for (int k = 0; k < 32; ++k) codes[k] = raw[i / 2 * 32 + k] >> i % 2 * 4 & 15;
}

void add_fifth_bits(const uint8_t* raw, uint8_t* codes) {  // bit k of 32
    for (int k = 0; k < 32; ++k) codes[k] |= (raw[k / 8] >> k % 8 & 1) << 4;
}

// Chunk `i` of a block as it lies in a GGUF file.
void read_chunk(int32_t format, const uint8_t* raw, int i, Chunk& chunk) {
    chunk.scales[0] = half_at(raw);
    switch (format) {
        case HR_Q8_0:
            for (int k = 0; k < 32; ++k) chunk.codes[k] = raw[2 + k] ^ 0x80;
            return;
        case HR_Q4_0: return codes_of_16(raw + 2, chunk.codes);
        case HR_Q4_1:
            chunk.minimum = half_at(raw + 2);
            return codes_of_16(raw + 4, chunk.codes);
        case HR_Q5_0:
            codes_of_16(raw + 6, chunk.codes);
            return add_fifth_bits(raw + 2, chunk.codes);
        case HR_Q5_1:
            chunk.minimum = half_at(raw + 2);
            codes_of_16(raw + 8, chunk.codes);
            return add_fifth_bits(raw + 4, chunk.codes);
        case HR_Q4_K:
            k_scales(raw + 4, i, chunk);
            return k_codes(raw + 16, i, chunk.codes);
        case HR_Q5_K:
            k_scales(raw + 4, i, chunk);
            k_codes(raw + 48, i, chunk.codes);
            for (int k = 0; k < 32; ++k) chunk.codes[k] |= (raw[16 + k] >> i & 1) << 4;
            return;
        default: {  // HR_Q6_K
            const int half = i / 4, quarter = i % 4;  // of 128 inputs; of 32
            const uint8_t* low = raw + half * 64 + quarter % 2 * 32;
            const uint8_t* high = raw + 128 + half * 32;
            for (int k = 0; k < 32; ++k)
                chunk.codes[k] = (low[k] >> quarter / 2 * 4 & 15) | (high[k] >> 2 * quarter & 3) << 4;
            chunk.scales[0] = raw[192 + 2 * i];
            chunk.scales[1] = raw[193 + 2 * i];
        }
    }
}

Header read_header(int32_t format, const uint8_t* raw) {
    if (format == HR_Q6_K) return {half_at(raw + 208), 0};
    return {half_at(raw), (uint16_t)(half_at(raw + 2) ^ 0x8000)};
}

// A chunk's bytes of one row, in the planes of quantized_layout.h.
template <int kCodeBits>
void write_codes(const QuantizedLayout& layout, const uint8_t* codes, int64_t row, uint8_t* chunk) {
    uint8_t* low = chunk + 4 * row;
    if (kCodeBits == 8) {
        for (int j = 0; j < 8; ++j) std::memcpy(low + j * kLineBytes, codes + 4 * j, 4);
        return;
    }
    uint8_t bytes[16];
    for (int k = 0; k < 16; ++k) bytes[k] = (codes[k] & 15) | codes[16 + k] << 4;
    for (int j = 0; j < 4; ++j) std::memcpy(low + j * kLineBytes, bytes + 4 * j, 4);
    uint8_t* high = chunk + layout.high_at() + 4 * row;
    if (kCodeBits == 5) {
        uint8_t bits[4] = {};
        for (int k = 0; k < 32; ++k) bits[k % 4] |= codes[k] >> 4 << k / 4;
        std::memcpy(high, bits, 4);
    } else if (kCodeBits == 6) {
        uint8_t bits[2][4] = {};
        for (int k = 0; k < 32; ++k) bits[k / 16][k % 4] |= codes[k] >> 4 << k % 16 / 4 * 2;
        for (int line = 0; line < 2; ++line) std::memcpy(high + line * kLineBytes, bits[line], 4);
    }
}

void read_codes(const QuantizedLayout& layout, const uint8_t* chunk, int64_t row, uint8_t* codes) {
    const uint8_t* low = chunk + 4 * row;
    if (layout.code_bits == 8) {
        for (int j = 0; j < 8; ++j) std::memcpy(codes + 4 * j, low + j * kLineBytes, 4);
        return;
    }
    uint8_t bytes[16];
    for (int j = 0; j < 4; ++j) std::memcpy(bytes + 4 * j, low + j * kLineBytes, 4);
    codes_of_16(bytes, codes);
    const uint8_t* high = chunk + layout.high_at() + 4 * row;
    if (layout.code_bits == 5) {
        for (int k = 0; k < 32; ++k) codes[k] |= (high[k % 4] >> k / 4 & 1) << 4;
    } else if (layout.code_bits == 6) {
        for (int k = 0; k < 32; ++k)
            codes[k] |= (high[k / 16 * kLineBytes + k % 4] >> k % 16 / 4 * 2 & 3) << 4;
    }
}

void write_scales(const QuantizedLayout& layout, const Chunk& chunk, int64_t row, uint8_t* packed) {
    const int size = layout.scale_bytes();  // their low bytes come first
    for (int i = 0; i < layout.num_scales; ++i)
        std::memcpy(packed + layout.scales_at() + (i * kChunkRows + row) * size, chunk.scales + i,
                    size);
    if (layout.has_minimum)
        std::memcpy(packed + layout.minima_at() + row * size, &chunk.minimum, size);
}

void write_header(const QuantizedLayout& layout, Header header, int64_t row, uint8_t* packed) {
    std::memcpy(packed + 2 * row, &header.scale, 2);
    if (layout.has_minimum) std::memcpy(packed + 2 * (kChunkRows + row), &header.minimum, 2);
}

void write_codes(const QuantizedLayout& layout, const uint8_t* codes, int64_t row, uint8_t* chunk) {
    switch (layout.code_bits) {
        case 4: return write_codes<4>(layout, codes, row, chunk);
        case 5: return write_codes<5>(layout, codes, row, chunk);
        case 6: return write_codes<6>(layout, codes, row, chunk);
        default: return write_codes<8>(layout, codes, row, chunk);
    }
}

// One row of a file's blocks into lane `row` of a packed block.
void pack_row(const QuantizedPacking& p, const QuantizedLayout& layout, const uint8_t* raw,
              int64_t row, uint8_t* packed) {
    const int per_block = layout.file_inputs / kChunkInputs;
    Chunk chunk = {};
    for (int64_t n = 0; n < p.num_inputs / kChunkInputs; ++n) {
        const uint8_t* block = raw + n / per_block * layout.file_bytes;
        read_chunk(p.format, block, (int)(n % per_block), chunk);
        uint8_t* target = packed + layout.chunk_at(n);
        write_codes(layout, chunk.codes, row, target);
        write_scales(layout, chunk, row, target);
        if (layout.is_super && n % per_block == 0)
            write_header(layout, read_header(p.format, block), row, packed + layout.header_at(n));
    }
}

float float_at(const void* rows, int32_t format, int64_t i) {
    if (format == HR_F32) return ((const float*)rows)[i];
    const uint16_t bits = ((const uint16_t*)rows)[i];
    return format == HR_F16 ? half_to_float(bits) : from_bits((uint32_t)bits << 16);
}

// One row of floats, quantized to nearest even with scale = largest magnitude / 127. A row with
// something that is not finite has no numbers: its scale is not one.
void quantize_row(const QuantizedPacking& p, const QuantizedLayout& layout, int64_t source,
                  int64_t row, uint8_t* packed) {
    constexpr float kRounder = 0x1.8p23f;
    const int64_t first = source * p.num_inputs;
    uint32_t most = 0;
    for (int64_t k = 0; k < p.num_inputs; ++k)
        most = std::max(most, to_bits(float_at(p.rows, p.rows_format, first + k)) & 0x7fffffff);
    float scale = from_bits(most) / 127.0f;
    const bool has_codes = most < 0x7f800000 && scale >= 0x1p-126f;
    if (!has_codes) scale = most < 0x7f800000 ? 0.0f : from_bits(0x7fc00000);
    std::memcpy(packed + layout.row_scales_at(p.num_inputs) + 4 * row, &scale, 4);
    for (int64_t start = 0; start < p.num_inputs; start += kChunkInputs) {
        const int64_t end = std::min(start + kChunkInputs, p.num_inputs);
        uint8_t codes[kChunkInputs];
        std::memset(codes, 0x80, sizeof codes);
        for (int64_t k = start; has_codes && k < end; ++k) {
            const float value = float_at(p.rows, p.rows_format, first + k) / scale;
            codes[k - start] = (uint8_t)((int)(value + kRounder - kRounder) + 128);
        }
        write_codes(layout, codes, row, packed + layout.chunk_at(start / kChunkInputs));
    }
}

// The numbers of row `row` in chunk `n` of a packed block.
void dequantize_chunk(int32_t format, const QuantizedLayout& layout, const uint8_t* block,
                      int64_t num_inputs, int64_t n, int64_t row, float* values) {
    const uint8_t* chunk = block + layout.chunk_at(n);
    const int size = layout.scale_bytes();
    const auto number = [&](const uint8_t* at) {
        if (!layout.is_super) return half_to_float(half_at(at));
        return format == HR_Q6_K ? (float)(int8_t)*at : (float)*at;
    };
    float scales[2], minimum = 0.0f;
    if (layout.num_scales == 0)
        std::memcpy(scales, block + layout.row_scales_at(num_inputs) + 4 * row, 4);
    for (int i = 0; i < layout.num_scales; ++i)
        scales[i] = number(chunk + layout.scales_at() + (i * kChunkRows + row) * size);
    if (layout.num_scales < 2) scales[1] = scales[0];
    if (layout.has_minimum) minimum = number(chunk + layout.minima_at() + row * size);
    if (layout.is_super) {
        const uint8_t* header = block + layout.header_at(n) + 2 * row;
        for (float& scale : scales) scale *= half_to_float(half_at(header));
        if (layout.has_minimum) minimum *= half_to_float(half_at(header + 2 * kChunkRows));
    }
    uint8_t codes[kChunkInputs];
    read_codes(layout, chunk, row, codes);
    for (int k = 0; k < kChunkInputs; ++k) {
        values[k] = (float)(codes[k] - layout.offset()) * scales[k / 16];
        if (layout.has_minimum) values[k] += minimum;
    }
}

}  // namespace

int64_t quantized_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs) {
    const QuantizedLayout layout = layout_of(format);
    if (layout.file_inputs != 0 && num_inputs % layout.file_inputs != 0) return -1;
    return (num_outputs + kChunkRows - 1) / kChunkRows * layout.block_bytes(num_inputs);
}

bool can_pack_quantized(int32_t format, int32_t rows_format, int64_t num_inputs) {
    if (quantized_bytes(format, 1, num_inputs) < 0) return false;
    if (format != HR_INT8) return rows_format == format;
    return rows_format == HR_BF16 || rows_format == HR_F16 || rows_format == HR_F32;
}

void pack_quantized(const QuantizedPacking& p, int thread, int num_threads) {
    const QuantizedLayout layout = layout_of(p.format);
    const int64_t width = p.lanes == HR_PLAIN ? kChunkRows : kHalfRows;
    const int64_t offset = p.lanes == HR_UP ? width : 0;
    const int64_t first = p.first_row / width, end = (p.first_row + p.num_rows + width - 1) / width;
    const int64_t from = first + (end - first) * thread / num_threads;
    const int64_t to = first + (end - first) * (thread + 1) / num_threads;
    for (int64_t block = from; block < to; ++block) {
        const int64_t low = std::max(block * width, p.first_row);
        const int64_t high = std::min((block + 1) * width, p.first_row + p.num_rows);
        uint8_t* packed = p.packed + block * layout.block_bytes(p.num_inputs);
        for (int64_t row = low; row < high; ++row) {
            const int64_t source = row - p.first_row, lane = row - block * width + offset;
            if (p.format == HR_INT8) {
                quantize_row(p, layout, source, lane, packed);
                continue;
            }
            const int64_t row_bytes = p.num_inputs / layout.file_inputs * layout.file_bytes;
            pack_row(p, layout, (const uint8_t*)p.rows + source * row_bytes, lane, packed);
        }
    }
}

void lookup_quantized(const void* packed, int32_t format, int64_t num_inputs, int64_t id,
                      float scale, int32_t out_format, void* out) {
    const QuantizedLayout layout = layout_of(format);
    const uint8_t* block = (const uint8_t*)packed + id / kChunkRows * layout.block_bytes(num_inputs);
    for (int64_t start = 0; start < num_inputs; start += kChunkInputs) {
        float values[kChunkInputs];
        dequantize_chunk(format, layout, block, num_inputs, start / kChunkInputs, id % kChunkRows,
                         values);
        const int64_t end = std::min(start + kChunkInputs, num_inputs);
        if (out_format == HR_F32) {
            for (int64_t k = start; k < end; ++k) ((float*)out)[k] = values[k - start] * scale;
        } else {
            const auto narrow = out_format == HR_F16 ? float_to_half : float_to_bf16;
            for (int64_t k = start; k < end; ++k)
                ((uint16_t*)out)[k] = narrow(values[k - start] * scale);
        }
    }
}
