"""Write a model of random weights, as a transformers directory: for measuring speed at a size.

The shape is that of a known model; weights are bfloat16, tied, and the same in every run; the
tokenizer is that of another model, so text is noise. Peers can load it, too, and llama.cpp's
converter can make a GGUF file of it.

usage: python scripts/bench/random_model.py DIRECTORY [--shape llama-3.2-1b]
           [--tokenizer smollm2-135m]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.configs.model_files.resolve import resolve_model
from headrace.workers.random_weights import random_weights

COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 8192,
}  # fmt: skip
# Llama 3.2 has long-context scaling of its rotary embedding, which costs nothing and is left out.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    # SmolLM2 has nine heads, which two shards cannot divide.
    "smollm2-135m-8-heads": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "tiny": {
        "vocab_size": 49152, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


def write_model(directory: Path, shape: str) -> None:
    """Config and weights, of which as many as there are must fit in memory."""
    directory.mkdir(parents=True)
    config = COMMON | SHAPES[shape]
    weights = dict(random_weights(directory, config, torch.bfloat16))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_tokenizer(directory: Path, model: str) -> None:
    """As transformers saves it; `model` is a directory or a GGUF file."""
    import transformers

    path = Path(resolve_model(model))
    source, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="must not be there yet")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--tokenizer", default="smollm2-135m", metavar="MODEL")
    args = parser.parse_args()
    if args.directory.exists():
        parser.error(f"{args.directory} is there already")
    write_model(args.directory, args.shape)
    write_tokenizer(args.directory, args.tokenizer)
    size = sum(file.stat().st_size for file in args.directory.iterdir())
    print(f"{args.directory}: {size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
