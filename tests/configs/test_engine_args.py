"""Engine arguments: every field of the specification, and the frozen configuration they make."""

import argparse
import copy
import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.configs.config import EngineConfig
from headrace.configs.engine_args import AsyncEngineArgs, EngineArgs, UsageContext
from headrace.configs.errors import ConfigurationError, UnsupportedFeatureError
from headrace.configs.hardware import CpuFacts
from headrace.configs.options import default_of, flag_of, option_fields
from headrace.configs.quantization import INT8
from tests.configs.engine_args_table import GROUPS, HOLDS, LATER, LEGACY, NEWER, SHORT_FLAGS

SPECIFIED = {name: value for group in GROUPS.values() for name, value in group.items()}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 10000.0,
    "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def args(model: Path, **given: Any) -> EngineArgs:
    return EngineArgs(model=str(model), **given)


def parse(*arguments: str, cls: type[EngineArgs] = EngineArgs) -> EngineArgs:
    parser = cls.add_cli_args(argparse.ArgumentParser())
    return cls.from_cli_args(parser.parse_args(arguments))


def test_the_table_is_whole() -> None:
    assert len(SPECIFIED) == 123
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    assert sorted(names) == sorted([*SPECIFIED, *NEWER])
    assert names[0] == "model"  # EngineArgs("a model")


@pytest.mark.parametrize("name", [*SPECIFIED, *NEWER])
def test_name_default_flag_and_group(name: str) -> None:
    default = (SPECIFIED | NEWER)[name]
    field = {field.name: field for field in option_fields(EngineArgs)}[name]
    assert default_of(field) == default and type(default_of(field)) is type(default)
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    for flag in (flag_of(name), *SHORT_FLAGS.get(name, [])):
        assert parser._option_string_actions[flag].dest == name
        assert parser._option_string_actions[flag].help
    if isinstance(default, bool) and not field.metadata["switch"]:
        assert parser._option_string_actions[flag_of("no_" + name)].dest == name
    for group, members in GROUPS.items():
        if name in members:
            assert field.metadata["group"] == group


def test_groups_come_in_order() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    titles = [group.title for group in parser._action_groups if group._group_actions]
    assert titles == ["options", *GROUPS]


def test_plain_switches_have_no_opposite() -> None:
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    for name in (
        "disable-async-output-proc", "disable-log-stats", "use-v2-block-manager",
        "disable-log-requests",
    ):  # fmt: skip
        assert f"--no-{name}" not in parser._option_string_actions


def test_defaults_of_cli_and_python_are_the_same() -> None:
    assert parse() == EngineArgs()
    assert parse(cls=AsyncEngineArgs) == AsyncEngineArgs()


def test_mutable_defaults_are_fresh() -> None:
    one, two = EngineArgs(), EngineArgs()
    for field in dataclasses.fields(one):
        value = getattr(one, field.name)
        if isinstance(value, dict | list):
            assert value is not getattr(two, field.name), field.name


def test_every_field_has_one_status() -> None:
    for field in option_fields(EngineArgs):
        status, holds = field.metadata["status"], field.metadata["holds"]
        assert (field.name in LEGACY) == (status == "legacy"), field.name
        both_hold = {default_of(field), *holds} >= {True, False} if holds else False
        assert (field.name in LATER) == (status == "later" and not both_hold), field.name


