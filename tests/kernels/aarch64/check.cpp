// Runs the kernels of one instruction set on made-up inputs and judges what they give: by the scalar
// reference, by what more rows or threads give, and by the outputs of another machine.
//
//   check ISA write FILE     puts the outputs into a file
//   check ISA compare FILE   expects those of the file, bit for bit
//   check ISA alone          knows no other machine
//
// Ends with 0 if all is right.
#include <stdio.h>
#include <stdlib.h>

#include <functional>
#include <string>

#include "reference.h"

namespace {

int num_failures = 0;

void fail(const std::string& name, const char* what, double a, double b) {
    if (++num_failures <= 20) printf("FAILED %s: %s: %.9g, not %.9g\n", name.c_str(), what, a, b);
}

constexpr int32_t kFloatFormats[] = {HR_BF16, HR_F16, HR_F32};
const char* const kNames[] = {"bf16", "f16",  "f32",  "int8", "q8_0", "q4_0",
                              "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"};
// Of results that are not fixed bit by bit, relative to the largest.
double tolerance(int32_t format) {
    return format == HR_F32 ? 2e-6 : format == HR_F16 ? 1e-3 : 8e-3;
}

// Outputs, in order, to or from a file.
class Outputs {
  public:
    void open(const char* path, bool is_written) {
        file_ = fopen(path, is_written ? "wb" : "rb");
        is_written_ = is_written;
        if (file_ == nullptr) perror(path), exit(2);
    }

    // Numbers of a format; of INT8, bytes. Those that are no numbers are all alike.
    void add(const std::string& name, const Bytes& data, int32_t format) {
        if (file_ == nullptr) return;
        if (is_written_) {
            if (fwrite(data.data(), 1, data.size(), file_) != data.size()) perror("file"), exit(2);
            return;
        }
        Bytes expected(data.size());
        if (fread(expected.data(), 1, data.size(), file_) != data.size())
            printf("the file ends at %s\n", name.c_str()), exit(2);
        num_compared += data.size() / bytes_of_format(format);
        if (format == HR_INT8) {
            for (size_t i = 0; i < data.size(); ++i)
                if (data[i] != expected[i]) fail(name, "other bytes", data[i], expected[i]);
            return;
        }
        const size_t size = bytes_of_format(format);
        for (size_t i = 0; i < data.size() / size; ++i) {
            if (memcmp(&data[i * size], &expected[i * size], size) == 0) continue;
            const float a = element(data.data(), format, i), b = element(expected.data(), format, i);
            if (format == HR_F16 ? !is_nan(data, i) || !is_nan(expected, i) : a == a || b == b)
                fail(name, "other bits", a, b);
        }
    }

    size_t num_compared = 0;

  private:
    static bool is_nan(const Bytes& halves, size_t i) {
        return (((const uint16_t*)halves.data())[i] & 0x7fff) > 0x7c00;
    }

    FILE* file_ = nullptr;
    bool is_written_ = false;
};

Outputs outputs;
int32_t isa;
hr_pool* pools[2];  // of one thread and of three

void expect_equal(const std::string& name, const char* what, const Bytes& a, const Bytes& b) {
    for (size_t i = 0; i < a.size(); ++i)
        if (a[i] != b[i]) return fail(name, what, a[i], b[i]);
}

void expect_bits(const std::string& name, float value, float expected) {
    if (bits_of(value) != bits_of(expected)) fail(name, "not as the scalar code", value, expected);
}

void expect_near(const std::string& name, const Bytes& data, int32_t format,
                 const std::vector<double>& expected, double allowed) {
    double most = 0.0;
    for (double value : expected) most = std::max(most, std::fabs(value));
    for (size_t i = 0; i < expected.size(); ++i) {
        const double value = element(data.data(), format, i);
        if (!(std::fabs(value - expected[i]) <= allowed * most))
            return fail(name, "too far off", value, expected[i]);
    }
}

// Runs one operation on tokens that are rows of `input`, with one thread and with three.
struct Runner {
    hr_op op = {};
    hr_step step = {};
    Bytes normed;

