// Compiled for any 64-bit Arm processor.
#define HR_LANES 8
#define HR_HAS_BF16 0
#include "argmax.h"
#include "draw.h"
#include "logprobs.h"
#include "pack.h"
#include "step.h"

void hr_work_neon(const Work& work, int thread, int num_threads) {
    run_step(work, thread, num_threads);
}

void hr_argmax_neon(const Argmax& argmax, int thread, int num_threads) {
    run_argmax(argmax, thread, num_threads);
}

void hr_draw_neon(const Draw& draw, int thread, int num_threads) {
    run_draw(draw, thread, num_threads);
}

void hr_score_neon(const Scoring& scoring, int thread, int num_threads) {
    run_scoring(scoring, thread, num_threads);
}

void hr_pack_neon(const Packing& packing, int thread, int num_threads) {
    run_pack(packing, thread, num_threads);
}

void hr_lookup_neon(const Lookup& lookup, int thread, int num_threads) {
    run_lookup(lookup, thread, num_threads);
}
