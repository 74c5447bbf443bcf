"""Perplexity of the real models on a text of some thousand tokens, against transformers.

The text is Python's own documentation, which every Python has (`pydoc_data`, PSF licence). In
bfloat16 the reference is transformers in bfloat16; where weights are computed as a GGUF file
stores them, it is transformers in float32 on the same weights, dequantized.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHUNK = 512  # tokens seen at once
NUM_CHUNKS = 8
TOLERANCE = 0.005
INT8_TOLERANCE = 0.015  # weights are rounded once more: SmolLM2 was seen 0.8 % above
TOPICS = (
    "assert", "assignment", "attribute-references", "binary", "comparisons", "dynamic-features",
    "exceptions", "execmodel", "formatstrings", "function", "import", "naming", "objects",
    "specialnames",
)  # fmt: skip


@dataclass
class Case:
    """A real model, the token ids of the text in chunks, and what the references have said."""

    path: Path
    directory: Path
    chunks: list[list[int]]
    expected: dict[torch.dtype, float] = field(default_factory=dict)


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    from headrace.frontend.tokenizers import load_tokenizer

    path = request.getfixturevalue(f"{request.param}_gguf")
    directory = request.getfixturevalue(f"{request.param}_hf")
    text = "\n\n".join(topics[name] for name in TOPICS)
    ids = load_tokenizer(path, None).encode(text, add_special_tokens=False)
    assert len(ids) >= CHUNK * NUM_CHUNKS
    bos = [2] if request.param == "gemma3" else []  # Gemma knows no text without its first token
    size = CHUNK - len(bos)
    yield Case(path, directory, [bos + ids[i * size :][:size] for i in range(NUM_CHUNKS)])


def ours(case: Case, **options: Any) -> float:
    llm = LLM(str(case.path), max_model_len=2 * CHUNK, kv_cache_memory_bytes=1 << 30, **options)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    try:
        outputs = llm.generate(case.chunks, params, use_tqdm=False)
    finally:
        llm.close()
    total = 0.0
    for output, chunk in zip(outputs, case.chunks, strict=True):
        assert output.prompt_logprobs is not None
        for token, logprobs in zip(chunk[1:], output.prompt_logprobs[1:], strict=True):
            assert logprobs is not None
            total += logprobs[token].logprob
    return math.exp(-total / sum(len(chunk) - 1 for chunk in case.chunks))


def reference(case: Case, dtype: torch.dtype) -> float:
    if dtype not in case.expected:
        case.expected[dtype] = compute_reference(case, dtype)
    return case.expected[dtype]


def compute_reference(case: Case, dtype: torch.dtype) -> float:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(case.directory, dtype=dtype).eval()
    total = 0.0
    for chunk in case.chunks:
        with torch.inference_mode():
            logits = model(torch.tensor([chunk])).logits[0, :-1].float()
        total += float(
            torch.nn.functional.cross_entropy(logits, torch.tensor(chunk[1:]), reduction="sum")
        )
    return math.exp(total / sum(len(chunk) - 1 for chunk in case.chunks))


def test_bfloat16_equals_transformers(case: Case) -> None:
    measured, expected = ours(case, dtype="bfloat16"), reference(case, torch.bfloat16)
    print(f"\nperplexity in bfloat16: {measured:.4f}, transformers {expected:.4f}")
    assert measured == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({}, TOLERANCE), ({"quantization": "int8"}, INT8_TOLERANCE)],
    ids=["as stored", "int8"],
)
def test_quantized_equals_the_dequantized_weights(
    case: Case, options: dict[str, Any], tolerance: float
) -> None:
    measured, expected = ours(case, **options), reference(case, torch.float32)
    print(f"\nperplexity with {options}: {measured:.4f}, dequantized in float32 {expected:.4f}")
    assert measured == pytest.approx(expected, rel=tolerance)
