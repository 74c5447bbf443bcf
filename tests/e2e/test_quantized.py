"""The real models with quantized weights: near transformers in float32, the same bits always.

Transformers computes with the dequantized weights of the same file, so that "gguf" differs from it
by activations alone: rounded to 8 bits before products, and to bfloat16 between operations.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.configs.config import QuantizationMethod
from headrace.configs.quantization import INT8
from headrace.kernels.native import load_kernels
from tests.kernels.native_ops import available_isas
from tests.workers.test_models import prompt_logits
from tests.workers.test_quantized_models import make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not available_isas(), reason="no native kernels on this machine"),
]

TEXT = (Path(__file__).parent.parent.parent / "LICENSE").read_text()
LENGTHS = (180, 240)  # tokens
# Mean divergence of next-token probabilities from those of transformers, in nats. Measured here:
# bfloat16 weights 0.001 (SmolLM2) and 0.003 (Gemma 3).
MAX_DIVERGENCE = 0.03
MAX_LOSS = 0.02  # by which the text is less likely, in nats per token


@dataclass
class Case:
    """A real model: its file, texts and what transformers makes of them."""

    path: Path
    texts: list[list[int]]
    expected: list[torch.Tensor]  # log-probabilities, [num_tokens, vocab]


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def case(request: pytest.FixtureRequest) -> Case:
    import transformers

    from headrace.frontend.tokenizers import load_tokenizer

    path = request.getfixturevalue(f"{request.param}_gguf")
    directory = request.getfixturevalue(f"{request.param}_hf")
    ids = load_tokenizer(path, None).encode(TEXT, add_special_tokens=request.param == "gemma3")
    texts = [ids[:1] + ids[1 + 100 * i :][: n - 1] for i, n in enumerate(LENGTHS)]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        logits = [model.eval()(torch.tensor([text])).logits[0] for text in texts]
    return Case(path, texts, [one.log_softmax(-1) for one in logits])


@pytest.mark.parametrize("method", ("gguf", INT8))
def test_probabilities(case: Case, method: QuantizationMethod) -> None:
    """Near transformers'; the same bits in chunks and with one thread."""
    model = make_model(case.path, method, load_kernels("auto", 2))
    divergences, losses = [], []
    for text, expected in zip(case.texts, case.expected, strict=True):
        logits = prompt_logits(model, text, len(text))
        result = logits.log_softmax(-1)
        divergences.append((expected.exp() * (expected - result)).sum(-1))
        following = torch.tensor(text[1:])[:, None]
        losses.append((expected - result)[:-1].gather(1, following)[:, 0])
        assert torch.equal(prompt_logits(model, text, 50), logits)
    divergence, loss = torch.cat(divergences).mean().item(), torch.cat(losses).mean().item()
    print(f"\n{method}: divergence {divergence:.4f}, loss {loss:+.4f} nats per token")
    assert divergence < MAX_DIVERGENCE
    assert loss < MAX_LOSS
    alone = make_model(case.path, method, load_kernels("auto", 1))
    assert torch.equal(prompt_logits(alone, text, 7), logits)


def test_a_file_is_run_as_it_is_by_default(case: Case) -> None:
    llm = LLM(str(case.path), max_model_len=512, kv_cache_memory_bytes=64 << 20, max_num_seqs=9)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    prompt = "The capital of France is"
    mates = ["Once upon a time", "1, 2, 3,", "def f(x):"] * 2
    try:
        assert llm.llm_engine.model_config.quantization == "gguf"
        [alone] = llm.generate([prompt], params, use_tqdm=False)
        *_, together = llm.generate([*mates, prompt], params, use_tqdm=False)
    finally:
        llm.close()
    assert any(name in alone.outputs[0].text for name in ("Paris", "France"))
    assert together.outputs[0].token_ids == alone.outputs[0].token_ids
    assert together.outputs[0].logprobs == alone.outputs[0].logprobs
