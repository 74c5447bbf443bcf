// Compiled for AVX2, FMA and F16C.
#define HR_LANES 8
#define HR_HAS_BF16 0
#include "argmax.h"
#include "draw.h"
#include "logprobs.h"
#include "pack.h"
#include "step.h"

void hr_work_avx2(const Work& work, int thread, int num_threads) {
    run_step(work, thread, num_threads);
}

void hr_argmax_avx2(const Argmax& argmax, int thread, int num_threads) {
    run_argmax(argmax, thread, num_threads);
}

void hr_draw_avx2(const Draw& draw, int thread, int num_threads) {
    run_draw(draw, thread, num_threads);
}

void hr_score_avx2(const Scoring& scoring, int thread, int num_threads) {
    run_scoring(scoring, thread, num_threads);
}

void hr_pack_avx2(const Packing& packing, int thread, int num_threads) {
    run_pack(packing, thread, num_threads);
}

void hr_lookup_avx2(const Lookup& lookup, int thread, int num_threads) {
    run_lookup(lookup, thread, num_threads);
}