    Runner(int32_t kind, int32_t format, int64_t num_tokens) {
        op.kind = kind;
        op.input = 0, op.output = 1, op.normed = 2;
        op.rope = -1;
        op.eps = 1e-5f;
        step.format = format;
        step.num_tokens = num_tokens;
    }

    // `output`: what is there before.
    Bytes run(const std::string& name, const Bytes& input, int64_t input_stride,
              const Bytes& output, int64_t output_stride,
              const std::function<void()>& before = [] {}) {
        Bytes results[2];
        for (int i = 0; i < 2; ++i) {
            Bytes in = input;
            results[i] = output;
            normed.assign(input.size() + 64, 0xff);
            before();
            step.buffers[0] = in.data(), step.strides[0] = input_stride;
            step.buffers[1] = results[i].data(), step.strides[1] = output_stride;
            step.buffers[2] = normed.data(), step.strides[2] = input_stride;
            const int32_t status = hr_run(pools[i], isa, &op, 1, &step);
            if (status != 0) fail(name, "status", status, 0);
        }
        expect_equal(name, "other bytes with three threads", results[0], results[1]);
        return results[0];
    }
};

struct Matrix {
    int32_t format;
    int64_t num_outputs, num_inputs;
    Bytes packed;

    // `rows` [num_outputs, num_inputs] in `rows_format`. If gated, gate rows come before up rows.
    Matrix(const std::string& name, const Bytes& rows, int32_t rows_format, int32_t format,
           int64_t num_outputs, int64_t num_inputs, bool is_gated = false)
        : format(format), num_outputs(num_outputs), num_inputs(num_inputs) {
        const int64_t half = num_outputs / 2;
        for (int i = 0; i < 2; ++i) {
            const Bytes before = packed;
            packed.assign(hr_packed_bytes(format, num_outputs, num_inputs), 0);
            const auto pack = [&](int64_t first, int64_t count, int32_t lanes) {
                const uint8_t* from = rows.data() + rows.size() / num_outputs * first;
                if (hr_pack(pools[i], from, rows_format, count, num_inputs, packed.data(), format,
                            0, lanes) != 0)
                    fail(name, "cannot be packed", rows_format, format);
            };
            if (!is_gated) pack(0, num_outputs, HR_PLAIN);
            if (is_gated) pack(0, half, HR_GATE), pack(half, half, HR_UP);
            if (i == 1) expect_equal(name, "packed otherwise by three threads", packed, before);
        }
        outputs.add(name + " packed", packed, HR_INT8);
    }

    Runner product(int32_t rows_format, int64_t num_tokens, int32_t epilogue) const {
        Runner runner(HR_PRODUCT, rows_format, num_tokens);
        runner.op.epilogue = epilogue;
        runner.op.weight = packed.data();
        runner.op.num_outputs = num_outputs;
        runner.op.num_inputs = num_inputs;
        runner.op.format = format;
        return runner;
    }

    // In fp32: [num_tokens][num_outputs], checked for what one row at a time gives.
    Floats multiply(const std::string& name, const Bytes& x, int32_t rows_format,
                    int64_t num_tokens) const {
        const int64_t stride = num_outputs + 3;
        const Bytes poison(num_tokens * stride * 4, 0xff);
        const Bytes all = product(rows_format, num_tokens, HR_STORE_F32)
                              .run(name, x, num_inputs, poison, stride);
        const size_t row_bytes = x.size() / num_tokens;
        Floats result;
        for (int64_t t = 0; t < num_tokens; ++t) {
            const Bytes row(x.begin() + t * row_bytes, x.begin() + (t + 1) * row_bytes);
            const Bytes own(all.begin() + t * stride * 4, all.begin() + (t + 1) * stride * 4);
            const Bytes one = product(rows_format, 1, HR_STORE_F32)
                                  .run(name, row, num_inputs, Bytes(stride * 4, 0xff), stride);
            expect_equal(name, "other bytes with more rows", own, one);
            for (int64_t n = 0; n < num_outputs; ++n)
                result.push_back(((const float*)own.data())[n]);
        }
        outputs.add(name, all, HR_F32);
        return result;
    }

