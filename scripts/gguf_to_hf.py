"""Write the transformers directory of a GGUF file: the reference for tests and benchmarks.

    python scripts/gguf_to_hf.py FILE.gguf OUT_DIR [--dtype float32]

Reads and dequantizes with the `gguf` package; the config is made by the classes of transformers.
On purpose it uses nothing of headrace, since headrace is compared with what it writes. The
directory appears at once when it is complete, and is not written again for the same file.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tqdm import tqdm

SOURCE_FILE = "source.json"  # in the output: what it was made from
FORMAT = 1  # raise it when the output changes

# `general.architecture` -> config class and model class of transformers.
CONFIGS: dict[str, tuple[type[transformers.PretrainedConfig], str]] = {
    "llama": (transformers.LlamaConfig, "LlamaForCausalLM"),
    "qwen2": (transformers.Qwen2Config, "Qwen2ForCausalLM"),
    "qwen3": (transformers.Qwen3Config, "Qwen3ForCausalLM"),
    "gemma3": (transformers.Gemma3TextConfig, "Gemma3ForCausalLM"),
}

# GGUF tensor name -> transformers name; `blk.N.` becomes `model.layers.N.` first.
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def convert(
    gguf_path: str | Path, out_dir: str | Path, dtype: str = "float32", *, progress: bool = False
) -> Path:
    """Write `out_dir` unless it is there already; returns it.

    Raises ValueError for an architecture or tensor it does not know, and FileExistsError if
    `out_dir` exists but was not written by this script.
    """
    source, target = Path(gguf_path), Path(out_dir)
    stat = source.stat()
    wanted = {
        "format": FORMAT,
        "file": source.name,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "dtype": dtype,
    }
    if _is_made_from(target, wanted):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write(source, work / "new", getattr(torch, dtype), progress)
        (work / "new" / SOURCE_FILE).write_text(json.dumps(wanted, indent=2) + "\n")
        if target.exists():
            target.rename(work / "old")
        try:
            (work / "new").rename(target)
        except OSError:
            if not _is_made_from(target, wanted):  # else: another process was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _is_made_from(target: Path, wanted: Mapping[str, Any]) -> bool:
    if not target.exists():
        return False
    if not (target / SOURCE_FILE).is_file():
        raise FileExistsError(f"{target} exists and was not written by this script; remove it")
    return bool(json.loads((target / SOURCE_FILE).read_text()) == dict(wanted))


def _write(source: Path, directory: Path, dtype: torch.dtype, progress: bool) -> None:
    reader = gguf.GGUFReader(source)
    config = make_config(reader)
    weights = {}
    for tensor in tqdm(reader.tensors, desc="dequantize", disable=not progress, file=sys.stderr):
        name = hf_name(tensor.name, config)
        if name is not None:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            array = hf_values(np.asarray(values, dtype=np.float32), name, config)
            weights[name] = torch.tensor(array).to(dtype).contiguous()
    config.dtype = dtype
    config.save_pretrained(directory)
    transformers.GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def hf_name(name: str, config: transformers.PretrainedConfig) -> str | None:
    """The transformers name of a GGUF tensor; None for rotary factors, which are in the config."""
    if name == "rope_freqs.weight":
        return None
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    names = GEMMA_LAYER_NAMES if config.model_type == "gemma3_text" else LAYER_NAMES
    block, layer, module, kind = name.split(".")
    if block != "blk" or module not in names:
        raise ValueError(f"unknown tensor {name}")
    return f"model.layers.{layer}.{names[module]}.{kind}"


def hf_values(array: np.ndarray, name: str, config: transformers.PretrainedConfig) -> np.ndarray:
    """Undo what conversion to GGUF did to the values."""
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return array - np.float32(1.0)
    if config.model_type in ("llama", "mistral") and ".q_proj." in name:
        return _unpermute(array, config.num_attention_heads)
    if config.model_type in ("llama", "mistral") and ".k_proj." in name:
        return _unpermute(array, config.num_key_value_heads)
    return array


def _unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head: first and second halves of rotary pairs alternate; part them."""
    rows_per_head = array.shape[0] // num_heads
    order = np.concatenate([np.arange(0, rows_per_head, 2), np.arange(1, rows_per_head, 2)])
    rows = (np.arange(num_heads)[:, None] * rows_per_head + order[None, :]).reshape(-1)
    return array[rows]


def make_config(reader: gguf.GGUFReader) -> transformers.PretrainedConfig:
    """The transformers config of the model in the file."""
    architecture = reader.fields["general.architecture"].contents()
    if architecture not in CONFIGS:
        raise ValueError(f"unknown architecture {architecture}; known: {', '.join(CONFIGS)}")
    config_class, class_name = CONFIGS[architecture]

    def key(name: str, default: Any = None) -> Any:
        field = reader.fields.get(name.replace("*", architecture))
        return default if field is None else field.contents()

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, hidden = key("*.attention.head_count"), key("*.embedding_length")
    fields: dict[str, Any] = {
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": key("*.feed_forward_length"),
        "num_hidden_layers": key("*.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("*.attention.head_count_kv", heads),
        "head_dim": key("*.attention.key_length", hidden // heads),
        "max_position_embeddings": key("*.context_length"),
        "rms_norm_eps": key("*.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _make_rope(key, tensors),
        "bos_token_id": key("tokenizer.ggml.bos_token_id"),
        "eos_token_id": key("tokenizer.ggml.eos_token_id"),
        "pad_token_id": key("tokenizer.ggml.padding_token_id"),
    }
    window = key("*.attention.sliding_window")
    if architecture == "llama" and window is not None:
        fields["sliding_window"] = window
        config_class, class_name = transformers.MistralConfig, "MistralForCausalLM"
    if architecture == "gemma3":
        fields["sliding_window"] = window
        fields["query_pre_attn_scalar"] = fields["head_dim"]
        fields["rope_parameters"] = {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": key("*.rope.freq_base_swa", 10000.0),
            },
        }
    elif "blk.0.attn_q.bias" in tensors and architecture != "qwen2":
        fields["attention_bias"] = True
    config = config_class(**fields)
    config.architectures = [class_name]
    return config


def _make_rope(key: Callable[..., Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": key("*.rope.freq_base", 10000.0),
    }
    if key("*.rope.scaling.type", "none") != "none":
        rope |= {"rope_type": key("*.rope.scaling.type"), "factor": key("*.rope.scaling.factor")}
    if "rope_freqs.weight" in tensors:
        rope |= {
            "rope_type": "llama3",
            "factor": float(tensors["rope_freqs.weight"].data.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    return rope


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf", type=Path, metavar="FILE.gguf")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    try:
        out_dir = convert(args.gguf, args.out_dir, args.dtype, progress=True)
    except (OSError, ValueError) as error:
        print(f"gguf_to_hf: {error}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in os.scandir(out_dir))
    print(f"{out_dir}: {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
