// Quantized matrices: their size, how they are filled, and rows of them as floats.
#pragma once

#include <stdint.h>

// As `hr_packed_bytes`.
int64_t quantized_bytes(int32_t format, int64_t num_outputs, int64_t num_inputs);

bool can_pack_quantized(int32_t format, int32_t rows_format, int64_t num_inputs);

struct QuantizedPacking {
    const void* rows;
    int32_t rows_format;
    int64_t num_rows, num_inputs;
    uint8_t* packed;
    int32_t format;
    int64_t first_row;
    int32_t lanes;
};

// One thread's share of the rows.
void pack_quantized(const QuantizedPacking& packing, int thread, int num_threads);

// Row `id` of a packed matrix, times `scale`, rounded to `out_format`: [num_inputs].
void lookup_quantized(const void* packed, int32_t format, int64_t num_inputs, int64_t id,
                      float scale, int32_t out_format, void* out);
