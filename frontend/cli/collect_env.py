"""`headrace collect-env`: what this machine and installation are, to put into a bug report."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.configs.hardware import cpu_facts
from headrace.configs.model_files.cache_dir import cache_dir
from headrace.configs.model_files.catalog import CATALOG
from headrace.configs.model_files.pull import cached_file

REQUIRED = (
    *("torch", "tokenizers", "safetensors", "huggingface-hub", "jinja2", "msgspec", "pyzmq"),
    *("numpy", "fastapi", "uvicorn", "uvloop", "httptools", "prometheus-client", "psutil"),
    "cloudpickle",
)
OPTIONAL = (
    *("transformers", "openai", "gguf", "llguidance", "xgrammar", "ray", "mistral-common"),
    *("triton", "flash-attn", "flashinfer-python", "opentelemetry-sdk", "kernels"),
)
# Variables of ours, and of others that change what the engine does.
_VARIABLES = re.compile(
    r"(HEADRACE|VLLM|OMP|GOMP|KMP|MKL|OPENBLAS|TORCH|PYTORCH|CUDA|NVIDIA|HF|TRANSFORMERS|MALLOC|"
    r"LD_PRELOAD|PYTHON)(_.*)?"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(\w+://)[^/\s@]+@")  # in the address of a proxy, say
_CPU_FLAG = re.compile(r"(avx|amx|fma|f16c|sse4|asimd|sve|i8mm|bf16)\w*")
_PROBE_TIMEOUT_S = 120.0
# Runs in a process of its own: torch and the kernels stay out of this one.
_PROBE = """
import json
facts = {}
try:
    import torch
    facts["torch"] = {
        "version": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "threads": torch.get_num_threads(),
        "interop threads": torch.get_num_interop_threads(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": torch.backends.mkldnn.is_available(),
        "parallel backend": torch.__config__.parallel_info().split("ATen parallel backend:")[-1]
            .strip().split("\\n")[0],
        "build": " ".join(torch.__config__.show().split("- Build settings")[0].split()),
        "GPUs": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            if torch.cuda.is_available() else [],
    }
except Exception as error:
    facts["torch"] = {"cannot be used": repr(error)}
try:
    from headrace.kernels.native.interface import open_library
    from headrace.kernels.native.kernels import describe_choice, supported_isas
    library = open_library()
    facts["native kernels"] = {"available": True,
                               "instruction sets they can use here": list(supported_isas(library))}
    from headrace.kernels.native import load_kernels
    chosen = load_kernels("auto", 1)
    facts["native kernels"]["chosen by default"] = chosen.contract if chosen else "none"
    if chosen:
        facts["native kernels"]["and why"] = describe_choice(library, chosen)
except Exception as error:
    facts["native kernels"] = {"available": False, "reason": repr(error)}
print(json.dumps(facts))
"""
Facts = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    """Add the `collect-env` command."""
    subparsers.add_parser(
        "collect-env",
        help="print a report of this machine",
        description="Print versions, processors, limits, memory, libraries, kernels, variables and "
        "models in the cache, for a bug report. Values that may be secret are hidden; prompts and "
        "texts are not in it.",
        allow_abbrev=False,
    )


def run(args: argparse.Namespace) -> int:
    """Print the report to stdout; a part that cannot be found out says why."""
    for title, facts in collect(os.environ).items():
        print(f"{title}:")
        for name, value in facts.items():
            print(f"  {name + ':':<36} {_text(value)}")
    return 0


def collect(environ: Mapping[str, str]) -> dict[str, Facts]:
    """Facts by section."""
    return {
        "system": _system(),
        "processors and memory": _hardware(),
        "packages": {name: _version(name) or "missing" for name in REQUIRED},
        "optional packages": {name: _version(name) or "-" for name in OPTIONAL},
        **_probe(),
        "variables": visible_variables(environ) or {"none": "-"},
        "models in the cache": _models(environ),
    }


def visible_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that matter, sorted; of a secret only that it is set."""
    shown = {}
    for name in sorted(environ):
        if _VARIABLES.fullmatch(name):
            value = _CREDENTIALS.sub(r"\1(hidden)@", environ[name])
            shown[name] = "(set, hidden)" if _SECRET.search(name) else value
    return shown


def _system() -> Facts:
    return {
        "headrace": _version("headrace"),
        "Python": f"{platform.python_version()} ({platform.python_implementation()})",
        "operating system": platform.platform(),
        "C library": " ".join(platform.libc_ver()) or "unknown",
        "in a virtual environment": sys.prefix != sys.base_prefix,
    }


def _hardware() -> Facts:
    facts = cpu_facts()
    info = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.*)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", info, re.MULTILINE)
    words = flags[1].split() if flags else []
    quota = "none" if facts.cpu_quota is None else f"{facts.cpu_quota:g} CPUs"
    limit = "none" if facts.memory_limit is None else _gib(facts.memory_limit)
    return {
        "model": model[1] if model else platform.processor() or "unknown",
        "vector instructions": " ".join(w for w in words if _CPU_FLAG.fullmatch(w)) or "unknown",
        "CPUs of the machine": os.cpu_count(),
        "CPUs allowed (affinity)": _ranges(facts.allowed_cpus),
        "physical cores among them": facts.num_cores,
        "CPU quota of the cgroups": quota,
        "threads headrace uses": facts.num_threads,
        "dtype auto": facts.preferred_dtype,
        "memory of the machine": _gib(facts.memory_total),
        "memory limit of the cgroups": limit,
        "memory available": _gib(facts.memory_available),
        "NUMA nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        "transparent huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled").strip(),
    }


def _probe() -> dict[str, Facts]:
    """torch and the native kernels, as a fresh process sees them."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True,
        )  # fmt: skip
        facts: dict[str, Facts] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        return {"torch": {"cannot be used": lines[-1]}}
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
        return {"torch": {"cannot be used": repr(error)}}
    return facts


def _models(environ: Mapping[str, str]) -> Facts:
    cache = cache_dir(environ)
    facts: Facts = {"cache": f"{cache} ({'exists' if cache.is_dir() else 'does not exist'})"}
    for entry in CATALOG.values():
        path = cached_file(entry, cache)
        facts[entry.alias] = f"{path} ({_gib(path.stat().st_size)})" if path else "not pulled"
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ranges(numbers: tuple[int, ...]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
