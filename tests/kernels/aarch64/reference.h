// What the kernels compute, in plain scalar C++, and numbers to compute it with.
//
// Where the rules of arithmetic leave one right order (products), the reference has it bit for bit;
// elsewhere it computes in fp64. It flushes nothing: cases that are judged by it have no denormals.
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "interface.h"
#include "quantized_layout.h"

namespace {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

inline float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

inline uint16_t to_bf16(float value) {
    const uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const float magnitude = exponent == 0 ? std::ldexp((float)fraction, -24)
                                          : std::ldexp((float)(1024 + fraction), exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

inline uint16_t to_f16(float value) {  // of magnitudes below 65504
    int exponent;
    std::frexp(value, &exponent);  // 2^(exponent - 1) <= |value| < 2^exponent
    const int unit = std::max(exponent - 11, -24);
    const int steps = (int)std::nearbyint(std::ldexp(std::fabs(value), -unit));
    const int bits = steps < 1024 ? steps : steps - 1024 + (unit + 25) * 1024;
    return (uint16_t)(bits | (std::signbit(value) ? 0x8000 : 0));
}

inline size_t bytes_of_format(int32_t format) {
    return format == HR_F32 ? 4 : format == HR_INT8 ? 1 : 2;
}

inline float element(const void* data, int32_t format, int64_t i) {
    if (format == HR_F32) return ((const float*)data)[i];
    const uint16_t half = ((const uint16_t*)data)[i];
    return format == HR_F16 ? from_f16(half) : from_bf16(half);
}

inline float rounded_to(int32_t format, float value) {
    if (format == HR_F32) return value;
    return format == HR_F16 ? from_f16(to_f16(value)) : from_bf16(to_bf16(value));
}

inline Bytes stored(const Floats& values, int32_t format) {
    Bytes bytes(values.size() * bytes_of_format(format));
    for (size_t i = 0; i < values.size(); ++i) {
        if (format == HR_F32) {
            ((float*)bytes.data())[i] = values[i];
        } else {
            ((uint16_t*)bytes.data())[i] =
                format == HR_F16 ? to_f16(values[i]) : to_bf16(values[i]);
        }
    }
    return bytes;
}

// The same on every machine.
class Numbers {
  public:
    explicit Numbers(uint64_t seed) : state_(seed) {}

    uint32_t next() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return (uint32_t)(state_ >> 33);
    }

    float next_float() {  // -2 ... 2, more often near 0; a multiple of 2^-22
        const auto one = [&] { return (float)(int32_t)(next() >> 8) * 0x1p-22f - 1.0f; };
        const float first = one();
        return first + one();
    }

    Floats floats(size_t count, float scale = 1.0f) {
        Floats values(count);
        for (float& value : values) value = next_float() * scale;
        return values;
    }

    Bytes bytes(size_t count) {
        Bytes values(count);
        for (uint8_t& value : values) value = (uint8_t)(next() >> 8);
        return values;
    }

  private:
    uint64_t state_;
};

// Products of one row of x with one row of w.

inline float bf16_product(const Floats& x, const Floats& w) {
    float c = 0.0f;
    for (size_t from = 0; from < x.size(); from += 32) {
        float even = 0.0f, odd = 0.0f;
        for (size_t k = from; k < std::min(from + 32, x.size()); k += 2) {
            even = std::fma(x[k], w[k], even);
            if (k + 1 < x.size()) odd = std::fma(x[k + 1], w[k + 1], odd);
        }
        c = c + (even + odd);
    }
    return c;
}

inline float float_product(const Floats& x, const Floats& w) {
    float c = 0.0f;
    for (size_t k = 0; k < x.size(); ++k) c = std::fma(x[k], w[k], c);
    return c;
}

// One row of a packed quantized matrix.
struct QuantizedRow {
    QuantizedLayout layout;
    int32_t format;
    const uint8_t* block;
    int64_t row;

    int code(const uint8_t* chunk, int k) const {
        const uint8_t* low = chunk + 4 * row + k % 4;
        if (layout.code_bits == 8) return low[k / 4 * kLineBytes];
        const int lower = low[k % 16 / 4 * kLineBytes] >> k / 16 * 4 & 15;
        const uint8_t* high = low + layout.high_at();
        if (layout.code_bits == 5) return lower | (*high >> k / 4 & 1) << 4;
        if (layout.code_bits == 6)
            return lower | (high[k / 16 * kLineBytes] >> k % 16 / 4 * 2 & 3) << 4;
        return lower;
    }

    // One of the numbers that lie in fp16 or, below a header, in bytes; `header` is the header's.
    float number(const uint8_t* at, const uint8_t* header) const {
        uint16_t half;
        if (!layout.is_super) {
            memcpy(&half, at + 2 * row, 2);
            return from_f16(half);
        }
        memcpy(&half, header + 2 * row, 2);
        return from_f16(half) * (format == HR_Q6_K ? (float)(int8_t)at[row] : (float)at[row]);
    }
};

inline float quantized_product(const Floats& x, const QuantizedRow& w) {
    const QuantizedLayout& layout = w.layout;
    const int64_t size = (int64_t)x.size();
    float c = 0.0f;
    for (int64_t n = 0; n * 32 < size; ++n) {
        const uint8_t* chunk = w.block + layout.chunk_at(n);
        const uint8_t* header = w.block + layout.header_at(n);
        float most = 0.0f;
        for (int64_t k = n * 32; k < std::min(n * 32 + 32, size); ++k)
            most = std::max(most, std::fabs(x[k]));
        const float inverse = most == 0.0f ? 0.0f : 127.0f / most, scale = most / 127.0f;
        int dots[2] = {}, codes_sum = 0;
        for (int k = 0; k < 32 && n * 32 + k < size; ++k) {
            const int q = (int)std::nearbyint(x[n * 32 + k] * inverse);
            dots[k / 16] += q * (w.code(chunk, k) - layout.offset());
            codes_sum += q;
        }
        if (layout.num_scales == 0) {
            c = std::fma(scale, (float)(dots[0] + dots[1]), c);
        } else if (layout.num_scales == 1) {
            const float own = w.number(chunk + layout.scales_at(), header);
            c = std::fma(scale * own, (float)(dots[0] + dots[1]), c);
        } else {
            for (int part = 0; part < 2; ++part) {
                const float own = w.number(chunk + layout.scales_at() + part * kChunkRows, header);
                c = std::fma(scale * own, (float)dots[part], c);
            }
        }
        if (layout.has_minimum) {
            const float minimum = w.number(chunk + layout.minima_at(), header + 2 * kChunkRows);
            c = std::fma(minimum, scale * (float)codes_sum, c);
        }
    }
    if (layout.num_scales != 0) return c;
    float row_scale;
    memcpy(&row_scale, w.block + layout.row_scales_at(size) + 4 * w.row, 4);
    return c * row_scale;
}

// Attention of one query of one head to keys [count][dim] with values of as many.
struct AttentionRule {
    double scale, soft_cap;  // soft_cap 0: none
    bool has_sink;
    double sink;
};

inline std::vector<double> attended(const double* query, const std::vector<const double*>& keys,
                                    const std::vector<const double*>& values, int64_t dim,
                                    const AttentionRule& rule) {
    std::vector<double> scores;
    double most = rule.has_sink ? rule.sink : -INFINITY;
    for (const double* key : keys) {
        double score = 0.0;
        for (int64_t d = 0; d < dim; ++d) score += query[d] * key[d];
        score *= rule.scale;
        if (rule.soft_cap != 0.0) score = rule.soft_cap * std::tanh(score / rule.soft_cap);
        scores.push_back(score);
        most = std::max(most, score);
    }
    std::vector<double> out(dim);
    double total = rule.has_sink ? std::exp(rule.sink - most) : 0.0;
    for (size_t i = 0; i < keys.size(); ++i) {
        const double p = std::exp(scores[i] - most);
        total += p;
        for (int64_t d = 0; d < dim; ++d) out[d] += p * values[i][d];
    }
    for (double& value : out) value /= total;
    return out;
}

// Philox4x32-10's word for a token.
inline uint32_t random_word(const hr_draw_row& row, int64_t token) {
    uint32_t a = (uint32_t)(token / 4), b = row.output_index, c = row.choice_index, d = 0;
    uint32_t low_key = (uint32_t)row.seed, high_key = (uint32_t)(row.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t of_a = (uint64_t)a * 0xD2511F53u, of_c = (uint64_t)c * 0xCD9E8D57u;
        a = (uint32_t)(of_c >> 32) ^ b ^ low_key;
        b = (uint32_t)of_c;
        c = (uint32_t)(of_a >> 32) ^ d ^ high_key;
        d = (uint32_t)of_a;
        low_key += 0x9E3779B9u;
        high_key += 0xBB67AE85u;
    }
    const uint32_t words[] = {a, b, c, d};
    return words[token % 4];
}

inline int64_t drawn_token(const hr_draw_row& row, const Floats& logits) {  // without filters
    const float best = *std::max_element(logits.begin(), logits.end());
    int64_t winner = -1;
    float most = -INFINITY;
    for (int64_t token = 0; token < (int64_t)logits.size(); ++token) {
        const double u = (random_word(row, token) + 0.5) * 0x1p-32;
        const float sum =
            (logits[token] - best) / row.temperature + (float)-std::log(-std::log(u));
        if (sum > most) winner = token, most = sum;
    }
    return winner;
}

}  // namespace
