// Sums over the workers that divide a model's layers, in memory that they share.
//
// A worker leaves its part in its own area and says so; when all have, each adds up all parts in
// the order of ranks. Areas are used in turn: one is written again only after another meeting, by
// which everybody has read it.
#pragma once

#include <sched.h>

#include "rows.h"

namespace {

constexpr int kMeetingSpins = 2000;  // before others get the processor

inline void pause_once() {
#if defined(__aarch64__)
    asm volatile("isb" : : : "memory");
#else
    _mm_pause();
#endif
}

// Every thread of every worker comes here equally often; what a worker's threads have written
// before they met each other is then there for all.
inline void meet_shards(const hr_shards& shards, int thread) {
    const uint32_t due = ++shards.meetings[thread * HR_SHARD_LINE];
    if (thread == 0)
        __atomic_store_n(shards.arrivals + shards.rank * HR_SHARD_LINE, due, __ATOMIC_RELEASE);
    for (int rank = 0; rank < shards.size; ++rank) {
        const uint32_t* arrival = shards.arrivals + rank * HR_SHARD_LINE;
        for (int spins = 0; (int32_t)(__atomic_load_n(arrival, __ATOMIC_ACQUIRE) - due) < 0;) {
            if (spins < kMeetingSpins) {
                pause_once();
                ++spins;
            } else {
                sched_yield();
            }
        }
    }
}

// One rounding, as where a product joins the residual stream.
template <typename E>
inline void run_sum(const hr_op& op, const hr_step& step, int thread, int num_threads) {
    const hr_shards& shards = *(const hr_shards*)op.pages;
    meet_shards(shards, thread);
    const float* const* parts = shards.parts + op.input * shards.size;
    constexpr int64_t kWidth = 4 * HR_LANES;  // of a piece
    const int64_t per_row = (op.num_outputs + kWidth - 1) / kWidth;
    const Range pieces = share(step.num_tokens * per_row, thread, num_threads);
    for (int64_t piece = pieces.from; piece < pieces.to; ++piece) {
        const int64_t row = piece / per_row, first = piece % per_row * kWidth;
        const int64_t at = row * op.num_outputs;
        E* out = row_of<E>(step, op.output, row);
        for (int64_t i = first; i < first + kWidth && i < op.num_outputs; i += HR_LANES) {
            const int64_t rest = op.num_outputs - i;
            Vec total = load_some(parts[0] + at + i, rest);
            for (int rank = 1; rank < shards.size; ++rank)
                total = add(total, load_some(parts[rank] + at + i, rest));
            if (op.epilogue == HR_ADD) total = add(load_some(out + i, rest), total);
            store_some(out + i, total, rest);
        }
    }
}

}  // namespace
