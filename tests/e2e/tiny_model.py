"""A tiny random model with a tokenizer of bytes: for tests of the public engines as a whole."""

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 272
BOS, EOS = 256, 257
MAX_MODEL_LEN = 128
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<eos>{% endfor %}"
    "{% if tools %}<tools {{ tools | length }}>{% endif %}"
    "{% if style %}<style {{ style }}>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(directory: Path) -> Path:
    """Two Llama layers; ids 0 to 255 are the bytes in the tokenizer's order, 256 BOS, 257 EOS."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=EOS, initializer_range=0.5,
        num_hidden_layers=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    save_byte_tokenizer(directory)
    return directory


def save_byte_tokenizer(directory: Path) -> None:
    """Every byte is a token; a BOS is added, `TEMPLATE` is the chat template."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<eos>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "bos_token": "<s>", "eos_token": "<eos>", "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


ENGINE_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 8,
    "max_num_batched_tokens": 128, "seed": 0,
}  # fmt: skip
