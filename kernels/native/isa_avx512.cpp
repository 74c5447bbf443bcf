// Compiled for AVX-512 F, BW, DQ and VL, without the bf16 instructions.
#define HR_LANES 16
#define HR_HAS_BF16 0
#include "argmax.h"
#include "draw.h"
#include "logprobs.h"
#include "step.h"

void hr_work_avx512(const Work& work, int thread, int num_threads) {
    run_step(work, thread, num_threads);
}

void hr_argmax_avx512(const Argmax& argmax, int thread, int num_threads) {
    run_argmax(argmax, thread, num_threads);
}

void hr_draw_avx512(const Draw& draw, int thread, int num_threads) {
    run_draw(draw, thread, num_threads);
}

void hr_score_avx512(const Scoring& scoring, int thread, int num_threads) {
    run_scoring(scoring, thread, num_threads);
}
