// Random choice of a token per row: temperature, min-p, top-k and top-p, then Gumbel-max with the
// noise of kernels/sampling/reference.py, bit by bit.
//
// Scores are logits less their maximum, over the temperature: the best is 0. -Inf excludes a token.
// They are stored for rows with filters, or where they are asked for; else only those few are
// computed whose tokens can win, in one pass over the logits. No sum depends on the vector width.
#pragma once

#include <math.h>

#include "simd.h"
#include "work.h"

namespace {

constexpr int64_t kTogether = 4 * HR_LANES;     // tokens that get their random words together
constexpr uint32_t kExcludedRank = 0x7f800000;  // of -Inf
constexpr float kGumbelMax = 22.88f;            // no noise is larger, by more than sums are rounded

// Scores go by the bits of their magnitude: the best has the lowest rank.
inline uint32_t rank_of(float score) {
    uint32_t bits;
    memcpy(&bits, &score, 4);
    return bits & 0x7fffffff;
}

inline float score_of(uint32_t rank) {
    const uint32_t bits = rank | 0x80000000;
    float score;
    memcpy(&score, &bits, 4);
    return score;
}

// Sums the weights of the tokens with ranks from `first` to before `end`, `1 << shift` ranks a sum.
// A weight is a token's probability up to a factor, or 1. In order of the tokens.
template <bool kIsMass>
inline void add_weights(const float* scores, int64_t vocab, uint32_t first, uint32_t end, int shift,
                        double* sums) {
    const Vec best = splat(score_of(first)), worst = splat(score_of(end - 1));
    for (int64_t i = 0; i < vocab; i += HR_LANES) {
        const Vec v = load_scores(scores + i, vocab - i);
        if (!(at_least(best, v) & at_least(v, worst))) continue;
        float lanes[HR_LANES], weights[HR_LANES];
        store(lanes, v);
        store(weights, kIsMass ? exponential(v) : splat(1.0f));
        for (int lane = 0; lane < HR_LANES; ++lane) {
            const uint32_t rank = rank_of(lanes[lane]) - first;
            if (rank < end - first) sums[rank >> shift] += (double)weights[lane];
        }
    }
}

// The best tokens: those with scores above `worst`, and the first `num_worst` equal to it.
struct Head {
    float worst;
    int64_t num_worst;
};

constexpr int kDigits[] = {20, 9, 0};  // lowest bits of the digits of a rank
constexpr Head kAllTokens = {-INFINITY, INT64_MAX};

// The shortest head with `amount` of the whole mass; or with `amount` tokens, and all that equal
// the last of them. The last one's rank is found digit by digit: nothing is sorted.
template <bool kIsMass>
inline Head find_head(const float* scores, int64_t vocab, double amount) {
    double target = amount, before = 0.0;
    uint32_t first = 0, end = kExcludedRank;
    for (const int shift : kDigits) {
        double sums[2048] = {};
        add_weights<kIsMass>(scores, vocab, first, end, shift, sums);
        const int size = (int)((end - first) >> shift);
        if (first == 0 && end == kExcludedRank) {
            double total = 0.0;
            for (int i = 0; i < size; ++i) total += sums[i];
            if (!kIsMass && total <= amount) return kAllTokens;
            if (kIsMass) target = amount * total;
        }
        int digit = -1;
        for (int i = 0; i < size; ++i) {
            if (sums[i] == 0.0) continue;
            if (digit >= 0) before += sums[digit];
            digit = i;
            if (before + sums[i] >= target) break;
        }
        first += (uint32_t)digit << shift;
        end = first + (1u << shift);
    }
    const float worst = score_of(first);
    if (!kIsMass) return {worst, INT64_MAX};
    float weights[HR_LANES];
    store(weights, exponential(splat(worst)));
    const double num_worst = ceil((target - before) / (double)weights[0]);
    if (!(num_worst < (double)vocab)) return {worst, vocab};
    return {worst, num_worst < 1.0 ? 1 : (int64_t)num_worst};
}

inline void keep_head(float* scores, int64_t vocab, Head head) {
    const Vec worst = splat(head.worst);
    int64_t left = head.num_worst;
    for (int64_t i = 0; i < vocab; i += HR_LANES) {
        const Vec v = load_scores(scores + i, vocab - i);
        store_some(scores + i, excluded_below(v, worst), vocab - i);
        if (head.num_worst >= vocab) continue;
        uint32_t equal = at_least(v, worst) & at_least(worst, v);
        for (; equal != 0; equal &= equal - 1, --left)
            if (left <= 0) scores[i + __builtin_ctz(equal)] = -INFINITY;
    }
}

// Philox4x32-10: the words of tokens `first` ... `first + kTogether - 1`, `first` a multiple of 4.
inline void random_words(const hr_draw_row& row, int64_t first, uint32_t* words) {
    uint32_t lanes[4][HR_LANES];
    for (int i = 0; i < HR_LANES; ++i) lanes[0][i] = (uint32_t)(first / 4) + i;
    Words a = load_words(lanes[0]), b = splat_word(row.output_index);
    Words c = splat_word(row.choice_index), d = splat_word(0);  // purpose: sampling
    uint32_t low_key = (uint32_t)row.seed, high_key = (uint32_t)(row.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const Words b_before = b, d_before = d;
        Words high_of_a, high_of_c;
        multiply(a, splat_word(0xD2511F53u), high_of_a, d);
        multiply(c, splat_word(0xCD9E8D57u), high_of_c, b);
        a = exclusive_or(exclusive_or(high_of_c, b_before), splat_word(low_key));
        c = exclusive_or(exclusive_or(high_of_a, d_before), splat_word(high_key));
        low_key += 0x9E3779B9u;
        high_key += 0xBB67AE85u;
    }
    store_words(lanes[0], a);
    store_words(lanes[1], b);
    store_words(lanes[2], c);
    store_words(lanes[3], d);
    for (int i = 0; i < HR_LANES; ++i)
        for (int word = 0; word < 4; ++word) words[4 * i + word] = lanes[word][i];
}

inline float gumbel(uint32_t word) { return (float)-log(-log((word + 0.5) * 0x1p-32)); }

struct Winner {
    int64_t token;
    float sum;  // of score and noise
};

// Gives noise to those of `kTogether` tokens from `first` on that can still win. With u the uniform
// number, noise is at most -log(1 - u), so a token that lacks `d` needs 1 - u <= e^-d. The factor
// makes up for all rounding.
inline void draw_together(const hr_draw_row& row, const float* scores, int64_t first,
                          Winner& winner) {
    uint32_t words[kTogether];
    float halves[kTogether];  // (1 - u) 2^31, rounded down
    random_words(row, first, words);
    for (int i = 0; i < kTogether; ++i) halves[i] = (float)(int32_t)(~words[i] >> 1);
    const Vec to_beat = splat(winner.sum), factor = splat(0x1p31f * 1.0001f);
    for (int i = 0; i < kTogether; i += HR_LANES) {
        const Vec most = mul(exponential(sub(load(scores + i), to_beat)), factor);
        uint32_t lanes = at_least(most, load(halves + i));
        for (; lanes != 0; lanes &= lanes - 1) {
            const int k = i + __builtin_ctz(lanes);
            const float sum = scores[k] + gumbel(words[k]);
            if (sum > winner.sum || (sum == winner.sum && first + k < winner.token))
                winner = {first + k, sum};
        }
    }
}

inline Winner with_noise(const hr_draw_row& row, int64_t token, float score) {
    uint32_t words[kTogether];
    random_words(row, token / 4 * 4, words);
    return {token, score + gumbel(words[token % 4])};
}

// Scores that are stored.
struct StoredScores {
    const float* scores;
    int64_t vocab;

