// Random choice of a token per row: temperature, min-p, top-k and top-p, then Gumbel-max with the
// noise of kernels/sampling/reference.py, bit by bit.
//
// Scores are logits less their maximum, over the temperature: the best is 0. -Inf excludes a token.
// They are stored for rows with filters, or where they are asked for; else only those few are
// computed whose tokens can win, in one pass over the logits. No sum depends on the vector width.
#pragma once

#include <math.h>

#include "logprobs.h"
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
        uint32_t lanes = at_least(best, v) & at_least(v, worst);
        if (lanes == 0) continue;
        float within[HR_LANES], weights[HR_LANES];
        store(within, v);
        store(weights, kIsMass ? exponential(v) : splat(1.0f));
        for (; lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            sums[(rank_of(within[lane]) - first) >> shift] += (double)weights[lane];
        }
    }
}

// The best tokens: those with scores above `worst`, and the first `num_worst` equal to it. The rank
// of the worst is found digit by digit: nothing is sorted.
struct Head {
    float worst;
    int64_t num_worst;
};

constexpr int kDigits[] = {20, 9, 0};  // lowest bits of the digits of a rank
constexpr int kNumSums = 1 << 11;       // values of a digit
constexpr int64_t kFewTokens = 256;

// Where the rank of the last token of a head is sought: from `first` on, before `end`.
struct Search {
    uint32_t first, end;
    double target, before;  // weights of the head, and of the tokens before `first`
};

// Looks for one more digit of the rank.
template <bool kIsMass>
inline void find_digit(const float* scores, int64_t vocab, int shift, Search& search) {
    double sums[kNumSums] = {};
    add_weights<kIsMass>(scores, vocab, search.first, search.end, shift, sums);
    const int size = (int)((search.end - search.first) >> shift);
    int digit = -1;
    for (int i = 0; i < size; ++i) {
        if (sums[i] == 0.0) continue;
        if (digit >= 0) search.before += sums[digit];
        digit = i;
        if (search.before + sums[i] >= search.target) break;
    }
    search.first += (uint32_t)digit << shift;
    search.end = search.first + (1u << shift);
}

// Those of the scores that are not below `lowest`, in order; returns how many. Writes at most
// HR_LANES more than there are scores.
inline int64_t take_best(const float* scores, int64_t vocab, float lowest, float* best) {
    const Vec limit = splat(lowest);
    int64_t size = 0;
    for (int64_t i = 0; i < vocab; i += HR_LANES) {
        const Vec v = load_scores(scores + i, vocab - i);
        const uint32_t lanes = at_least(v, limit);
        store_lanes(best + size, v, lanes);
        size += __builtin_popcount(lanes);
    }
    return size;
}

// The shortest head with `top_p` of the whole mass. `memory`: of vocab + HR_LANES floats.
inline Head find_nucleus(const float* scores, int64_t vocab, double top_p, float* memory) {
    const double total = sum_exponentials(scores, vocab, 0.0f);
    // All tokens with lower scores have less than the mass that the head may lack.
    const float lowest = (float)log(0.999 * (1.0 - top_p) * total / (double)vocab);
    const int64_t num_best = take_best(scores, vocab, lowest, memory);
    Search search = {0, kExcludedRank, top_p * total, 0.0};
    for (const int shift : kDigits) find_digit<true>(memory, num_best, shift, search);
    const float worst = score_of(search.first);
    float weights[HR_LANES];
    store(weights, exponential(splat(worst)));
    const double num_worst = ceil((search.target - search.before) / (double)weights[0]);
    if (!(num_worst < (double)vocab)) return {worst, vocab};
    return {worst, num_worst < 1.0 ? 1 : (int64_t)num_worst};
}

