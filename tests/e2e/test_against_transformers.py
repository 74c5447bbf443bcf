"""The real models in float32 against transformers: greedy texts token by token, and whole-prompt
logits.

The reference runs over prompt and our output at once: if its best token after every prefix is ours,
then its own greedy text is ours. Where it is not, the two best logits must lie within `NEAR_TIE`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.configs.model_files.model_info import read_model_info
from headrace.workers.models import build_model, load_weights
from headrace.workers.weight_loader import iter_weights
from tests.workers.test_models import prompt_logits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_PROMPTS = int(os.environ.get("TRANSFORMERS_TEST_PROMPTS", "16"))  # 64: minutes
NUM_TOKENS = 64
NUM_LONG = NUM_PROMPTS // 8
LONG = 620  # tokens; Gemma's window is 512
NEAR_TIE = 1e-4
LOGITS_TOLERANCE = 1e-3
TEXT = (Path(__file__).parent.parent.parent / "LICENSE").read_text()


@dataclass
class Case:
    """One real model: file, reference, prompts, our greedy continuations in float32."""

    path: Path
    reference: Any
    prompts: list[list[int]]
    outputs: list[list[int]]


def generate(path: Path, prompts: list[list[int]], dtype: str) -> list[list[int]]:
    llm = LLM(str(path), dtype=dtype, max_model_len=2048, kv_cache_memory_bytes=2 << 30)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    try:
        done = llm.generate(prompts, params, use_tqdm=False)
    finally:
        llm.close()
    return [list(output.outputs[0].token_ids) for output in done]


def make_prompts(path: Path) -> list[list[int]]:
    """Slices of an English text: 3 to 120 tokens, and eight that are longer than the window."""
    from headrace.frontend.tokenizers import load_tokenizer

    ids = load_tokenizer(path, None).encode(TEXT, add_special_tokens=False)
    lengths = [3 + (7 * i) % 118 for i in range(NUM_PROMPTS - NUM_LONG)]
    lengths += [LONG + i for i in range(NUM_LONG)]
    return [ids[(31 * i) % (len(ids) - n) :][:n] for i, n in enumerate(lengths)]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    import transformers

    path = request.getfixturevalue(f"{request.param}_gguf")
    directory = request.getfixturevalue(f"{request.param}_hf")
    prompts = make_prompts(path)
    outputs = generate(path, prompts, "float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    yield Case(path, reference.eval(), prompts, outputs)


def reference_logits(case: Case, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = case.reference(torch.tensor([token_ids])).logits[0].float()
    return logits


def count_equal(case: Case, outputs: list[list[int]], near_tie: float | None) -> tuple[int, int]:
    """Equal tokens and all tokens; with `near_tie`, an unequal one must be a tie."""
    equal = total = 0
    for prompt, output in zip(case.prompts, outputs, strict=True):
        logits = reference_logits(case, prompt + output)[len(prompt) - 1 : -1]
        best = logits.max(dim=-1).values
        ours = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        equal += int((logits.argmax(dim=-1) == torch.tensor(output)).sum())
        total += len(output)
        if near_tie is not None:
            assert (best - ours).max() <= near_tie, (best - ours).max()
    return equal, total


def test_greedy_texts_equal_transformers(case: Case) -> None:
    assert sum(len(prompt) > 600 for prompt in case.prompts) >= NUM_LONG
    equal, total = count_equal(case, case.outputs, NEAR_TIE)
    print(f"\nfloat32: {equal} of {total} tokens equal, the others near ties")
    assert total == NUM_PROMPTS * NUM_TOKENS
    assert equal >= total - 4


def test_prompt_logits_equal_transformers(case: Case) -> None:
    info = read_model_info(case.path)
    model = build_model(info.architecture, info.hf_config, torch.float32, str(case.path))
    model.allocate(2048)
    with torch.inference_mode():
        load_weights(model, iter_weights(case.path, info.hf_config, torch.float32), str(case.path))
    worst = 0.0
    for prompt in [*case.prompts[:6], case.prompts[-1]]:
        for chunk in (len(prompt), 100):
            difference = prompt_logits(model, prompt, chunk) - reference_logits(case, prompt)
            worst = max(worst, float(difference.abs().max()))
    print(f"\nlargest difference of a prompt logit: {worst:.2e}")
    assert worst <= LOGITS_TOLERANCE


def test_share_of_equal_tokens_in_bfloat16(case: Case) -> None:
    prompts = case.prompts[: NUM_PROMPTS // 2]
    outputs = generate(case.path, prompts, "bfloat16")
    some = Case(case.path, case.reference, prompts, outputs)
    equal, total = count_equal(some, outputs, None)
    print(f"\nbfloat16: {equal / total:.1%} of {total} tokens are the float32 choice")
    assert equal / total > 0.9