    Vec from(int64_t token) const { return load_scores(scores + token, vocab - token); }
    float bound(float limit) const { return limit; }
    Vec compared(int64_t token) const { return from(token); }
    // The best score is 0, and every row has it.
    Winner first_contender(const hr_draw_row& row) const {
        for (int64_t i = 0;; i += HR_LANES) {
            const uint32_t lanes = at_least(from(i), splat(0.0f));
            if (lanes != 0) return with_noise(row, i + __builtin_ctz(lanes), 0.0f);
        }
    }
};

// Scores that are made of logits when they are needed: as torch does it, value by value, since both
// steps have one right rounding. Distances to the maximum are compared instead, which takes no
// division.
struct ScaledLogits {
    const float* logits;
    int64_t vocab;
    float maximum, temperature;

    Vec compared(int64_t token) const {
        return sub(load_scores(logits + token, vocab - token), splat(maximum));
    }
    Vec from(int64_t token) const { return div(compared(token), splat(temperature)); }
    // No token with a score of `limit` < 0 at least has a lower distance; the factor makes up for
    // all rounding.
    float bound(float limit) const { return limit * temperature * 1.00001f; }
    Winner first_contender(const hr_draw_row& row) const {
        return with_noise(row, row.best, 0.0f);
    }
};

template <typename Source>
inline int64_t draw_token(const hr_draw_row& row, const Source& source) {
    Winner winner = source.first_contender(row);
    for (int64_t i = 0; i < source.vocab; i += kTogether) {
        const Vec bound = splat(source.bound(winner.sum - kGumbelMax));
        uint32_t contenders = 0;
        for (int64_t k = i; k < i + kTogether && k < source.vocab; k += HR_LANES)
            contenders |= at_least(source.compared(k), bound);
        if (contenders == 0) continue;
        float scores[kTogether];
        for (int k = 0; k < kTogether; k += HR_LANES)
            store(scores + k, i + k < source.vocab ? source.from(i + k) : splat(-INFINITY));
        draw_together(row, scores, i, winner);
    }
    return winner.token;
}

inline bool is_filtered(const hr_draw_row& row, int64_t vocab) {
    return row.min_score > -INFINITY || (row.top_k > 0 && row.top_k < vocab) || row.top_p < 1.0;
}

inline int64_t draw_row(const hr_draw_row& row, const ScaledLogits& logits, float* scores) {
    const int64_t vocab = logits.vocab;
    for (int64_t i = 0; i < vocab; i += HR_LANES) store_some(scores + i, logits.from(i), vocab - i);
    if (row.min_score > -INFINITY) keep_head(scores, vocab, {row.min_score, INT64_MAX});
    if (row.top_k > 0 && row.top_k < vocab)
        keep_head(scores, vocab, find_head<false>(scores, vocab, (double)row.top_k));
    if (row.top_p < 1.0) keep_head(scores, vocab, find_head<true>(scores, vocab, row.top_p));
    return draw_token(row, StoredScores{scores, vocab});
}

inline void run_draw(const Draw& draw, int thread, int num_threads) {
    const int64_t vocab = draw.vocab;
    for (int64_t i = thread; i < draw.num_rows; i += num_threads) {
        const hr_draw_row& row = draw.rows[i];
        const float* logits = draw.logits + row.row * vocab;
        const ScaledLogits scaled = {logits, vocab, logits[row.best], row.temperature};
        if (draw.are_scores_kept)
            draw.token_ids[i] = draw_row(row, scaled, draw.scores + i * vocab);
        else if (is_filtered(row, vocab))
            draw.token_ids[i] = draw_row(row, scaled, draw.scores + thread * vocab);
        else
            draw.token_ids[i] = draw_token(row, scaled);
    }
}

}  // namespace
