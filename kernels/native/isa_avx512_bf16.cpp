// Compiled for AVX-512 with the VNNI and bf16 instructions.
#define HR_LANES 16
#define HR_HAS_BF16 1
#define HR_HAS_VNNI 1
#include "step.h"

void hr_work_avx512_bf16(const Work& work, int thread, int num_threads) {
    run_step(work, thread, num_threads);
}
