// Compiled for any 64-bit Arm processor.
#define HR_LANES 8
#define HR_HAS_BF16 0
#include "draw.h"
#include "pack.h"
#include "step.h"

void hr_work_neon(const Work& work, int thread, int num_threads) {
    run_step(work, thread, num_threads);
}

void hr_draw_neon(const Draw& draw, int thread, int num_threads) {
    run_draw(draw, thread, num_threads);
}

void hr_pack_neon(const Packing& packing, int thread, int num_threads) {
    run_pack(packing, thread, num_threads);
}

void hr_lookup_neon(const Lookup& lookup, int thread, int num_threads) {
    run_lookup(lookup, thread, num_threads);
}