    Bytes lookup(const std::string& name, int32_t out_format) const {
        std::vector<int64_t> ids;
        for (int64_t i = 0; i < 20; ++i) ids.push_back(i * 7 % num_outputs);
        Bytes out(20 * num_inputs * bytes_of_format(out_format));
        if (hr_lookup(pools[1], packed.data(), format, num_inputs, ids.data(), 20, 0.75f,
                      out_format, out.data()) != 0)
            fail(name, "cannot be looked up", format, out_format);
        outputs.add(name + " rows", out, out_format);
        return out;
    }
};

Floats row_of(const Bytes& data, int32_t format, int64_t row, int64_t size) {
    Floats values;
    for (int64_t i = 0; i < size; ++i) values.push_back(element(data.data(), format, row * size + i));
    return values;
}

void check_float_product(int32_t format, int64_t num_tokens, int64_t num_outputs,
                         int64_t num_inputs) {
    const std::string name = std::string(kNames[format]) + " product of " +
                             std::to_string(num_tokens) + "x" + std::to_string(num_inputs);
    Numbers numbers(num_tokens * 1000 + num_inputs);
    const Bytes x = stored(numbers.floats(num_tokens * num_inputs), format);
    const Bytes w = stored(numbers.floats(num_outputs * num_inputs), format);
    const Matrix matrix(name, w, format, format, num_outputs, num_inputs);
    const Floats result = matrix.multiply(name, x, format, num_tokens);
    for (int64_t t = 0; t < num_tokens; ++t) {
        const Floats row = row_of(x, format, t, num_inputs);
        for (int64_t n = 0; n < num_outputs; ++n) {
            const Floats weights = row_of(w, format, n, num_inputs);
            expect_bits(name, result[t * num_outputs + n],
                        format == HR_BF16 ? bf16_product(row, weights)
                                          : float_product(row, weights));
        }
    }
    for (int32_t out_format : kFloatFormats) {
        const Bytes rows = matrix.lookup(name, out_format);
        for (int64_t i = 0; i < 20 * num_inputs; ++i) {
            const int64_t id = i / num_inputs * 7 % num_outputs;
            const float weight = element(w.data(), format, id * num_inputs + i % num_inputs);
            expect_bits(name, element(rows.data(), out_format, i),
                        rounded_to(out_format, weight * 0.75f));
        }
    }
}

// Bias, norm and what becomes of the product.
void check_epilogues(int32_t format) {
    constexpr int64_t kTokens = 5, kOutputs = 86, kInputs = 75;
    Numbers numbers(format + 7);
    const Bytes x = stored(numbers.floats(kTokens * kInputs), format);
    const Bytes w = stored(numbers.floats(kOutputs * kInputs, 0.2f), format);
    const Bytes bias = stored(numbers.floats(kOutputs), format);
    const Floats norm = numbers.floats(kInputs);
    const Bytes before = stored(numbers.floats(kTokens * kOutputs), format);
    for (int32_t epilogue : {HR_STORE, HR_ADD, HR_SILU_MUL, HR_GELU_MUL}) {
        const bool is_gated = epilogue == HR_SILU_MUL || epilogue == HR_GELU_MUL;
        const std::string name = std::string(kNames[format]) + " epilogue " +
                                 std::to_string(epilogue);
        const Matrix matrix(name, w, format, format, kOutputs, kInputs, is_gated);
        Runner runner = matrix.product(format, kTokens, epilogue);
        runner.op.bias = bias.data();
        runner.op.norm = norm.data();
        const int64_t width = is_gated ? kOutputs / 2 : kOutputs;
        Bytes start(before.begin(), before.begin() + kTokens * width * bytes_of_format(format));
        const Bytes result = runner.run(name, x, kInputs, start, width);
        std::vector<double> expected;
        for (int64_t t = 0; t < kTokens; ++t) {
            const Floats row = row_of(x, format, t, kInputs);
            double squares = 0.0;
            for (float value : row) squares += (double)value * value;
            const double inverse = 1.0 / std::sqrt(squares / kInputs + 1e-5);
            const auto output = [&](int64_t n) {
                double sum = element(bias.data(), format, n);
                for (int64_t k = 0; k < kInputs; ++k)
                    sum += row[k] * inverse * norm[k] * element(w.data(), format, n * kInputs + k);
                return sum;
            };
            for (int64_t n = 0; n < width; ++n) {
                const double value = output(n), u = value + 0.044715 * value * value * value;
                const double e = epilogue == HR_SILU_MUL ? value : 2 * 0.7978845608 * u;
                const double old = element(start.data(), format, t * width + n);
                expected.push_back(is_gated ? value / (1 + std::exp(-e)) * output(width + n)
                                            : value + (epilogue == HR_ADD ? old : 0.0));
            }
        }
        expect_near(name, result, format, expected, 2 * tolerance(format));
        outputs.add(name, result, format);
    }
}

void check_norm(int32_t format, int64_t size) {
    constexpr int64_t kTokens = 4;
    Numbers numbers(size);
    const Bytes x = stored(numbers.floats(kTokens * size, 3.0f), format);
    const Bytes before = stored(numbers.floats(kTokens * size), format);
    const Floats weight = numbers.floats(size);
    for (int32_t kind : {HR_NORM, HR_NORM_ADD}) {
        const std::string name = std::string(kNames[format]) + " norm of " + std::to_string(size);
        Runner runner(kind, format, kTokens);
        runner.op.norm = weight.data();
        runner.op.num_inputs = runner.op.num_outputs = size;
        const Bytes result = runner.run(name, x, size, before, size);
        std::vector<double> expected;
        for (int64_t i = 0; i < kTokens * size; ++i) {
            double squares = 0.0;
            for (float value : row_of(x, format, i / size, size)) squares += (double)value * value;
            expected.push_back(element(x.data(), format, i) * weight[i % size] /
                                   std::sqrt(squares / size + 1e-5) +
                               (kind == HR_NORM_ADD ? element(before.data(), format, i) : 0.0));
        }
        expect_near(name, result, format, expected, tolerance(format));
        outputs.add(name, result, format);
    }
}

// Rows of a GGUF file: any codes, with scales that are numbers, some of them denormal.
Bytes file_rows(int32_t format, int64_t num_rows, int64_t num_inputs, Numbers& numbers) {
    const QuantizedLayout layout = layout_of(format);
    const int64_t num_blocks = num_rows * num_inputs / layout.file_inputs;
    Bytes rows = numbers.bytes(num_blocks * layout.file_bytes);
    for (int64_t i = 0; i < num_blocks; ++i) {
        const auto put = [&](int at, float value) {
            const uint16_t half = to_f16(i % 5 == 3 ? value * 0x1p-12f : value);
            memcpy(&rows[i * layout.file_bytes + at], &half, 2);
        };
        put(format == HR_Q6_K ? 208 : 0, 0.01f + 0.002f * numbers.next_float());
        if (layout.has_minimum) put(2, 0.02f * numbers.next_float());
    }
    return rows;
}

void check_quantized_product(int32_t format, int32_t rows_format, int64_t num_tokens) {
    const int64_t num_outputs = 70, num_inputs = format == HR_INT8 ? 300 : 512;
    const std::string name = std::string(kNames[format]) + " product of " +
                             std::to_string(num_tokens) + " rows of " + kNames[rows_format];
    Numbers numbers(format * 100 + num_tokens);
    Floats inputs = numbers.floats(num_tokens * num_inputs);
    std::fill(inputs.begin() + 32, inputs.begin() + 64, 0.0f);
    const Bytes x = stored(inputs, rows_format);
    const Bytes w = format == HR_INT8 ? stored(numbers.floats(num_outputs * num_inputs), HR_F32)
                                      : file_rows(format, num_outputs, num_inputs, numbers);
    const Matrix matrix(name, w, format == HR_INT8 ? HR_F32 : format, format, num_outputs,
                        num_inputs);
    const Floats result = matrix.multiply(name, x, rows_format, num_tokens);
    const QuantizedLayout layout = layout_of(format);
    for (int64_t i = 0; i < num_tokens * num_outputs; ++i) {
        const int64_t n = i % num_outputs;
        const QuantizedRow row = {layout, format,
                                  matrix.packed.data() + n / 32 * layout.block_bytes(num_inputs),
                                  n % 32};
        const Floats values = row_of(x, rows_format, i / num_outputs, num_inputs);
        expect_bits(name, result[i], quantized_product(values, row));
    }
    matrix.lookup(name, rows_format);
}

// Products of what is no number, too large or too small for one.
void check_extremes(int32_t format) {
    const std::string name = std::string(kNames[format]) + " extremes";
    constexpr float tiny = 0x1p-100f, large = 0x1p100f;
    const Bytes w = stored({tiny, -tiny, large, 0x1p-130f, 1.0f, -1.0f, 0.0f, INFINITY}, format);
    const Matrix matrix(name, w, format, format, 8, 1);
    for (float value : {tiny, -tiny, 0x1p-130f, large, INFINITY, NAN, 0.0f, -0.0f}) {
        const Floats result = matrix.multiply(name, stored({value}, format), format, 1);
        if (std::fabs(value) == tiny && result[0] != 0.0f)
            fail(name, "a denormal result is not flushed", result[0], 0.0);
        if (result[3] != 0.0f && std::isfinite(value))
            fail(name, "a denormal operand counts", result[3], 0.0);
    }
}

// What rounds up to the smallest normal number: x86 flushes what is denormal once it is rounded, Arm
// what is before. This is why NEON's family is not AVX2's; outputs are compared without it.
void check_flushing() {
    const Floats w = {(1.0f - 0x1p-23f) * 0x1p-66f}, x = {(1.0f + 0x1p-23f) * 0x1p-60f};
    const Matrix matrix("flushing", stored(w, HR_F32), HR_F32, HR_F32, 1, 1);
    Runner runner = matrix.product(HR_F32, 1, HR_STORE_F32);
    const Bytes result = runner.run("flushing", stored(x, HR_F32), 1, Bytes(4), 1);
    expect_bits("flushing", element(result.data(), HR_F32, 0), isa >= HR_NEON ? 0.0f : 0x1p-126f);
}

struct AttentionCase {
    int64_t dim, num_heads, num_kv_heads, block_size, window;
    float soft_cap;
    bool has_sinks, has_norm;
    int64_t length;
};

// A prompt in chunks, its cache, and a reference that knows keys and values before they are stored.
class AttentionCheck {
  public:
    AttentionCheck(int32_t format, int32_t cache_format, const AttentionCase& c)
        : format_(format), cache_format_(cache_format), c_(c),
          name_(std::string(kNames[format]) + " attention, cache " + kNames[cache_format] +
                ", dim " + std::to_string(c.dim)),
          width_((c.num_heads + 2 * c.num_kv_heads) * c.dim) {
        Numbers numbers(format * 10 + cache_format + c.dim);
        qkv_ = stored(numbers.floats(c.length * width_), format);
        norm_ = numbers.floats((c.num_heads + c.num_kv_heads) * c.dim, 0.2f);
        for (float& value : norm_) value += 1.0f;
        sinks_ = numbers.floats(c.num_heads);
        const int64_t half = c.dim / 2;
        angles_.resize(c.length * c.dim);
        for (int64_t i = 0; i < c.length * half; ++i) {
            const int64_t p = i / half, d = i % half;
            // Sines by multiplication: the same on every machine.
            const float t = (float)((p * (d + 3)) % 64 - 32) / 32.0f, s = t / (0.5f + 0.5f * t * t);
            angles_[p * c.dim + d] = (1.0f - t * t) / (1.0f + t * t);
            angles_[p * c.dim + half + d] = s;
        }
        const int64_t num_blocks = (c.length + c.block_size - 1) / c.block_size;
        for (int64_t t = 0; t < c.length; ++t)
            slots_.push_back((num_blocks - 1 - t / c.block_size) * 2 * c.block_size +
                             t % c.block_size);
        const int64_t scales = cache_format == HR_INT8 ? c.block_size * 4 : 0;
        cache_.resize(num_blocks * 2 * c.num_kv_heads *
                      (c.block_size * c.dim * bytes_of_format(cache_format) + scales));
    }

