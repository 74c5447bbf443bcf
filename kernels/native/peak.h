// How much arithmetic a machine can do: loops of one instruction on registers.
#pragma once

#include "interface.h"

struct Peak {
    void (*loop)(int64_t rounds);  // null: no such loop
    double operations;             // of a round; a multiply-add counts as two
};

// With the instruction that products of a matrix in `format` use on an instruction set.
Peak peak_of(int32_t isa, int32_t format);
