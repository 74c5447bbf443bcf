"""What is read from model directories, against transformers where it has an opinion."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.configs.errors import ModelFileError
from headrace.configs.model_files.hf_config import SUPPORTED_ARCHITECTURES, normalize_hf_config
from headrace.configs.model_files.model_info import read_model_info
from headrace.configs.model_files.weight_layout import weight_layout

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", LLAMA)
    return tmp_path


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(json.dumps(content))


def raw_config(architecture: str, **fields: Any) -> dict[str, Any]:
    model_type = {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "Qwen2ForCausalLM": "qwen2",
        "Qwen3ForCausalLM": "qwen3",
        "Gemma3ForCausalLM": "gemma3_text",
    }[architecture]
    return {"architectures": [architecture], "model_type": model_type} | fields


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
NEW_LLAMA_ROPE = {"rope_type": "default", "rope_theta": 2e4}
NEW_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
CONFIGS = [
    *[raw_config(architecture) for architecture in SUPPORTED_ARCHITECTURES],
    raw_config("LlamaForCausalLM", rope_theta=5e5, num_key_value_heads=8, mlp_bias=True),
    raw_config("LlamaForCausalLM", rope_theta=5e5, rope_scaling=LLAMA3_SCALING),
    raw_config("LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 2.0}),
    raw_config("LlamaForCausalLM", rope_parameters=NEW_LLAMA_ROPE),
    raw_config("LlamaForCausalLM", rope_parameters={"rope_theta": 7e4}),
    raw_config("MistralForCausalLM", sliding_window=None, head_dim=128, rope_theta=1e6),
    raw_config("Qwen2ForCausalLM", rope_theta=1e6, rope_scaling=YARN),
    raw_config("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=64),
    raw_config(
        "Qwen2ForCausalLM",
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=2,
        num_hidden_layers=4,
    ),
    raw_config("Qwen3ForCausalLM", attention_bias=True, tie_word_embeddings=True, rope_theta=1e6),
    raw_config("Gemma3ForCausalLM", rope_theta=1e6, rope_local_base_freq=1e4),
    raw_config(
        "Gemma3ForCausalLM", rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
    raw_config("Gemma3ForCausalLM", rope_parameters=NEW_GEMMA_ROPE),
    raw_config("Gemma3ForCausalLM", sliding_window_pattern=3, num_hidden_layers=7),
    raw_config(
        "Gemma3ForCausalLM",
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
    ),
]


@pytest.mark.parametrize("raw", CONFIGS, ids=lambda raw: raw["model_type"])
def test_normalized_configs_are_those_of_transformers(raw: dict[str, Any]) -> None:
    config = normalize_hf_config(raw, "x")
    expected = transformers.AutoConfig.for_model(
        **{key: json.loads(json.dumps(value)) for key, value in raw.items()}
    ).to_dict()
    expected.setdefault("head_dim", expected["hidden_size"] // expected["num_attention_heads"])
    expected["rope_parameters"].pop("type", None)  # kept beside rope_type
    expected.pop("sliding_window_pattern", None)  # kept beside layer_types
    # Not fields of every class; whether they are on follows from the architecture.
    skipped = {"attention_bias", "mlp_bias", "max_window_layers", "use_sliding_window"}
    if raw["architectures"] == ["LlamaForCausalLM"]:
        skipped.add("sliding_window")
    for key in config.keys() - skipped:
        if key == "sliding_window" and "sliding_attention" not in expected.get(
            "layer_types", ["sliding_attention"]
        ):
            assert config[key] is None  # a window that no layer has
        else:
            assert config[key] == expected[key], key
    assert config["attention_bias"] == (
        raw["model_type"] == "qwen2" or expected.get("attention_bias", False)
    )
    assert normalize_hf_config(config, "x") == config
    assert normalize_hf_config(expected, "x") == expected | config


def test_saved_by_transformers(tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=7, sliding_window=16
    )
    config.architectures = ["Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path)
    info = read_model_info(tmp_path)
    assert info.architecture == "Gemma3ForCausalLM"
    assert info.vocab_size == 100
    assert info.hf_config["layer_types"] == config.layer_types
    assert info.hf_config["rope_parameters"] == config.rope_parameters


def test_a_plain_directory(model_dir: Path) -> None:
    info = read_model_info(model_dir)
    assert info.architecture == "LlamaForCausalLM"
    assert info.max_model_len == 4096
    assert info.vocab_size == 1000
    assert (info.eos_token_id, info.extra_eos_token_ids) == (2, ())
    assert info.default_sampling_params == {}


def test_weights_are_those_of_transformers(model_dir: Path) -> None:
    config = transformers.LlamaConfig.from_pretrained(model_dir)
    model = transformers.AutoModelForCausalLM.from_config(config)
    layout = weight_layout(read_model_info(model_dir).hf_config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: spec.shape for name, spec in layout.items()} == shapes


def test_eos_is_the_union_of_three_files(model_dir: Path) -> None:
    write(model_dir, "config.json", LLAMA | {"eos_token_id": [7, 8]})
    write(model_dir, "generation_config.json", {"eos_token_id": [9, 7, 5000, -1]})
    assert (read_model_info(model_dir).eos_token_id) == 9
    decoder = {"3": {"content": "<|end|>"}, "4": {"content": "<|other|>"}}
    tokenizer = {"eos_token": "<|end|>", "added_tokens_decoder": decoder}
    write(model_dir, "tokenizer_config.json", tokenizer)
    info = read_model_info(model_dir)
    assert (info.eos_token_id, info.extra_eos_token_ids) == (3, (7, 8, 9))


def test_eos_text_is_looked_up_in_the_tokenizer(model_dir: Path) -> None:
    write(model_dir, "tokenizer_config.json", {"eos_token": {"content": "</s>"}})
    assert read_model_info(model_dir).eos_token_id == 2
    added = [{"id": 5, "content": "<s>"}, {"id": 6, "content": "</s>", "special": True}]
    write(model_dir, "tokenizer.json", {"added_tokens": added, "model": {"vocab": {"a": 0}}})
    info = read_model_info(model_dir)
    assert (info.eos_token_id, info.extra_eos_token_ids) == (6, (2,))
    (model_dir / "tokenizer.json").write_text('{"added_tokens": [')
    with pytest.raises(ModelFileError, match=r"not a valid tokenizer\.json"):
        read_model_info(model_dir)


def test_sampling_defaults(model_dir: Path) -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "repetition_penalty": 1.1,
        "max_new_tokens": 512,
        "do_sample": True,
    }
    write(model_dir, "generation_config.json", generation)
    assert read_model_info(model_dir).default_sampling_params == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "max_tokens": 512,
    }


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 16384),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": LLAMA3_SCALING}, 4096),
    ],
)
def test_longest_context(model_dir: Path, fields: dict[str, Any], length: int) -> None:
    write(model_dir, "config.json", LLAMA | fields)
    assert read_model_info(model_dir).max_model_len == length


def test_the_tokenizer_may_shorten_the_context(model_dir: Path) -> None:
    write(model_dir, "tokenizer_config.json", {"model_max_length": 2048})
    assert read_model_info(model_dir).max_model_len == 2048
    write(model_dir, "tokenizer_config.json", {"model_max_length": int(1e30)})
    assert read_model_info(model_dir).max_model_len == 4096


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel; supported: Llama"),
    ({"architectures": ["Gemma3ForConditionalGeneration"]}, "not supported: architecture Gemma3"),
    ({"architectures": None}, "no architectures field"),
    ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
    ({"compression_config": {"quant_method": "x"}}, r"quantization_config \(x\) is not supported"),
    ({"hidden_size": 0}, "hidden_size is 0"),
    ({"hidden_size": "64"}, "hidden_size is '64'"),
    ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
    ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_key_value_heads": 3}, "not a multiple"),
    ({"head_dim": 15}, "head_dim 15 is odd"),
    ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    ({"rope_theta": 0}, "rope_theta is 0"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ({"rope_scaling": {"type": "linear", "factor": None}}, "factor is None"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ({"max_position_embeddings": True}, "max_position_embeddings is True"),
    ({"layer_types": ["chunked", "chunked"]}, "layer_types must name"),
    ({"layer_types": ["full_attention"]}, "each of the 2 layers"),
]


@pytest.mark.parametrize(("fields", "words"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_bad_configs_are_refused(model_dir: Path, fields: dict[str, Any], words: str) -> None:
    write(model_dir, "config.json", LLAMA | fields)
    with pytest.raises(ModelFileError, match=words) as caught:
        read_model_info(model_dir)
    assert str(model_dir) in str(caught.value)


def test_bidirectional_gemma_is_refused(model_dir: Path) -> None:
    write(model_dir, "config.json", raw_config("Gemma3ForCausalLM", use_bidirectional_attention=1))
    with pytest.raises(ModelFileError, match="use_bidirectional_attention is not supported"):
        read_model_info(model_dir)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "the file is missing"),
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"\xff\xfe", "not valid JSON"),
        ("config.json", b"[" * 100_000, "not valid JSON"),
        ("config.json", b"[1]", "holds a JSON list"),
        ("generation_config.json", b"nope", "not valid JSON"),
        ("generation_config.json", b'{"temperature": -1}', "temperature is -1"),
        ("generation_config.json", b'{"temperature": NaN}', "temperature is nan"),
        ("generation_config.json", b'{"top_k": 1.5}', "top_k is 1.5, but must be an integer"),
        ("tokenizer_config.json", b"", "not valid JSON"),
    ],
)
def test_bad_files_are_refused(
    model_dir: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is None:
        (model_dir / name).unlink()
    else:
        (model_dir / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=words) as caught:
        read_model_info(model_dir)
    assert str(model_dir / name) in str(caught.value)


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot read"):
        read_model_info(tmp_path / "absent.gguf")


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from headrace.configs.model_files import model_info; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_real_files(smollm2_gguf: Path, gemma3_gguf: Path) -> None:
    smollm2, gemma3 = read_model_info(smollm2_gguf), read_model_info(gemma3_gguf)
    assert (smollm2.architecture, smollm2.vocab_size) == ("LlamaForCausalLM", 49152)
    assert (smollm2.max_model_len, smollm2.eos_token_id) == (8192, 2)
    assert (gemma3.architecture, gemma3.vocab_size) == ("Gemma3ForCausalLM", 262144)
    assert (gemma3.max_model_len, gemma3.eos_token_id) == (32768, 1)
    assert gemma3.hf_config["sliding_window"] == 512
    assert gemma3.hf_config["layer_types"].count("full_attention") == 3
