"""Config and weights of GGUF files, against tiny transformers models written by `gguf`."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.gguf import GGUFFile
from headrace.configs.model_files.gguf_config import hf_config_from_gguf
from headrace.configs.model_files.hf_config import normalize_hf_config
from headrace.configs.model_files.model_info import read_model_info
from headrace.configs.model_files.weight_layout import weight_layout
from headrace.workers.weight_loader import iter_weights

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 50_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

# name -> (general.architecture, transformers config)
MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("llama", lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(ROPE))),
    "llama-tied": (
        "llama",
        lambda: transformers.LlamaConfig(
            **SIZES, rope_parameters=dict(ROPE), tie_word_embeddings=True
        ),
    ),
    "llama-biased": (
        "llama",
        lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(ROPE), attention_bias=True),
    ),
    "llama-3": ("llama", lambda: transformers.LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3))),
    "mistral": (
        "llama",
        lambda: transformers.MistralConfig(**SIZES, rope_parameters=dict(ROPE), sliding_window=32),
    ),
    "qwen2": ("qwen2", lambda: transformers.Qwen2Config(**SIZES, rope_parameters=dict(ROPE))),
    "qwen3": (
        "qwen3",
        lambda: transformers.Qwen3Config(
            **(SIZES | {"head_dim": 32}), rope_parameters=dict(ROPE), tie_word_embeddings=True
        ),
    ),
    "gemma3": (
        "gemma3",
        lambda: transformers.Gemma3TextConfig(
            **(SIZES | {"num_hidden_layers": 7}),
            rope_parameters={kind: dict(rope) for kind, rope in GEMMA_ROPE.items()},
            query_pre_attn_scalar=16,
            sliding_window=32,
        ),
    ),
}
GGML_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}


class TinyModel:
    """A random transformers model and what a converter would write into a GGUF file for it.

    Tests change `keys` and `tensors` before `write`.
    """

    def __init__(self, name: str) -> None:
        self.architecture, make_config = MODELS[name]
        self.config = make_config()
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(self.config)
        self.config.architectures = [type(model).__name__]
        self.state = {
            key: torch.randint(-256, 256, value.shape) / 256  # exact also after adding 1
            for key, value in model.state_dict().items()
            if not (key == "lm_head.weight" and self.config.tie_word_embeddings)
        }
        self.keys = self._keys()
        self.tensors = {self._gguf_name(key): self._gguf_values(key) for key in self.state}
        if self.config.rope_parameters.get("rope_type") == "llama3":
            self.tensors["rope_freqs.weight"] = llama3_factors(self.config.head_dim)

    def _keys(self) -> dict[str, Any]:
        config, arch = self.config, self.architecture
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        keys: dict[str, Any] = {
            f"{arch}.context_length": config.max_position_embeddings,
            f"{arch}.embedding_length": config.hidden_size,
            f"{arch}.block_count": config.num_hidden_layers,
            f"{arch}.feed_forward_length": config.intermediate_size,
            f"{arch}.attention.head_count": config.num_attention_heads,
            f"{arch}.attention.head_count_kv": config.num_key_value_heads,
            f"{arch}.attention.key_length": config.head_dim,
            f"{arch}.attention.value_length": config.head_dim,
            f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{arch}.rope.freq_base": rope["rope_theta"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 0,
        }
        if rope["rope_type"] == "linear":
            keys |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": 8.0}
        if self.config.model_type in ("mistral", "gemma3_text"):
            keys[f"{arch}.attention.sliding_window"] = config.sliding_window
        return keys

    def _gguf_name(self, name: str) -> str:
        names = gguf.get_tensor_name_map(
            GGML_ARCHITECTURES[self.architecture], self.config.num_hidden_layers
        )
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return str(found)

    def _gguf_values(self, name: str) -> np.ndarray:
        values = self.state[name].numpy()
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            return values + np.float32(1)
        for part, heads in (
            (".q_proj.", self.config.num_attention_heads),
            (".k_proj.", self.config.num_key_value_heads),
        ):
            if self.architecture == "llama" and part in name:
                halves = values.reshape(heads, 2, -1, *values.shape[1:])
                return halves.swapaxes(1, 2).reshape(values.shape)
        return values

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.keys.items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            else:
                writer.add_uint32(key, value)
        for name, array in self.tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(array))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def llama3_factors(head_dim: int) -> np.ndarray:
    """What converters write for Llama 3.1: the divisor of each rotary frequency."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * LLAMA3["rope_theta"] ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(factors, dtype=np.float32)


def read_config(path: Path) -> dict[str, Any]:
    with GGUFFile.open(path) as file:
        return hf_config_from_gguf(file)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: (ours[key], theirs.get(key)) for key in ours if ours[key] != theirs.get(key)}


@pytest.mark.parametrize("name", MODELS)
def test_config_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = TinyModel(name)
    config = read_config(model.write(tmp_path / "model.gguf"))
    expected = model.config.to_dict()
    ignored = {"mlp_bias", "attention_bias", "sliding_window", "max_window_layers"}
    ignored |= {"use_sliding_window"} if name.startswith("qwen") else set()
    found = {key: value for key, value in config.items() if key not in ignored}
    assert differences(found, expected) == {}
    assert config["sliding_window"] == getattr(model.config, "sliding_window", None)
    assert normalize_hf_config(expected, "x")["attention_bias"] == config["attention_bias"]
    assert normalize_hf_config(config, "x") == config


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = TinyModel(name)
    path = model.write(tmp_path / "model.gguf")
    weights = dict(iter_weights(path, read_config(path), torch.float32))
    assert set(weights) == set(model.state)
    for key, value in weights.items():
        assert value.is_contiguous()
        assert torch.equal(value, model.state[key]), key
    halves = dict(iter_weights(path, read_config(path), torch.bfloat16))
    for key, value in halves.items():
        assert torch.equal(value, model.state[key].bfloat16()), key


