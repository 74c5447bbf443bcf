// Compiled for 64-bit Arm processors with dot products of bytes.
#define HR_LANES 8
#define HR_HAS_BF16 0
#define HR_HAS_DOTPROD 1
#include "step.h"

void hr_work_neon_dotprod(const Work& work, int thread, int num_threads) {
    run_step(work, thread, num_threads);
}
