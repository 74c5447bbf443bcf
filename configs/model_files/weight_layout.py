"""Which weights a model has, with their names and layouts in transformers and in GGUF."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Transform = Literal["none", "unpermute", "minus_one"]


@dataclass(frozen=True)
class WeightSpec:
    """One weight. `shape` is that of transformers; GGUF stores the same shape.

    `transform` leads from the GGUF values to those of transformers:

    * "unpermute": GGUF files of the `llama` architecture store the rows of each query and key head
      so that the two values of a rotary pair are neighbours; transformers wants the first halves of
      all pairs, then the second halves.
    * "minus_one": Gemma's norms scale by 1 + w; GGUF stores 1 + w, transformers w.
    """

    name: str
    gguf_name: str
    shape: tuple[int, ...]
    transform: Transform = "none"
    num_heads: int = 0  # of the rows, for "unpermute"


def weight_layout(hf_config: Mapping[str, Any]) -> dict[str, WeightSpec]:
    """Every weight of the model, by its name in transformers.

    `hf_config` is normalized (`normalize_hf_config`). A tied head has no weight of its own.
    """
    return {spec.name: spec for spec in _all_weights(hf_config)}


def _all_weights(config: Mapping[str, Any]) -> Iterator[WeightSpec]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    norm: Transform = "minus_one" if _is_gemma(config) else "none"
    yield WeightSpec("model.embed_tokens.weight", "token_embd.weight", (vocab, hidden))
    yield WeightSpec("model.norm.weight", "output_norm.weight", (hidden,), norm)
    if not config["tie_word_embeddings"]:
        yield WeightSpec("lm_head.weight", "output.weight", (vocab, hidden))
    for layer in range(config["num_hidden_layers"]):
        yield from _attention(config, f"model.layers.{layer}.self_attn", f"blk.{layer}.attn", norm)
        yield from _mlp(config, f"model.layers.{layer}.mlp", f"blk.{layer}.ffn")
        for name, gguf_name in _layer_norms(config).items():
            yield WeightSpec(
                f"model.layers.{layer}.{name}.weight",
                f"blk.{layer}.{gguf_name}.weight",
                (hidden,),
                norm,
            )


def _attention(
    config: Mapping[str, Any], name: str, gguf_name: str, norm: Transform
) -> Iterator[WeightSpec]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    architecture = config["architectures"][0]
    is_permuted = architecture in ("LlamaForCausalLM", "MistralForCausalLM")
    rotary: Transform = "unpermute" if is_permuted else "none"
    for part, num_heads in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        transform = "none" if part == "v" else rotary
        rows = num_heads * head_dim
        own, other = f"{name}.{part}_proj", f"{gguf_name}_{part}"
        yield WeightSpec(f"{own}.weight", f"{other}.weight", (rows, hidden), transform, num_heads)
        if config["attention_bias"]:
            yield WeightSpec(f"{own}.bias", f"{other}.bias", (rows,), transform, num_heads)
    own, other = f"{name}.o_proj", f"{gguf_name}_output"
    yield WeightSpec(f"{own}.weight", f"{other}.weight", (hidden, heads * head_dim))
    if config["attention_bias"] and architecture != "Qwen2ForCausalLM":
        yield WeightSpec(f"{own}.bias", f"{other}.bias", (hidden,))
    if architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"):
        for part in ("q", "k"):
            yield WeightSpec(
                f"{name}.{part}_norm.weight", f"{gguf_name}_{part}_norm.weight", (head_dim,), norm
            )


def _mlp(config: Mapping[str, Any], name: str, gguf_name: str) -> Iterator[WeightSpec]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for part, shape in (
        ("gate", (inner, hidden)),
        ("up", (inner, hidden)),
        ("down", (hidden, inner)),
    ):
        yield WeightSpec(f"{name}.{part}_proj.weight", f"{gguf_name}_{part}.weight", shape)
        if config.get("mlp_bias"):
            yield WeightSpec(f"{name}.{part}_proj.bias", f"{gguf_name}_{part}.bias", shape[:1])


def _layer_norms(config: Mapping[str, Any]) -> dict[str, str]:
    if _is_gemma(config):
        return {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    return {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def _is_gemma(config: Mapping[str, Any]) -> bool:
    return bool(config["architectures"][0] == "Gemma3ForCausalLM")