def change_keys(**changes: Any) -> Callable[[TinyModel], None]:
    def change(model: TinyModel) -> None:
        for key, value in changes.items():
            name = key.replace("__", ".")
            if value is None:
                del model.keys[name]
            else:
                model.keys[name] = value

    return change


def drop_tensor(model: TinyModel) -> None:
    del model.tensors["blk.1.ffn_up.weight"]


def add_tensor(model: TinyModel) -> None:
    model.tensors["blk.0.ffn_gate_exps.weight"] = np.zeros((4, 64), np.float32)


def reshape_tensor(model: TinyModel) -> None:
    model.tensors["blk.0.attn_q.weight"] = np.zeros((32, 64), np.float32)


def double_precision(model: TinyModel) -> None:
    model.tensors["blk.0.attn_q.weight"] = np.zeros((64, 64), np.float64)


def no_embedding(model: TinyModel) -> None:
    del model.tensors["token_embd.weight"]


def later_part(model: TinyModel) -> None:
    model.keys = {"split.count": 3, "split.no": 1}


def unknown_architecture(model: TinyModel) -> None:
    model.architecture = "mamba2"


def odd_rotary_factors(model: TinyModel) -> None:
    model.tensors["rope_freqs.weight"] = np.full(8, 3.0, np.float32)


def misshapen_rotary_factors(model: TinyModel) -> None:
    model.tensors["rope_freqs.weight"] = np.full(7, 3.0, np.float32)


BROKEN: dict[str, tuple[Callable[[TinyModel], None], str]] = {
    "architecture": (
        unknown_architecture,
        "not supported: arch mamba2; supported: llama, qwen2, qwen3, gemma3",
    ),
    "experts": (change_keys(llama__expert_count=8), "mixture of 8 experts"),
    "split": (change_keys(split__count=3), "split GGUF file"),
    "split-later-part": (later_part, "split GGUF file"),
    "no-key": (change_keys(llama__block_count=None), "key llama.block_count is missing"),
    "text-key": (change_keys(llama__block_count="2"), "llama.block_count is '2'"),
    "array-key": (change_keys(llama__feed_forward_length=[96, 64]), "is an array"),
    "zero-heads": (change_keys(llama__attention__head_count=0), "num_attention_heads is 0"),
    "many-layers": (change_keys(llama__block_count=100_000), "num_hidden_layers is 100000"),
    "heads": (change_keys(llama__attention__head_count_kv=3), "not a multiple"),
    "partial-rotary": (change_keys(llama__rope__dimension_count=8), "rope.dimension_count 8"),
    "theta": (change_keys(llama__rope__freq_base=math.inf), "rope_theta is inf"),
    "rope": (change_keys(llama__rope__scaling__type="longrope"), "longrope is not supported"),
    "missing": (drop_tensor, "the first is blk.1.ffn_up.weight"),
    "unknown": (add_tensor, "the first is blk.0.ffn_gate_exps.weight"),
    "shape": (reshape_tensor, r"blk.0.attn_q.weight has shape \[32, 64\]"),
    "type": (double_precision, "tensor type F64 .* supported: F32"),
    "no-embedding": (no_embedding, "no tensor token_embd.weight"),
    "rope-factors": (odd_rotary_factors, "are not Llama 3.1's"),
    "rope-factors-shape": (misshapen_rotary_factors, r"must be F32 \[8\]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_supported_is_refused(name: str, tmp_path: Path) -> None:
    change, words = BROKEN[name]
    model = TinyModel("llama")
    change(model)
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(ModelFileError, match=words) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    return TinyModel("llama-3").write(path).read_bytes()


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_random_damage_only_gives_model_file_errors(
    whole_file: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(whole_file)
    header_bytes = content.index(b"token_embd") + 2000
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_bytes))
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "case.gguf"
    path.unlink(missing_ok=True)  # the old one may still be mapped
    path.write_bytes(content)
    try:
        info = read_model_info(path)
        weights = dict(iter_weights(path, info.hf_config, torch.bfloat16))
        shapes = {name: spec.shape for name, spec in weight_layout(info.hf_config).items()}
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == shapes
    except ModelFileError as error:
        assert "case.gguf" in str(error)


def test_one_number_per_layer_is_taken_if_all_are_equal(tmp_path: Path) -> None:
    model = TinyModel("llama")
    model.keys["llama.feed_forward_length"] = [96, 96]
    assert read_config(model.write(tmp_path / "model.gguf"))["intermediate_size"] == 96


def test_yarn_keeps_its_original_length(tmp_path: Path) -> None:
    model = TinyModel("qwen2")
    model.keys |= {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 128,
    }
    rope = read_config(model.write(tmp_path / "model.gguf"))["rope_parameters"]
    assert rope == ROPE | {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
