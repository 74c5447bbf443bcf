"""Compare headrace with transformers on one GGUF model, alternating, in one run.

Random token ids, greedy, fixed lengths. Machines are noisy: quote the ratios, which come from pairs
of runs that followed each other. The transformers directory of the model is written beside it on
the first run.

usage: python scripts/bench/offline.py [MODEL] [--rounds 3] [--dtype bfloat16]
"""

import argparse
import json
import random
import runpy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

WORKLOADS = (  # name, sequences, prompt tokens, output tokens
    ("decode, batch 1", 1, 32, 64),
    ("decode, batch 8", 8, 32, 64),
    ("decode, batch 32", 32, 32, 64),
    ("prefill 1024", 1, 1024, 1),
)
Generate = Callable[[list[list[int]], int], None]


def headrace_engine(model: str, dtype: str) -> Generate:
    from headrace import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=2048, kv_cache_memory_bytes=2 << 30)

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)

    return generate


def transformers_engine(model: Path, dtype: str) -> Generate:
    import torch
    import transformers

    script = Path(__file__).parent.parent / "gguf_to_hf.py"
    directory = model.parent / f"{model.stem}-transformers"
    runpy.run_path(str(script))["convert"](model, directory, "float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype)
    ).eval()

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
            )

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description="headrace against transformers")
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    from headrace.configs.model_files.resolve import resolve_model

    path = resolve_model(args.model)
    engines = {
        "headrace": headrace_engine(args.model, args.dtype),
        "transformers": transformers_engine(path, args.dtype),
    }
    rng = random.Random(0)
    for name, batch, num_prompt, num_output in WORKLOADS:
        speeds: dict[str, list[float]] = {engine: [] for engine in engines}
        for number in range(args.rounds + 1):  # the first round warms up
            prompts = [[rng.randint(1000, 40000) for _ in range(num_prompt)] for _ in range(batch)]
            for engine, generate in engines.items():
                began = time.perf_counter()
                generate(prompts, num_output)
                counted = num_output if num_output > 1 else num_prompt
                if number:
                    speeds[engine].append(batch * counted / (time.perf_counter() - began))
        pairs = zip(*speeds.values(), strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        row = {engine: round(statistics.median(values), 1) for engine, values in speeds.items()}
        print(json.dumps({"workload": name, **row, "ratio": round(ratio, 2)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
