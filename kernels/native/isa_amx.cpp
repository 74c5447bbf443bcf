// Compiled for AVX-512 with VNNI and BF16, and AMX. Of BF16 it uses the conversion: not vdpbf16ps,
// whose order of sums is not that of tiles. The few rows that do not fill tiles follow the order of
// plain AVX-512, which is.
#define HR_LANES 16
#define HR_HAS_BF16 0
#define HR_HAS_VNNI 1
#define HR_HAS_AMX 1
#include "machine.h"
#include "step.h"
#include "tile_model.h"

void hr_work_amx(const Work& work, int thread, int num_threads) {
    configure_tiles(kTileRows, kTileBytes);
    run_step(work, thread, num_threads);
    release_tiles();
}

namespace {

// A generator of Lehmer's kind, for numbers of every size and sign.
struct Numbers {
    uint64_t state = 12345;

    uint32_t next() {
        state = state * 48271 % 2147483647;
        return (uint32_t)(state >> 8);
    }
    bf16 next_bf16() {  // finite; exponents from denormals to 2^60
        const uint32_t exponent = next() % 4 == 0 ? next() % 188 : 120 + next() % 12;
        return (bf16)((next() & 0x807f) | exponent << 7);
    }
};

struct Operands {
    alignas(64) bf16 a[kTileRows][32];
    alignas(64) bf16 b[kTileRows][32];
    alignas(64) float start[kTileRows][16];
};

bool is_bf16_right(const Operands& t, int rows, int input_bytes) {
    float want[kTileRows][16], got[kTileRows][16];
    memcpy(want, t.start, sizeof want);
    memcpy(got, t.start, sizeof got);
    model_bf16(t.a, t.b, want, rows, input_bytes / 4);
    configure_tiles(rows, input_bytes);
    load_tile<kTileC00>(t.start, sizeof *t.start);
    load_tile<kTileA0>(t.a, sizeof *t.a);
    load_tile<kTileB0>(t.b, sizeof *t.b);
    multiply_bf16_tiles<kTileC00, kTileA0, kTileB0>();
    store_tile<kTileC00>(got, sizeof *got);
    return memcmp(want, got, sizeof want) == 0;  // also that rows beyond `rows` are untouched
}

bool is_int8_right(const Operands& t, int rows, int input_bytes) {
    int32_t want[kTileRows][16] = {}, got[kTileRows][16] = {};
    const auto a = (const int8_t(*)[64])t.a;
    const auto b = (const int8_t(*)[64])t.b;
    model_int8(a, b, want, rows, input_bytes / 4);
    configure_tiles(rows, input_bytes);
    multiply_tile_int8(*a, sizeof *a, *b, sizeof *b, got);
    return memcmp(want, got, sizeof want) == 0;
}

// Two and one tiles of rows by two and one of outputs, over several tile products, in two parts.
bool is_product_right(Numbers& numbers) {
    constexpr int kRows = 3 * kTileRows, kOutputs = 3 * kTileRows, kSteps = 3;
    static bf16 x[kRows][kSteps * 32], b[kSteps * 16][kOutputs][2];
    static float want[kRows][kOutputs], got[kRows][kOutputs];
    for (auto& row : x)
        for (bf16& value : row) value = numbers.next_bf16();
    for (auto& pair : b)
        for (auto& output : pair) output[0] = numbers.next_bf16(), output[1] = numbers.next_bf16();
    for (int row = 0; row < kRows; row += kTileRows)
        for (int n = 0; n < kOutputs; n += 16) {
            Operands t = {};
            for (int step = 0; step < kSteps; ++step) {
                for (int i = 0; i < kTileRows; ++i) {
                    memcpy(t.a[i], &x[row + i][step * 32], sizeof t.a[i]);
                    memcpy(t.b[i], b[step * 16 + i][n], sizeof t.b[i]);
                }
                model_bf16(t.a, t.b, t.start, kTileRows, kTileRows);
            }
            for (int i = 0; i < kTileRows; ++i) memcpy(&want[row + i][n], t.start[i], 64);
        }
    configure_tiles(kTileRows, kTileBytes);
    const auto multiply = [&](int from, int to) {
        tile_product_bf16(
            kRows - 5, *x + from * 32, kSteps * 32, [&](int64_t n) { return b[from * 16][n * 16]; },
            2 * kOutputs, to - from, 0, kOutputs / 16, from == 0, *got, kOutputs);
    };
    multiply(0, 1);
    multiply(1, kSteps);
    return memcmp(want, got, sizeof want) == 0;
}

}  // namespace

bool hr_are_tiles_right() {
    Numbers numbers;
    bool is_right = is_product_right(numbers);
    for (int round = 0; round < 8; ++round) {
        Operands t;
        for (int row = 0; row < kTileRows; ++row) {
            for (int i = 0; i < 32; ++i) {
                t.a[row][i] = numbers.next_bf16();
                t.b[row][i] = numbers.next_bf16();
            }
            for (int n = 0; n < 16; ++n) t.start[row][n] = widened(numbers.next_bf16());
        }
        constexpr int kRows[] = {1, 7, kTileRows};
        for (const int rows : kRows)
            is_right &= is_bf16_right(t, rows, kTileBytes) &&
                        is_bf16_right(t, rows, kHalfTileBytes) &&
                        is_int8_right(t, rows, kTileBytes) &&
                        is_int8_right(t, rows, kHalfTileBytes) &&
                        is_int8_right(t, rows, kQuarterTileBytes);
    }
    release_tiles();
    return is_right;
}
