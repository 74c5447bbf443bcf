"""A tiny model, an LLM in a process of its own, and transformers beside it as the truth."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM
from tests.e2e.tiny_model import ENGINE_ARGUMENTS, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("compat"))


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = LLM(str(tiny_model), **ENGINE_ARGUMENTS)
    yield llm
    llm.close()


@pytest.fixture(scope="session")
def logits_of(tiny_model: Path) -> Callable[[Sequence[int]], torch.Tensor]:
    """Logits of transformers behind each token, [num_tokens, vocabulary] float64."""
    import transformers

    model: Any = transformers.LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.eval()

    def logits(token_ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
        return result.double()

    return logits