    void run() {
        const Bytes whole = run_in_chunks({c_.length});
        expect_equal(name_, "otherwise in chunks", run_in_chunks({1, 16, 30, 1, c_.length}), whole);
        outputs.add(name_, whole, format_);
        const double allowed = cache_format_ == HR_INT8 ? 2e-2 : 3 * std::max(
            tolerance(format_), tolerance(cache_format_));
        judge(whole, allowed);
    }

  private:
    // Chunks end at these lengths.
    Bytes run_in_chunks(const std::vector<int64_t>& sizes) {
        const int64_t out_width = c_.num_heads * c_.dim;
        const size_t size = bytes_of_format(format_);
        Bytes result;
        std::fill(cache_.begin(), cache_.end(), 0);
        int64_t start = 0;
        for (int64_t chunk : sizes) {
            const int64_t end = std::min(start + chunk, c_.length);
            const Bytes input(qkv_.begin() + start * width_ * size,
                              qkv_.begin() + end * width_ * size);
            Runner runner(HR_ATTENTION, format_, end - start);
            hr_op& op = runner.op;
            op.rope = 0;
            op.norm = c_.has_norm ? norm_.data() : nullptr;
            op.scale = 0.3f;
            op.soft_cap = c_.soft_cap;
            op.pages = cache_.data();
            op.sinks = c_.has_sinks ? sinks_.data() : nullptr;
            op.num_heads = (int32_t)c_.num_heads;
            op.num_kv_heads = (int32_t)c_.num_kv_heads;
            op.head_dim = (int32_t)c_.dim;
            op.cache_format = cache_format_;
            const int64_t starts[] = {0, end - start}, context[] = {end};
            const int64_t* slots[] = {slots_.data()};
            const hr_group group = {slots, c_.window};
            std::vector<int64_t> positions;
            for (int64_t t = start; t < end; ++t) positions.push_back(t);
            hr_step& step = runner.step;
            step.num_sequences = 1;
            step.block_size = c_.block_size;
            step.num_groups = 1;
            step.query_starts = starts;
            step.context_lens = context;
            step.positions = positions.data();
            step.groups = &group;
            step.ropes[0] = angles_.data();
            const Bytes out = runner.run(name_, input, width_,
                                         Bytes((end - start) * out_width * size, 0xff), out_width);
            result.insert(result.end(), out.begin(), out.end());
            start = end;
        }
        outputs.add(name_ + " cache", cache_, HR_INT8);
        return result;
    }

