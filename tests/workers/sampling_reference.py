"""The sampler's documented steps, written again in plain numpy and Python, one token at a time."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.configs.sampling_params import SamplingParams
from headrace.workers.logit_edits import LogitEdits, LogitRules
from headrace.workers.sampler import SamplingRow

Array = np.ndarray[Any, Any]
FLOAT32 = np.finfo(np.float32)


def make_row(
    params: SamplingParams,
    choice: int = 0,
    output: int | None = None,
    num_logprobs: int | None = None,
    *,
    vocab: int,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] | None = None,
) -> SamplingRow:
    """A row after `outputs`; if only their number `output` is given, they are all token 0."""
    if outputs is None:
        outputs = [0] * (output or 0)
    edits = LogitEdits(LogitRules(params, vocab), np.array(prompt, dtype=np.int64), outputs)
    return SamplingRow(params, choice, len(outputs), num_logprobs, edits)


def reference_noise(vocab: int, seed: int, choice: int, output: int) -> Array:
    """Gumbel noise of a whole vocabulary, float32, from Philox4x32-10 in numpy."""
    tokens = np.arange(vocab, dtype=np.uint64)
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    x = [tokens // np.uint64(4)] + [
        np.full(vocab, word, dtype=np.uint64) for word in (output, choice, 0)
    ]
    key = [(seed % 2**64) % 2**32, (seed % 2**64) // 2**32]
    for _ in range(10):
        first, second = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [
            (second >> shift) ^ x[1] ^ np.uint64(key[0]),
            second & low32,
            (first >> shift) ^ x[3] ^ np.uint64(key[1]),
            first & low32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    words = np.choose((tokens % np.uint64(4)).astype(int), x)
    noise: Array = -np.log(-np.log((words + 0.5) / 2**32))
    return noise.astype(np.float32)


def reference_edited(
    logits: Array, params: SamplingParams, prompt: Sequence[int], outputs: Sequence[int]
) -> Array:
    """Logits after allowed ids, bad words, bias, min_tokens and penalties, in the type given."""
    dtype = logits.dtype.type
    result = []
    for token, value in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = dtype(-np.inf)
        for *before, last in params._bad_words_token_ids or ():
            if last == token and (not before or list(outputs[-len(before) :]) == before):
                value = dtype(-np.inf)
        if params.logit_bias and token in params.logit_bias:
            value = value + dtype(min(100.0, max(-100.0, params.logit_bias[token])))
        if len(outputs) < params.min_tokens and token in params.all_stop_token_ids:
            value = dtype(-np.inf)
        count = list(outputs).count(token)
        if value > -np.inf:
            if token in prompt or count:
                factor = min(max(params.repetition_penalty, FLOAT32.tiny), FLOAT32.max)
                repetition = dtype(factor)
                value = value / repetition if value > 0 else value * repetition
            value = value - dtype(params.frequency_penalty) * dtype(count)
            value = value - dtype(params.presence_penalty) * dtype(count > 0)
            value = min(max(value, dtype(FLOAT32.min)), dtype(FLOAT32.max))
        result.append(value)
    return np.array(result, dtype=logits.dtype)


def reference_kept(scores: Array, params: SamplingParams) -> list[int]:
    """Tokens that survive min-p, top-k and top-p, by plain sorting; the scores' maximum is 0."""
    allowed = [t for t in range(len(scores)) if scores[t] > -np.inf]
    if params.min_p > 0:
        allowed = [t for t in allowed if scores[t] >= scores.dtype.type(math.log(params.min_p))]
    order = sorted(allowed, key=lambda t: (-scores[t], t))
    if 0 < params.top_k < len(order):
        order = [t for t in order if scores[t] >= scores[order[params.top_k - 1]]]
    if params.top_p < 1:
        weights = [math.exp(float(scores[t])) for t in order]
        total, mass, kept = math.fsum(weights), 0.0, 0
        while kept == 0 or (mass < params.top_p * total and kept < len(order)):
            mass += weights[kept]
            kept += 1
        order = order[:kept]
    return sorted(order)


def reference_scores(
    logits: Array,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> Array:
    """Edited logits, for random sampling relative to the largest and over the temperature."""
    edited = reference_edited(logits, params, prompt, outputs)
    if params.is_greedy:
        return edited
    temperature = logits.dtype.type(min(params.temperature, 3.4e38))
    with np.errstate(over="ignore"):
        scores: Array = (edited - edited.max()) / temperature
    return scores


def reference_sample(
    logits: Array,
    params: SamplingParams,
    choice: int = 0,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> int:
    """The token that the documented steps give."""
    scores = reference_scores(logits, params, prompt, outputs)
    if params.is_greedy:
        return int(np.argmax(scores))
    kept = reference_kept(scores, params)
    assert params.seed is not None
    noise = reference_noise(len(scores), params.seed, choice, len(outputs))
    return kept[int(np.argmax(scores[kept] + noise[kept]))]


def log_softmax(scores: Array) -> Array:
    """In float64."""
    exact = scores.astype(np.float64) - float(scores.max())
    with np.errstate(divide="ignore"):
        result: Array = exact - np.log(np.exp(exact).sum())
    return result


def reference_probabilities(
    logits: Array,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    outputs: Sequence[int] = (),
) -> Array:
    """The law of a random draw, in float64 from start to end."""
    scores = reference_scores(logits.astype(np.float64), params, prompt, outputs)
    kept = reference_kept(scores, params)
    result = np.zeros(len(scores))
    weights = np.exp(scores[kept])
    result[kept] = weights / weights.sum()
    return result