// The `top_k` < vocab best, and all that equal the last of them.
inline Head find_top(const float* scores, int64_t vocab, int64_t top_k) {
    if (top_k <= kFewTokens) {
        float best[kFewTokens];
        int64_t ids[kFewTokens];
        const WorstFirst few = {best, ids, top_k};
        collect_best(Scores{scores, vocab, 0.0f, 0.0f}, INFINITY, few);
        return {best[0], INT64_MAX};
    }
    Search search = {0, kExcludedRank, (double)top_k, 0.0};
    for (const int shift : kDigits) find_digit<false>(scores, vocab, shift, search);
    return {score_of(search.first), INT64_MAX};
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

// Philox4x32-10 for the tokens of one row. A group of four tokens has a pair of words of each
// vector, of which the upper one may hold anything: products take the lower ones.
class Noise {
  public:
    explicit Noise(const hr_draw_row& row)
        : output_(splat_word(row.output_index)), choice_(splat_word(row.choice_index)) {
        uint32_t low_key = (uint32_t)row.seed, high_key = (uint32_t)(row.seed >> 32);
        for (int round = 0; round < kRounds; ++round) {
            low_keys_[round] = splat_word(low_key);
            high_keys_[round] = splat_word(high_key);
            low_key += 0x9E3779B9u;
            high_key += 0xBB67AE85u;
        }
        for (int half = 0; half < 2; ++half) {
            uint32_t groups[HR_LANES] = {};
            for (int i = 0; i < kGroups; ++i)
                groups[2 * i] = half * kGroups + i % 2 * (kGroups / 2) + i / 2;
            groups_[half] = load_words(groups);
        }
    }

    // The words of tokens `first` ... `first + kTogether - 1`, `first` a multiple of 4.
    void words(int64_t first, Words (&words)[4]) const {
        const Words first_group = splat_word((uint32_t)(first / 4));
        for (int half = 0; half < 2; ++half) {
            Words a = add(groups_[half], first_group), b = output_, c = choice_;
            Words d = splat_word(0);  // purpose: sampling
            for (int round = 0; round < kRounds; ++round) {
                const Words of_a = multiply_low(a, splat_word(0xD2511F53u));
                const Words of_c = multiply_low(c, splat_word(0xCD9E8D57u));
                a = exclusive_or(high_words(of_c), b, low_keys_[round]);
                c = exclusive_or(high_words(of_a), d, high_keys_[round]);
                b = of_c;
                d = of_a;
            }
            const Words ab = low_words(a, b), cd = low_words(c, d);
            words[2 * half] = even_pairs(ab, cd);
            words[2 * half + 1] = odd_pairs(ab, cd);
        }
    }

  private:
    static constexpr int kRounds = 10, kGroups = HR_LANES / 2;

    Words low_keys_[kRounds], high_keys_[kRounds], groups_[2];
    const Words output_, choice_;
};

inline float gumbel(uint32_t word) { return (float)-log(-log((word + 0.5) * 0x1p-32)); }

struct Winner {
    int64_t token;
    float sum;  // of score and noise
};

// Gives noise to those of `kTogether` tokens from `first` on that can still win. With u the uniform
// number, noise is at most -log(1 - u), so a token that lacks `d` needs 1 - u <= e^-d, which is
// compared with a power that is too large by at most 7 %. The factor makes up for all rounding.
inline void draw_together(const Noise& noise, const Vec (&scores)[4], int64_t first,
                          Winner& winner) {
    Words words[4];
    noise.words(first, words);
    const Vec to_beat = splat(winner.sum), factor = splat(0x1p31f * 1.0001f);
    for (int part = 0; part < 4; ++part) {
        const Vec most = mul(exponential_above(sub(scores[part], to_beat)), factor);
        uint32_t lanes = at_least(most, upper_halves(words[part]));  // (1 - u) 2^31
        if (lanes == 0) continue;
        uint32_t numbers[HR_LANES];
        float values[HR_LANES];
        store_words(numbers, words[part]);
        store(values, scores[part]);
        for (; lanes != 0; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            const int64_t token = first + part * HR_LANES + lane;
            const float sum = values[lane] + gumbel(numbers[lane]);
            if (sum > winner.sum || (sum == winner.sum && token < winner.token))
                winner = {token, sum};
        }
    }
}

inline Winner with_noise(const Noise& noise, int64_t token, float score) {
    Words words[4];
    uint32_t numbers[HR_LANES];
    noise.words(token / 4 * 4, words);
    store_words(numbers, words[0]);
    return {token, score + gumbel(numbers[token % 4])};
}

// Scores that are stored.
struct StoredScores {
    const float* scores;
    int64_t vocab;

    Vec from(int64_t token) const { return load_scores(scores + token, vocab - token); }
    float bound(float limit) const { return limit; }
    Vec compared(int64_t token) const { return from(token); }
    // The best score is 0, and every row has it.
    Winner first_contender(const Noise& noise) const {
        for (int64_t i = 0; i < vocab; i += HR_LANES) {
            const uint32_t lanes = at_least(from(i), splat(0.0f));
            if (lanes != 0) return with_noise(noise, i + __builtin_ctz(lanes), 0.0f);
        }
        return {-1, -INFINITY};
    }
};

// Scores that are made of logits when they are needed: as torch does it, value by value, since both
// steps have one right rounding. Distances to the maximum are compared instead, which takes no
// division.
struct ScaledLogits {
    const float* logits;
    int64_t vocab;
    int64_t best;
    float maximum, temperature;

    Vec compared(int64_t token) const {
        return sub(load_scores(logits + token, vocab - token), splat(maximum));
    }
    Vec from(int64_t token) const { return div(compared(token), splat(temperature)); }
    // No token with a score of `limit` < 0 at least has a lower distance; the factor makes up for
    // all rounding.
    float bound(float limit) const { return limit * temperature * 1.00001f; }
    Winner first_contender(const Noise& noise) const { return with_noise(noise, best, 0.0f); }
};

template <typename Source>
inline int64_t draw_token(const hr_draw_row& row, const Source& source) {
    const Noise noise(row);
    Winner winner = source.first_contender(noise);
    for (int64_t i = 0; i < source.vocab; i += kTogether) {
        const Vec bound = splat(source.bound(winner.sum - kGumbelMax));
        uint32_t contenders = 0;
        for (int64_t k = i; k < i + kTogether && k < source.vocab; k += HR_LANES)
            contenders |= at_least(source.compared(k), bound);
        if (contenders == 0) continue;
        Vec scores[4];
        for (int part = 0; part < 4; ++part) {
            const int64_t k = i + part * HR_LANES;
            scores[part] = k < source.vocab ? source.from(k) : splat(-INFINITY);
        }
        draw_together(noise, scores, i, winner);
    }
    return winner.token;
}

inline bool is_filtered(const hr_draw_row& row, int64_t vocab) {
    return row.min_score > -INFINITY || (row.top_k > 0 && row.top_k < vocab) || row.top_p < 1.0;
}

inline int64_t draw_row(const hr_draw_row& row, const ScaledLogits& logits, float* scores,
                        float* memory) {
    const int64_t vocab = logits.vocab;
    for (int64_t i = 0; i < vocab; i += HR_LANES) store_some(scores + i, logits.from(i), vocab - i);
    if (row.min_score > -INFINITY) keep_head(scores, vocab, {row.min_score, INT64_MAX});
    if (row.top_k > 0 && row.top_k < vocab)
        keep_head(scores, vocab, find_top(scores, vocab, row.top_k));
    if (row.top_p < 1.0) keep_head(scores, vocab, find_nucleus(scores, vocab, row.top_p, memory));
    return draw_token(row, StoredScores{scores, vocab});
}

inline void run_draw(const Draw& draw, int thread, int num_threads) {
    const int64_t vocab = draw.vocab;
    float* memory = draw.memory + thread * draw_memory(vocab);
    float* own = memory + vocab + HR_LANES;
    for (int64_t i = thread; i < draw.num_rows; i += num_threads) {
        const hr_draw_row& row = draw.rows[i];
        const float* logits = draw.logits + row.row * vocab;
        const ScaledLogits scaled = {logits, vocab, row.best, logits[row.best], row.temperature};
        float* scores = draw.scores == nullptr ? own : draw.scores + i * vocab;
        draw.token_ids[i] = draw.scores != nullptr || is_filtered(row, vocab)
                                ? draw_row(row, scaled, scores, memory)
                                : draw_token(row, scaled);
    }
}

}  // namespace