    // One head of a token's queries or keys, normalized and turned.
    std::vector<double> turned(int64_t token, int64_t head) const {
        std::vector<double> x(c_.dim), result(c_.dim);
        double squares = 0.0;
        for (int64_t d = 0; d < c_.dim; ++d) {
            x[d] = element(qkv_.data(), format_, token * width_ + head * c_.dim + d);
            squares += x[d] * x[d];
        }
        const double inverse = 1.0 / std::sqrt(squares / c_.dim + 1e-5);
        for (int64_t d = 0; d < c_.dim && c_.has_norm; ++d)
            x[d] *= inverse * norm_[head * c_.dim + d];
        const float* angles = &angles_[token * c_.dim];
        for (int64_t d = 0, half = c_.dim / 2; d < half; ++d) {
            result[d] = x[d] * angles[d] - x[half + d] * angles[half + d];
            result[half + d] = x[half + d] * angles[d] + x[d] * angles[half + d];
        }
        return result;
    }

    void judge(const Bytes& result, double allowed) const {
        std::vector<std::vector<double>> keys, values;
        for (int64_t i = 0; i < c_.length * c_.num_kv_heads; ++i) {
            const int64_t token = i / c_.num_kv_heads, head = c_.num_heads + i % c_.num_kv_heads;
            keys.push_back(turned(token, head));
            values.emplace_back();
            for (int64_t d = 0; d < c_.dim; ++d)
                values.back().push_back(
                    element(qkv_.data(), format_,
                            token * width_ + (head + c_.num_kv_heads) * c_.dim + d));
        }
        std::vector<double> expected;
        for (int64_t i = 0; i < c_.length * c_.num_heads; ++i) {
            const int64_t token = i / c_.num_heads, head = i % c_.num_heads;
            const int64_t kv_head = head / (c_.num_heads / c_.num_kv_heads);
            const int64_t first = c_.window == 0 ? 0 : std::max<int64_t>(0, token + 1 - c_.window);
            std::vector<const double*> seen_keys, seen_values;
            for (int64_t t = first; t <= token; ++t) {
                seen_keys.push_back(keys[t * c_.num_kv_heads + kv_head].data());
                seen_values.push_back(values[t * c_.num_kv_heads + kv_head].data());
            }
            const AttentionRule rule = {0.3f, c_.soft_cap, c_.has_sinks, sinks_[head]};
            const auto row = attended(turned(token, head).data(), seen_keys, seen_values, c_.dim,
                                      rule);
            expected.insert(expected.end(), row.begin(), row.end());
        }
        expect_near(name_, result, format_, expected, allowed);
    }

