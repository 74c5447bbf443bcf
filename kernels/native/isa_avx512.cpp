// Compiled for AVX-512 F, BW, DQ and VL, without the bf16 instructions.
#define HR_LANES 16
#define HR_HAS_BF16 0
#include "draw.h"
#include "step.h"

void hr_work_avx512(const Work& work, int thread, int num_threads) {
    run_step(work, thread, num_threads);
}

void hr_draw_avx512(const Draw& draw, int thread, int num_threads) {
    run_draw(draw, thread, num_threads);
}
