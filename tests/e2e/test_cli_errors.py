"""The command line on what cannot work: one message with numbers and the fix, nothing left."""

import json
import math
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import psutil
import pytest

from tests.e2e.server_process import run_directories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

Run = Callable[..., str]
QUIET = ("-q", "a", "--max-tokens", "1")


@pytest.fixture
def fails(tmp_path: Path) -> Iterator[Run]:
    """`fails(*arguments, code=1, **environment)` runs `headrace`, which must end with one message.

    Returns the message. No traceback, no process, run directory or temporary file is left.
    """

    def run(*arguments: str, code: int = 1, **environment: str) -> str:
        cache = tmp_path / "cache"
        done = subprocess.run(
            [sys.executable, "-m", "headrace", *arguments],
            env={**os.environ, "TMPDIR": str(temp), "HEADRACE_CACHE": str(cache), **environment},
            capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr + done.stdout
        lines = done.stderr.splitlines()
        assert re.match(r"headrace( \w+)?: error: ", lines[-1]), done.stderr
        assert sum("error:" in line for line in lines) == 1, done.stderr
        assert run_directories(temp) == []
        assert [path for path in temp.rglob("*") if not path.is_dir()] == []
        assert not processes_with(str(temp))
        return lines[-1]

    with tempfile.TemporaryDirectory() as directory:  # short: it holds the paths of sockets
        temp = Path(directory)
        yield run


def processes_with(temp: str) -> list[int]:
    """Processes of ours that run with this TMPDIR."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == temp:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def serve(run: Run, model: object, *options: str, **environment: Any) -> str:
    return run("serve", str(model), "--port", "0", *options, **environment)


def has_number(message: str) -> bool:
    return re.search(r"\d", message.partition("error:")[2]) is not None


@pytest.mark.parametrize("size", [0, 3, 1000, 200_000, 50_000_000, -1])
def test_truncated_gguf(fails: Run, tmp_path: Path, smollm2_gguf: Path, size: int) -> None:
    """In the header, in the vocabulary, in the tensors, and by one byte."""
    short = tmp_path / "short.gguf"
    with smollm2_gguf.open("rb") as whole:
        data = whole.read()
    short.write_bytes(data[:size])
    message = serve(fails, short)
    assert "short.gguf" in message and re.search("empty|truncated|too short|cut", message), message
    assert has_number(message)


def test_corrupt_gguf(fails: Run, tmp_path: Path, smollm2_gguf: Path) -> None:
    rng = random.Random(4)
    corrupt = tmp_path / "corrupt.gguf"
    corrupt.write_bytes(rng.randbytes(5000))
    assert "corrupt.gguf" in serve(fails, corrupt) and "GGUF" in serve(fails, corrupt)
    header = bytearray(smollm2_gguf.read_bytes()[:2_000_000])
    for offset, value in ((4, 99), (8, 2**63), (16, 2**40)):  # version, tensors, metadata entries
        broken = bytearray(header)
        struct.pack_into("<I" if offset == 4 else "<Q", broken, offset, value)
        corrupt.write_bytes(broken)
        message = serve(fails, corrupt)
        assert "corrupt.gguf" in message and str(value) in message, message


def test_unsupported_gguf(fails: Run, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(64)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = serve(fails, path)
    assert "mamba" in message and "llama" in message and "gemma3" in message, message


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 2,
}  # fmt: skip


def write_llama(directory: Path, vocab_size: int = 49152, width: int = 16) -> Path:
    """A Llama of one layer whose weights are zeros in a sparse file; no tokenizer."""
    square, narrow, wide = (width, width), (width, 32), (32, width)
    layer = {
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
        **{f"self_attn.{name}_proj": square for name in "qkvo"},
        "mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": narrow,
    }  # fmt: skip
    shapes = {"model.embed_tokens": (vocab_size, width), "model.norm": (width,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    config = {**TINY, "vocab_size": vocab_size, "hidden_size": width}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "tiny")


def test_directories(fails: Run, tmp_path: Path, tiny: Path, smollm2_gguf: Path) -> None:
    (tmp_path / "nothing").mkdir()
    message = serve(fails, tmp_path / "nothing")
    assert "config.json" in message and ".gguf" in message
    message = serve(fails, tiny)
    assert "tokenizer" in message and "--tokenizer" in message, message
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    foo = {**TINY, "architectures": ["FooForCausalLM"], "model_type": "foo"}
    (other / "config.json").write_text(json.dumps(foo))
    message = serve(fails, other)
    assert "FooForCausalLM" in message and "LlamaForCausalLM" in message
    (other / "config.json").write_text("{")
    assert "config.json" in serve(fails, other)
    shutil.copy(tiny / "config.json", other)
    (other / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes()[:-100])
    tokenizer = ("--tokenizer", str(smollm2_gguf))
    message = serve(fails, other, *tokenizer)
    assert "model.safetensors" in message and has_number(message)
    (other / "model.safetensors").unlink()
    assert "safetensors" in serve(fails, other, *tokenizer)


def test_names(fails: Run, tmp_path: Path) -> None:
    assert "smollm2-135m" in serve(fails, "smolm2-135m")
    assert "'no such model'" in serve(fails, "no such model")
    assert str(tmp_path) in serve(fails, tmp_path / "missing.gguf")
    for command in ("complete", "chat"):
        assert "smollm2-135m" in fails(command, "smolm2-135m", *QUIET)


def test_port_in_use(fails: Run, smollm2_gguf: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = fails("serve", str(smollm2_gguf), "--port", port, code=2)
    assert port in message and "--port" in message


def test_options(fails: Run, smollm2_gguf: Path) -> None:
    message = serve(fails, smollm2_gguf, "--max-model-len", "9000", code=2)
    assert "9000" in message and "8192" in message
    message = serve(fails, smollm2_gguf, "--max-modl-len", "64", code=2)
    assert "--max-modl-len" in message and "--max-model-len" in message
    message = serve(fails, smollm2_gguf, code=2, HEADRACE_CASH="x")
    assert "HEADRACE_CASH" in message and "HEADRACE_CACHE" in message
    message = serve(
        fails, smollm2_gguf, "--max-num-batched-tokens", "4", "--max-num-seqs", "8", code=2
    )
    assert "4" in message and "8" in message
    assert "-1" in serve(fails, smollm2_gguf, "--block-size", "-1", code=2)
    assert "int8" in serve(fails, smollm2_gguf, "--dtype", "int8", code=2)
    message = fails("complete", str(smollm2_gguf), "-q", "a", "--max-tokens", "-1", code=2)
    assert "max_tokens" in message and "-1" in message


def test_options_that_do_not_exist_yet(fails: Run, smollm2_gguf: Path, tmp_path: Path) -> None:
    message = serve(fails, smollm2_gguf, "--enable-lora", code=2)
    assert "--enable-lora is not implemented yet" in message
    message = serve(fails, smollm2_gguf, "--ssl-ciphers", "x", code=2)
    assert "--ssl-ciphers is known but not implemented yet" in message
    message = serve(fails, smollm2_gguf, "--no-enable-chunked-prefill", code=2)
    assert "enable_chunked_prefill=False is refused" in message
    message = fails("complete", str(smollm2_gguf), *QUIET, "--max-model-len", "auto", code=2)
    assert "--max-model-len auto is not implemented yet" in message
    options = tmp_path / "options.yaml"
    options.write_text("max-modl-len: 64\n")
    message = serve(fails, smollm2_gguf, "--config", str(options), code=2)
    assert "options.yaml" in message and "max-modl-len" in message and "--max-model-len" in message


def test_share_of_memory(fails: Run, smollm2_gguf: Path) -> None:
    """A share too small for the weights: the numbers say so."""
    message = serve(fails, smollm2_gguf, "--gpu-memory-utilization", "0.000001")
    assert re.search(r"weights need \d.*MiB.*short", message), message


def test_too_little_memory(fails: Run, smollm2_gguf: Path) -> None:
    """The cache asked for, then the value in the message that would start."""
    for command in (("serve", "--port", "0"), ("complete", *QUIET)):
        message = fails(command[0], str(smollm2_gguf), *command[1:], "--kv-cache-memory", "999G")
        assert str(999 * 2**30) in message
        assert re.search(r"--kv-cache-memory \d+ or less", message), message
    message = serve(fails, smollm2_gguf, "--kv-cache-memory", "10")
    assert re.search(r"--kv-cache-memory \d+ would start", message), message


def test_weights_larger_than_memory(fails: Run, tmp_path: Path, smollm2_gguf: Path) -> None:
    """Four terabytes, in a sparse file."""
    large = write_llama(tmp_path / "large", vocab_size=2**30, width=1024)
    message = serve(fails, large, "--tokenizer", str(smollm2_gguf))
    assert re.search(r"weights need \d.*MiB.*short", message), message
