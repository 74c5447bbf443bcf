"""GGUF files of tiny Llamas whose matrices are random blocks of any type."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from headrace.configs.model_files.gguf import BLOCK_SIZES

SIZES = {
    "vocab_size": 160,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
# Byte offsets of the fp16 scale and minimum of a block, and the values that lead to weights with a
# standard deviation of about 1.
_SCALES: Mapping[str, tuple[tuple[int, float], ...]] = {
    "Q8_0": ((0, 1 / 74),),
    "Q4_0": ((0, 1 / 4.6),),
    "Q4_1": ((0, 1 / 4.6), (2, -7.5 / 4.6)),
    "Q5_0": ((0, 1 / 9.2),),
    "Q5_1": ((0, 1 / 9.2), (2, -15.5 / 9.2)),
    "Q4_K": ((0, 1 / 250), (2, 7.5 / 250)),
    "Q5_K": ((0, 1 / 500), (2, 15.5 / 500)),
    "Q6_K": ((208, 1 / 1350),),
}
BLOCK_TYPES = tuple(_SCALES)


def random_rows(type_name: str, num_rows: int, num_inputs: int, std: float, rng: Any) -> np.ndarray:
    """Rows of a matrix in a type of GGUF: numbers, or uint8 [num_rows, bytes of a row]."""
    if type_name not in _SCALES:
        dtype = {"F32": np.float32, "F16": np.float16}[type_name]
        return rng.normal(0, std, (num_rows, num_inputs)).astype(dtype)
    size, num_bytes = BLOCK_SIZES[type_name]
    raw = rng.integers(0, 256, (num_rows, num_inputs // size, num_bytes), np.uint8)
    for offset, value in _SCALES[type_name]:
        scales = (std * value * rng.uniform(0.7, 1.3, raw.shape[:2])).astype(np.float16)
        raw[:, :, offset : offset + 2] = scales[:, :, None].view(np.uint8)
    return raw.reshape(num_rows, -1)


def write_llama(
    path: Path,
    layer_types: list[dict[str, str]],
    embedding: str = "Q8_0",
    head: str | None = None,
    sizes: Mapping[str, int] = SIZES,
    std: float = 0.08,
) -> Path:
    """A Llama with random weights, the same at every call.

    `layer_types`: per layer the type of each matrix by its GGUF name without "blk.N." and
    ".weight"; "": of all others. `head` None: tied to the embedding.
    """
    rng = np.random.default_rng(2)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": sizes["max_position_embeddings"],
        "embedding_length": sizes["hidden_size"],
        "block_count": len(layer_types),
        "feed_forward_length": sizes["intermediate_size"],
        "attention.head_count": sizes["num_attention_heads"],
        "attention.head_count_kv": sizes["num_key_value_heads"],
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 1)

    def add_matrix(name: str, type_name: str, num_rows: int, num_inputs: int) -> None:
        rows = random_rows(type_name, num_rows, num_inputs, std, rng)
        is_block = type_name in _SCALES
        raw_dtype = gguf.GGMLQuantizationType[type_name] if is_block else None
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=raw_dtype)

    def add_norm(name: str) -> None:
        norm = rng.normal(1, 0.1, sizes["hidden_size"]).astype(np.float32)
        writer.add_tensor(f"{name}.weight", norm)

    hidden, inner, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    shapes = {
        "attn_q": (heads * head_dim, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    add_matrix("token_embd", embedding, sizes["vocab_size"], hidden)
    if head is not None:
        add_matrix("output", head, sizes["vocab_size"], hidden)
    add_norm("output_norm")
    for index, types in enumerate(layer_types):
        add_norm(f"blk.{index}.attn_norm")
        add_norm(f"blk.{index}.ffn_norm")
        for name, shape in shapes.items():
            add_matrix(f"blk.{index}.{name}", types.get(name, types[""]), *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