@pytest.mark.parametrize("name", LEGACY)
def test_legacy_fields_get_one_warning(
    name: str, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = args(model, **{name: LEGACY[name]}).create_engine_config()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert name in caplog.text and "no effect" in caplog.text
    assert config == args(model).create_engine_config()


@pytest.mark.parametrize("name", LATER)
def test_later_fields_are_refused_by_name(name: str) -> None:
    """The model does not exist: the refusal comes first."""
    refused = EngineArgs(model="no-such-model", **{name: LATER[name]})
    for refuse in (refused.check, refused.create_engine_config):
        with pytest.raises(UnsupportedFeatureError, match="not implemented yet") as error:
            refuse()
        assert name in str(error.value) and flag_of(name) in str(error.value)


def test_types_of_the_cache(model: Path) -> None:
    for asked, given in (
        ("bfloat16", "bfloat16"),
        ("int8", "int8"),
        ("int8_per_token_head", "int8"),
    ):
        config = args(model, kv_cache_dtype=asked).create_engine_config()
        assert config.cache_config.kv_cache_dtype == given
    for name in ("fp8_e5m2", "fp8_per_token_head", "int4_per_token_head"):
        with pytest.raises(UnsupportedFeatureError, match=name):
            args(model, kv_cache_dtype=name).create_engine_config()


@pytest.mark.parametrize("name", HOLDS)
def test_what_holds_anyway_is_accepted(name: str, model: Path) -> None:
    config = args(model, **{name: HOLDS[name]}).create_engine_config()
    plain = args(model).create_engine_config()
    assert dataclasses.replace(config, load_config=plain.load_config) == plain


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"max_num_seqs": -1}, "max_num_seqs.*-1"),
        ({"max_num_seqs": "many"}, "max_num_seqs.*int.*many.*str"),
        ({"max_num_seqs": True}, "max_num_seqs.*bool"),
        ({"seed": 1.5}, "seed.*int.*float"),
        ({"trust_remote_code": "yes"}, "trust_remote_code.*bool"),
        ({"dtype": "float8"}, "dtype must be one of.*bfloat16.*float8"),
        ({"task": "dance"}, "task must be one of.*dance"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode.*raw_logprobs.*cooked"),
        ({"max_logprobs": -2}, "max_logprobs.*-1.*-2"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization.*1\.5"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization.*nan"),
        ({"renderer_num_workers": 0}, "renderer_num_workers"),
        ({"max_model_len": 0}, "max_model_len.*0"),
        ({"max_model_len": "long"}, "max_model_len.*long"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False is refused.*budget"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "4 is below max_num_seqs 8"),
        ({"hf_overrides": "x"}, "hf_overrides"),
        ({"profiler_config": {"profiler": "cuda"}}, "profiler_config.*torch_profiler_dir"),
        ({"override_generation_config": []}, "override_generation_config.*dict"),
        ({"served_model_name": ["a", ""]}, "served_model_name.*empty"),
    ],
)  # fmt: skip
def test_values_that_cannot_work(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        EngineArgs(model="no-such-model", **given).create_engine_config()


@pytest.mark.parametrize("value", ["auto", "-1", -1])
def test_automatic_length_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="--max-model-len auto"):
        EngineArgs(max_model_len=value).create_engine_config()
    assert parse("--max-model-len", str(value)).max_model_len == str(value)


def test_secrets_stay_out_of_texts() -> None:
    assert "s3cret" not in repr(EngineArgs(hf_token="s3cret"))
    with pytest.raises(ConfigurationError) as error:
        EngineArgs(hf_token=["s3cret"]).create_engine_config()  # type: ignore[arg-type]
    assert "s3cret" not in str(error.value)


def test_configuration_leaves_the_arguments_alone(model: Path) -> None:
    given = args(
        model, hf_overrides={"rope_theta": 5.0}, override_generation_config={"temperature": 0.5}
    )
    before = copy.deepcopy(given)
    first = given.create_engine_config(UsageContext.LLM_CLASS)
    second = given.create_engine_config(UsageContext.LLM_CLASS)
    assert given == before and first == second
    assert first.scheduler_config.max_num_batched_tokens == 4096