    int32_t format_, cache_format_;
    AttentionCase c_;
    std::string name_;
    int64_t width_;
    Bytes qkv_, cache_;
    Floats norm_, sinks_, angles_;
    std::vector<int64_t> slots_;
};

// Also notes the best tokens, which drawing wants to know.
void check_argmax(const Floats& logits, int64_t num_rows, int64_t vocab,
                  std::vector<hr_draw_row>& rows) {
    for (hr_pool* pool : pools) {
        Floats maxima(num_rows);
        std::vector<int64_t> best(num_rows, -1);
        hr_argmax(pool, isa, logits.data(), num_rows, vocab, maxima.data(), best.data());
        for (int64_t i = 0; i < num_rows; ++i) {
            const float* row = logits.data() + i * vocab;
            const int64_t expected = std::max_element(row, row + vocab) - row;
            if (best[i] != expected || maxima[i] != row[expected])
                fail("argmax", "another token", best[i], expected);
            rows[i].best = best[i];
        }
    }
}

// Log probabilities of the drawn tokens and the five best: bit by bit AVX2's.
void check_scores(const Floats& logits, int64_t num_rows, int64_t vocab,
                  const std::vector<int64_t>& drawn) {
    constexpr int64_t kStride = 6;
    std::vector<int64_t> numbers, num_tops(num_rows, kStride - 1), ranks(num_rows);
    Floats maxima;
    for (int64_t i = 0; i < num_rows; ++i) {
        numbers.push_back(i);
        maxima.push_back(*std::max_element(logits.data() + i * vocab,
                                           logits.data() + (i + 1) * vocab));
    }
    Floats scores(num_rows * kStride);
    std::vector<int64_t> ids(num_rows * kStride);
    hr_score(pools[0], isa, logits.data(), vocab, numbers.data(), num_rows, drawn.data(),
             num_tops.data(), maxima.data(), kStride, scores.data(), ids.data(), ranks.data());
    for (int64_t i = 0; i < num_rows; ++i)
        if (ids[i * kStride] != drawn[i] || logits[i * vocab + ids[i * kStride + 1]] != maxima[i])
            fail("score", "another token", ids[i * kStride], drawn[i]);
    outputs.add("log probabilities", stored(scores, HR_F32), HR_F32);
}

void check_draw() {
    constexpr int64_t kVocab = 1003;
    Numbers numbers(5);
    std::vector<hr_draw_row> rows;
    for (int i = 0; i < 40; ++i) {
        hr_draw_row row = {i,   0, 1.0, 1000003u * i, 0, -INFINITY, (uint32_t)i % 3, (uint32_t)i,
                           0.7f};
        if (i >= 10 && i % 4 == 0) row.top_k = 1 + i;
        if (i >= 10 && i % 4 == 1) row.top_p = 0.9;
        if (i >= 10 && i % 4 == 2) row.min_score = -2.5f;
        if (i >= 10 && i % 4 == 3) row.top_k = 40, row.top_p = 0.5;
        rows.push_back(row);
    }
    const Floats logits = numbers.floats(rows.size() * kVocab, 3.0f);
    const int64_t num_rows = (int64_t)rows.size();
    check_argmax(logits, num_rows, kVocab, rows);
    std::vector<int64_t> ids[2];
    Floats scores(logits.size());
    for (int i = 0; i < 2; ++i) {
        ids[i].assign(num_rows, -1);
        hr_draw(pools[i], isa, logits.data(), kVocab, rows.data(), num_rows, scores.data(),
                ids[i].data());
    }
    for (int64_t i = 0; i < num_rows; ++i) {
        if (ids[0][i] != ids[1][i]) fail("draw", "otherwise by three threads", ids[1][i], ids[0][i]);
        const Floats row(logits.begin() + i * kVocab, logits.begin() + (i + 1) * kVocab);
        if (i < 10 && ids[0][i] != drawn_token(rows[i], row))
            fail("draw", "another token", ids[0][i], drawn_token(rows[i], row));
    }
    check_scores(logits, num_rows, kVocab, ids[0]);
    outputs.add("scores", stored(scores, HR_F32), HR_F32);
    Bytes drawn(rows.size() * 8);
    memcpy(drawn.data(), ids[0].data(), drawn.size());
    outputs.add("tokens", drawn, HR_INT8);
}

void check_all() {
    for (int32_t format : kFloatFormats) {
        check_float_product(format, 1, 40, 100);
        check_float_product(format, 2, 33, 1);
        check_float_product(format, 7, 70, 63);
        check_float_product(format, 13, 64, 1100);
        check_epilogues(format);
        check_norm(format, 5);
        check_norm(format, 63);
        check_norm(format, 576);
        if (format != HR_F16) check_extremes(format);
    }
    for (int32_t format = HR_INT8; format <= HR_Q6_K; ++format) {
        check_quantized_product(format, HR_BF16, 1);
        check_quantized_product(format, HR_F32, 2);
        check_quantized_product(format, HR_F16, 5);
    }
    constexpr int32_t kCaches[][2] = {
        {HR_BF16, HR_BF16}, {HR_BF16, HR_INT8}, {HR_F16, HR_F16},  {HR_F16, HR_INT8},
        {HR_F32, HR_F32},   {HR_F32, HR_BF16},  {HR_F32, HR_F16}, {HR_F32, HR_INT8},
    };
    for (const auto& formats : kCaches) {
        AttentionCheck(formats[0], formats[1], {32, 2, 1, 16, 0, 0.0f, false, false, 530}).run();
        AttentionCheck(formats[0], formats[1], {20, 6, 2, 5, 37, 4.0f, true, true, 90}).run();
    }
    check_draw();
    check_flushing();
    for (int32_t format : {HR_BF16, HR_F32, HR_INT8})
        if (!(hr_peak(pools[1], isa, format, 10) > 0.0)) fail("peak", "none", format, 0);
}

}  // namespace

int main(int argc, char** argv) {
    const char* const names[HR_NUM_ISAS] = {"avx2", "avx512", "avx512vnni", "avx512bf16", "amx",
                                            "neon", "neondotprod"};
    isa = -1;
    for (int32_t i = 0; i < HR_NUM_ISAS && argc >= 3; ++i)
        if (strcmp(names[i], argv[1]) == 0) isa = i;
    if (isa < 0) return fprintf(stderr, "usage: check ISA write|compare|alone [FILE]\n"), 2;
    if (const char* reason = hr_why_not(isa)) return printf("%s: %s\n", argv[1], reason), 3;
    if (argc >= 4) outputs.open(argv[3], strcmp(argv[2], "write") == 0);
    pools[0] = hr_pool_new(1, nullptr);
    pools[1] = hr_pool_new(3, nullptr);
    check_all();
    for (hr_pool* pool : pools) hr_pool_free(pool);
    printf("%s: %d failures, %zu numbers compared with another machine's\n", argv[1], num_failures,
           outputs.num_compared);
    return num_failures == 0 ? 0 : 1;
}
