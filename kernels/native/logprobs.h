// Scores of tokens, a rank and the best of each row: what is reported beside a token.
//
// A score is (logit - maximum) - log sum(exp(logit - maximum)), each step rounded to float32, or
// the logit itself. The sum has a fixed order, so no score depends on the vector width.
#pragma once

#include <math.h>

#include "simd.h"
#include "work.h"

namespace {

constexpr int kSums = 16;

// Sum of exp(logit - maximum). The exponentials are float32. Sum j of 16 in float64 takes those of
// tokens j, j + 16, ... in this order; then sum j takes sum j + 8, for j < 8, and so on by halves.
inline double sum_exponentials(const float* logits, int64_t vocab, float maximum) {
    constexpr int kParts = kSums / HR_LANES, kDoubles = HR_LANES / 2;
    const Vec most = splat(maximum);
    Doubles totals[2 * kParts] = {};
    for (int64_t i = 0; i < vocab; i += kSums)
        for (int part = 0; part < kParts && i + part * HR_LANES < vocab; ++part) {
            const int64_t first = i + part * HR_LANES;
            const Vec x = sub(load_scores(logits + first, vocab - first), most);
            if (at_least(x, splat(kLeastExponent)) == 0) continue;  // all add 0
            const Vec e = exponential(x);
            totals[2 * part] = add(totals[2 * part], low_half(e));
            totals[2 * part + 1] = add(totals[2 * part + 1], high_half(e));
        }
    double sums[kSums];
    for (int i = 0; i < 2 * kParts; ++i) store(sums + i * kDoubles, totals[i]);
    for (int half = kSums / 2; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
    return sums[0];
}

// Logits of a row as scores. A maximum and a logarithm of 0 leave them as they are.
struct Scores {
    const float* logits;
    int64_t vocab;
    float maximum, log_sum;

    float of(int64_t token) const { return (logits[token] - maximum) - log_sum; }
    Vec from(int64_t token) const {  // on; those behind the last are excluded
        const Vec v = load_scores(logits + token, vocab - token);
        return sub(sub(v, splat(maximum)), splat(log_sum));
    }
};

// Tokens with their scores, the worst first: a heap. Of equal scores the higher id is worse.
struct WorstFirst {
    float* scores;
    int64_t* ids;
    int64_t size;

    bool is_worse(int64_t i, float score, int64_t id) const {
        return scores[i] < score || (scores[i] == score && ids[i] > id);
    }
    // Put a token at place i, of which nothing above is better, or below it.
    void sift(int64_t i, float score, int64_t id) {
        for (int64_t child; (child = 2 * i + 1) < size; i = child) {
            if (child + 1 < size && is_worse(child + 1, scores[child], ids[child])) ++child;
            if (!is_worse(child, score, id)) break;
            scores[i] = scores[child];
            ids[i] = ids[child];
        }
        scores[i] = score;
        ids[i] = id;
    }
    void make() {
        for (int64_t i = size / 2 - 1; i >= 0; --i) sift(i, scores[i], ids[i]);
    }
    // All its tokens, the best first. Ends it as a heap.
    void sort() {
        while (size > 1) {
            --size;
            const float score = scores[size];
            const int64_t id = ids[size];
            scores[size] = scores[0];
            ids[size] = ids[0];
            sift(0, score, id);
        }
    }
};

// The best tokens of a row as a heap: as many as `best` has room for, at most `vocab`. Returns how
// many scores of the row are above `own`.
inline int64_t collect_best(const Scores& row, float own, WorstFirst best) {
    const int64_t num_best = best.size;
    for (int64_t i = 0; i < num_best; i += HR_LANES) {
        store_some(best.scores + i, row.from(i), num_best - i);
        for (int64_t id = i; id < i + HR_LANES && id < num_best; ++id) best.ids[id] = id;
    }
    best.make();
    int64_t num_better = 0;
    Vec worst = splat(num_best > 0 ? best.scores[0] : INFINITY);
    const Vec to_beat = splat(own);
    for (int64_t i = 0; i < row.vocab; i += HR_LANES) {
        const Vec v = row.from(i);
        num_better += __builtin_popcount(above(v, to_beat));
        uint32_t lanes = above(v, worst);
        if (lanes == 0 || i + HR_LANES <= num_best) continue;
        float scores[HR_LANES];
        store(scores, v);
        for (; lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            if (i + lane >= num_best && scores[lane] > best.scores[0])
                best.sift(0, scores[lane], i + lane);
        }
        worst = splat(best.scores[0]);
    }
    return num_better;
}

inline void run_scoring(const Scoring& scoring, int thread, int num_threads) {
    const DenormalsKept guard;
    for (int64_t i = thread; i < scoring.num_rows; i += num_threads) {
        Scores row = {scoring.logits + scoring.rows[i] * scoring.vocab, scoring.vocab, 0.0f, 0.0f};
        if (scoring.maxima != nullptr) {
            row.maximum = scoring.maxima[i];
            row.log_sum = (float)log(sum_exponentials(row.logits, row.vocab, row.maximum));
        }
        float* scores = scoring.scores + i * scoring.stride;
        int64_t* ids = scoring.ids + i * scoring.stride;
        ids[0] = scoring.token_ids[i];
        scores[0] = row.of(ids[0]);
        WorstFirst best = {scores + 1, ids + 1, scoring.num_tops[i]};
        scoring.ranks[i] = 1 + collect_best(row, scores[0], best);
        best.sort();
    }
}

}  // namespace
