// Compiled for AVX-512 with the VNNI instructions, without those for bf16.
#define HR_LANES 16
#define HR_HAS_BF16 0
#define HR_HAS_VNNI 1
#include "step.h"

void hr_work_avx512_vnni(const Work& work, int thread, int num_threads) {
    run_step(work, thread, num_threads);
}
