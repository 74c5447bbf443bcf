"""In which format each matrix of a model is kept."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.configs.config import QuantizationMethod
from headrace.configs.quantization import INT8
from headrace.kernels.native import BLOCK_FORMATS, Format


@dataclass(frozen=True)
class WeightFormats:
    """What a method of quantization asks for.

    `stored_types`: of the matrices in a GGUF file, by their names in transformers; empty for other
    files.
    """

    method: QuantizationMethod = "none"
    stored_types: Mapping[str, str] = field(default_factory=dict)

    def wanted(self, name: str) -> Format | None:
        """The format of matrix `name`; None: that of the model's dtype."""
        if self.method == INT8:
            return Format.INT8
        if self.method == "gguf":
            return BLOCK_FORMATS.get(self.stored_types[name])
        return None


UNQUANTIZED = WeightFormats()


@dataclass(frozen=True)
class MatrixFormats:
    """What was made of it, for the log.

    `counts`: matrices of the checkpoint by the name of the format that they are kept in.
    `unsupported`: those of them that the kernels cannot compute as they are stored.
    """

    method: QuantizationMethod
    counts: Counter[str]
    unsupported: tuple[str, ...] = ()

    def describe(self, num_bytes: int) -> str:
        """One line; `num_bytes`: of all weights."""
        parts = ", ".join(f"{name} {count}" for name, count in self.counts.most_common())
        return f"weights: {num_bytes / 2**20:.1f} MiB, {self.method} ({parts})"