def test_configuration_is_frozen_and_travels_as_msgpack(model: Path, tmp_path: Path) -> None:
    given = args(
        model, profiler_config={"torch_profiler_dir": str(tmp_path)}, worker_extension_cls="a.B",
        logprobs_mode="processed", max_logprobs=-1, load_format="dummy", max_num_queued_reqs=3,
        hf_overrides={"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    )  # fmt: skip
    config = given.create_engine_config()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config
    for part in dataclasses.fields(config):
        value = getattr(config, part.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value, dataclasses.fields(value)[0].name, 1)
    assert config.model_config.logprobs_mode == "processed_logprobs"
    assert config.profiler_config is not None
    assert config.profiler_config.torch_profiler_dir == str(tmp_path)
    assert config.parallel_config.worker_extension_cls == "a.B"
    assert config.load_config.load_format == "dummy"
    assert config.scheduler_config.max_num_queued_reqs == 3
    assert config.device_config.device == "cpu"
    assert (config.lora_config, config.speculative_config, config.prompt_adapter_config) == (
        None, None, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("context", "given", "tokens", "shared", "seqs"),
    [
        (UsageContext.LLM_CLASS, {}, 4096, None, 256),
        (UsageContext.API_SERVER, {}, 2048, 512, 256),
        (UsageContext.ENGINE_CONTEXT, {}, 2048, 512, 256),
        (None, {}, 2048, 512, 256),
        (UsageContext.API_SERVER, {"max_num_seqs": 5000}, 5000, 512, 5000),
        (UsageContext.API_SERVER, {"max_num_batched_tokens": 1000}, 1000, None, 256),
        (UsageContext.LLM_CLASS, {"max_num_batched_tokens": 100}, 100, None, 100),
    ],
)
def test_limits_by_usage(
    context: UsageContext | None,
    given: dict[str, Any],
    tokens: int,
    shared: int | None,
    seqs: int,
    model: Path,
) -> None:
    config = args(model, **given).create_engine_config(context)
    assert config.scheduler_config.max_shared_prefill_tokens == shared
    assert config.scheduler_config.max_num_batched_tokens == tokens
    assert config.scheduler_config.max_num_seqs == seqs
    assert config.cache_config.block_size == 16 and config.cache_config.enable_prefix_caching
    assert config.model_config.seed is None


def test_paths_and_none_are_accepted(model: Path) -> None:
    given = EngineArgs(
        model=model, hf_overrides=None, enable_prefix_caching=None,  # type: ignore[arg-type]
    )  # fmt: skip
    config = given.create_engine_config()
    assert config.model_config.model == str(model)
    assert config.model_config.served_model_names == (str(model),)


def test_overrides_of_the_model_config(model: Path) -> None:
    def rope(**given: Any) -> dict[str, Any]:
        config = args(model, **given).create_engine_config()
        return config.model_config.hf_config["rope_parameters"]  # type: ignore[no-any-return]

    assert rope(hf_overrides={"rope_theta": 5.0})["rope_theta"] == 5.0
    scaled = rope(hf_overrides={"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert scaled == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert rope(hf_overrides=lambda config: config | {"rope_theta": 7.0})["rope_theta"] == 7.0
    new_spelling = {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}
    del new_spelling["rope_theta"]
    (model / "config.json").write_text(json.dumps(new_spelling))
    assert rope()["rope_theta"] == 3.0
    assert rope(hf_overrides={"rope_theta": 5.0})["rope_theta"] == 5.0
    nested = rope(hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
    assert nested == {"rope_type": "linear", "factor": 4.0, "rope_theta": 3.0}
    longer = args(model, hf_overrides={"max_position_embeddings": 9000}, max_model_len=8000)
    assert longer.create_engine_config().model_config.max_model_len == 8000
    with pytest.raises(ConfigurationError, match=r"hf_overrides must return.*NoneType"):
        rope(hf_overrides=lambda config: None)


def test_overrides_of_gguf_and_both_gemma_ropes(gemma3_gguf: Path) -> None:
    plain = EngineArgs(model=str(gemma3_gguf)).create_engine_config().model_config.hf_config
    changed = EngineArgs(model=str(gemma3_gguf), hf_overrides={"rope_theta": 5.0})
    rope = changed.create_engine_config().model_config.hf_config["rope_parameters"]
    assert rope["full_attention"]["rope_theta"] == 5.0
    assert rope["sliding_attention"] == plain["rope_parameters"]["sliding_attention"]
    EngineArgs(model=str(gemma3_gguf), quantization="gguf", load_format="gguf").check()
    for given in ({"load_format": "safetensors"}, {"hf_config_path": "/"}):
        with pytest.raises(ConfigurationError, match=next(iter(given))):
            EngineArgs(model=str(gemma3_gguf), **given).create_engine_config()  # type: ignore[arg-type]


def test_config_from_another_place(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": 77}))
    for place in (other, other / "config.json"):
        config = args(model, hf_config_path=str(place)).create_engine_config()
        assert config.model_config.max_model_len == 77 and config.model_config.path == str(model)


def test_formats_must_be_those_of_the_files(model: Path) -> None:
    for given in ({"load_format": "gguf"}, {"quantization": "gguf"}, {"quantization": "GGUF"}):
        with pytest.raises(ConfigurationError, match="gguf does not go with"):
            args(model, **given).create_engine_config()


def test_quantization(model: Path, gemma3_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(path: Path, **given: Any) -> tuple[str, str]:
        config = args(path, **given).create_engine_config().model_config
        return config.quantization, config.dtype

    for preferred in ("bfloat16", "float32"):
        monkeypatch.setattr(CpuFacts, "preferred_dtype", preferred)
        assert kept(model) == kept(model, quantization="None") == ("none", preferred)
        for name in ("int8", "Int8_per_channel_weight_only"):
            assert kept(model, quantization=name) == (INT8, preferred)
            assert kept(gemma3_gguf, quantization=name) == (INT8, preferred)
        assert kept(gemma3_gguf, quantization="gguf") == ("gguf", preferred)
        assert kept(gemma3_gguf, quantization="gguf", dtype="bfloat16") == ("gguf", "bfloat16")
        assert kept(gemma3_gguf, dtype="bfloat16") == ("none", "bfloat16")
        assert kept(gemma3_gguf, quantization="none") == ("none", preferred)
        assert kept(gemma3_gguf, load_format="dummy") == ("none", preferred)
        assert kept(gemma3_gguf) == ("gguf", preferred)
    with pytest.raises(ConfigurationError, match="gguf does not go with load_format dummy"):
        kept(gemma3_gguf, quantization="gguf", load_format="dummy")


def test_unknown_quantization() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"AWQ is not implemented.* are none, gguf"):
        EngineArgs(quantization="AWQ").check()
    with pytest.raises(ConfigurationError, match="'int3' is not known; implemented are none"):
        EngineArgs(quantization="int3").check()


def test_length_above_the_models(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "HEADRACE_ALLOW_LONG_MAX_MODEL_LEN"
    monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match=rf"600.*512.*{name}=1"):
        args(model, max_model_len=600).create_engine_config()
    monkeypatch.setenv(name, "1")
    config = args(model, max_model_len=600).create_engine_config()
    assert config.model_config.max_model_len == 600


def test_statistics_interval(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LOG_STATS_INTERVAL", "2.5")
    config = args(model).create_engine_config()
    assert config.observability_config.log_stats_interval_s == 2.5
    for text in ("0", "often", "inf"):
        monkeypatch.setenv("HEADRACE_LOG_STATS_INTERVAL", text)
        with pytest.raises(ConfigurationError, match=f"HEADRACE_LOG_STATS_INTERVAL.*{text}"):
            args(model).create_engine_config()


def test_logging_of_requests_in_both_spellings() -> None:
    assert not AsyncEngineArgs().logs_requests
    assert AsyncEngineArgs(enable_log_requests=True).logs_requests
    parsed = parse("--disable-log-requests", cls=AsyncEngineArgs)
    assert isinstance(parsed, AsyncEngineArgs) and not parsed.logs_requests
    with pytest.raises(ConfigurationError, match="contradict"):
        _ = AsyncEngineArgs(enable_log_requests=True, disable_log_requests=True).logs_requests
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser(), async_args_only=True)
    assert {a.dest for a in parser._actions} == {
        "help", "enable_log_requests", "disable_log_requests",
    }  # fmt: skip


def test_namespaces() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    namespace = parser.parse_args([])
    namespace.more = 1
    assert EngineArgs.from_cli_args(namespace) == EngineArgs()
    del namespace.swap_space
    with pytest.raises(AttributeError, match="swap_space"):
        EngineArgs.from_cli_args(namespace)
    with pytest.raises(TypeError, match="tensor_parallel_sise"):
        EngineArgs(tensor_parallel_sise=2)  # type: ignore[call-arg]


def test_a_command_keeps_its_own_spellings() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-q", "--quick")
    parser.add_argument("--model", default="own")
    namespace = EngineArgs.add_cli_args(parser).parse_args(["-q", "hello"])
    assert namespace.quick == "hello"
    assert EngineArgs.from_cli_args(namespace) == EngineArgs(model="own")


def test_no_torch_is_needed() -> None:
    check = (
        "from headrace.configs.engine_args import AsyncEngineArgs\n"
        "import argparse, sys\n"
        "AsyncEngineArgs.add_cli_args(argparse.ArgumentParser()).format_help()\n"
        "assert not {'torch', 'transformers', 'yaml'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
