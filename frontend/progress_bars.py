"""Progress bars of `LLM`: tqdm, or whatever the caller gives in its place."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from headrace.frontend.outputs import RequestOutput

ProgressBar = bool | Callable[..., Any]  # True: tqdm; False: no bar object is made
T = TypeVar("T")


def adding(items: Sequence[T], use_tqdm: ProgressBar) -> Iterable[T]:
    """`items`, with a bar around them if one is wanted."""
    if not use_tqdm:
        return items
    return cast(Iterable[T], _factory(use_tqdm)(items, desc="Adding requests"))


class ProcessedBar:
    """Progress over `total` sequences, with estimated tokens/s; nothing without a bar."""

    def __init__(self, total: int, use_tqdm: ProgressBar) -> None:
        self._total = total
        self._num_input = 0
        self._num_output = 0
        self._bar: Any = None
        if use_tqdm:
            self._bar = _factory(use_tqdm)(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speeds(0.0, 0.0)
            )

    def advance(self, output: RequestOutput) -> None:
        """Count a finished output."""
        if self._bar is None:
            return
        n = len(output.outputs)
        self._num_input += len(output.prompt_token_ids or []) * n
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(1e-9, self._bar.format_dict["elapsed"])
        self._bar.postfix = _speeds(self._num_input / elapsed, self._num_output / elapsed)
        self._bar.update(n)
        if self._bar.n >= self._total:
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def token_steps(num_steps: int, use_tqdm: bool) -> Iterable[int]:
    """The steps of a search that may end before the last of them."""
    if not use_tqdm:
        return range(num_steps)
    return cast(Iterable[int], _factory(True)(range(num_steps), desc="Beam search", unit="token"))


def _speeds(num_input: float, num_output: float) -> str:
    return f"est. speed input: {num_input:.2f} toks/s, output: {num_output:.2f} toks/s"


def _factory(use_tqdm: ProgressBar) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    return cast(Callable[..., Any], tqdm)
