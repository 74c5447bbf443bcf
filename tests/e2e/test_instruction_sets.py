"""SmolLM2 on every instruction set that this machine has: what is used is said, answers agree.

Results differ between families of instruction sets as rounding does. So a token is right if the
logit that the torch references in float32 give it is the best one, or lies so near the best that
rounding can decide.
"""

import logging
import re
from pathlib import Path

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.configs.model_files.model_info import read_model_info
from headrace.workers.models import Decoder, build_model, load_weights
from headrace.workers.weight_loader import iter_weights
from tests.kernels.native_ops import available_isas
from tests.workers.test_models import prompt_logits

pytestmark = pytest.mark.slow

PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, a small robot")
NUM_TOKENS = 24
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.1}  # between the best logit and the chosen one


@pytest.fixture(scope="module")
def judge(smollm2_gguf: Path) -> Decoder:
    info = read_model_info(smollm2_gguf)
    model = build_model(info.architecture, info.hf_config, torch.float32, "test")
    model.allocate(2048)
    with torch.inference_mode():
        weights = iter_weights(smollm2_gguf, info.hf_config, torch.float32)
        load_weights(model, weights, "test")
    return model


@pytest.mark.parametrize("dtype", NEAR_TIE)
@pytest.mark.parametrize("choice", ("reference", *available_isas()))
def test_answers(
    choice: str,
    dtype: str,
    judge: Decoder,
    smollm2_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("HEADRACE_CPU_KERNELS", choice)
    caplog.set_level(logging.INFO, "headrace")  # also of the engine's process
    llm = LLM(str(smollm2_gguf), dtype=dtype, max_model_len=256, max_num_seqs=4)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    finally:
        llm.close()
    log = capfd.readouterr().err
    (used,) = re.findall(r"(?<!native )CPU kernels: (\S+)", log)
    if choice == "reference":
        assert used.startswith("torch")
    else:
        (chosen,) = re.findall(r"native CPU kernels: (\w+)", log)
        assert chosen == choice and used.startswith("native-")
    worst, differ = 0.0, 0
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        logits = prompt_logits(judge, prompt + answer, 64)[len(prompt) - 1 : -1]
        gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        worst, differ = max(worst, float(gaps.max())), differ + int((gaps > 0).sum())
    print(f"\n{choice}, {dtype}: {used}; {differ} tokens differ, by at most {worst:.2g}")
    assert worst <= NEAR_TIE[dtype]
