// Which instruction sets this process can use, and why not the others.
#pragma once

#include "interface.h"

// Bit i: instruction set i can be used. Found out at the first call.
int32_t usable_isas();

// A clause like "the processor has no AVX2", or null if the instruction set can be used.
const char* why_not(int32_t isa);

// Whether products of tiles are what their model says, bit for bit, on this processor. Faults if the
// processor or the system does not let them be used.
extern "C" bool hr_are_tiles_right();
