// The largest score of each row, and the lowest id that has it, at the speed of memory.
//
// Every thread looks at its part of the columns of all rows, which is about what it wrote as its
// share of the product that made them. Comparing is exact, so no result depends on the parts.
#pragma once

#include <math.h>

#include "simd.h"
#include "work.h"

namespace {

constexpr int64_t kSearched = 1024;  // scores of which the best is looked for again

// The first that is not a number: there is one.
inline Best first_nan(const float* scores, int64_t from) {
    while (scores[from] == scores[from]) ++from;
    return {scores[from], from};
}

// The first of the largest, `best`, which is there.
inline Best first_equal(const float* scores, int64_t from, int64_t to, float best) {
    const Vec wanted = splat(best);
    for (int64_t i = from;; i += HR_LANES) {
        const uint32_t lanes = at_least(load_scores(scores + i, to - i), wanted);
        if (lanes == 0) continue;
        const int64_t token = i + __builtin_ctz(lanes);
        return {scores[token], token};
    }
}

// Of the scores `from` to before `to`, at least one.
inline Best best_of(const float* scores, int64_t from, int64_t to) {
    float best = -INFINITY;
    int64_t where = from;
    for (int64_t start = from; start < to; start += kSearched) {
        const int64_t end = start + kSearched < to ? start + kSearched : to;
        Vec most[4] = {splat(best), splat(best), splat(best), splat(best)};
        uint32_t nans = 0;
        int64_t i = start;
        for (; i + 4 * HR_LANES <= end; i += 4 * HR_LANES) {
            const Vec a = load(scores + i), b = load(scores + i + HR_LANES);
            const Vec c = load(scores + i + 2 * HR_LANES), d = load(scores + i + 3 * HR_LANES);
            nans |= unordered(a, b) | unordered(c, d);
            most[0] = max(a, most[0]);
            most[1] = max(b, most[1]);
            most[2] = max(c, most[2]);
            most[3] = max(d, most[3]);
        }
        for (; i < end; i += HR_LANES) {
            const Vec v = load_scores(scores + i, end - i);
            nans |= unordered(v, v);
            most[0] = max(v, most[0]);
        }
        if (nans != 0) return first_nan(scores, start);
        const float found = largest(max(max(most[0], most[1]), max(most[2], most[3])));
        if (found > best) best = found, where = start;
    }
    return first_equal(scores, where, to, best);
}

inline void run_argmax(const Argmax& argmax, int thread, int num_threads) {
    const DenormalsKept guard;
    const int64_t from = argmax.vocab * thread / num_threads;
    const int64_t to = argmax.vocab * (thread + 1) / num_threads;
    Best* bests = argmax.bests + thread * argmax.num_rows;
    for (int64_t row = 0; row < argmax.num_rows; ++row)
        bests[row] = from < to ? best_of(argmax.scores + row * argmax.vocab, from, to)
                               : Best{-INFINITY, -1};
}

}  // namespace
