"""One engine in a process of its own, for `offline.py`: lines of JSON in, lines of JSON out.

Runs in whatever Python has the engine, so it imports nothing of ours but in `load_headrace`. What
engines print goes to stderr. The first answer has facts of the engine; each line that follows,
[prompts, number of output tokens], is answered with the seconds and the number of tokens made.

usage: python offline_worker.py {headrace,transformers,vllm} DIRECTORY JSON_OPTIONS
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

KV_CACHE_BYTES = 2 << 30
MAX_MODEL_LEN = 2048
CACHE_TIMEOUT_S = 60.0  # for the pages of the KV cache
Generate = Callable[[list[list[int]], int], int]
Engine = tuple[Generate, dict[str, Any]]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, directory, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    loaders = {"headrace": load_headrace, "transformers": load_transformers, "vllm": load_vllm}
    generate, facts = loaders[name](directory, options)
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        prompts, num_output = json.loads(line)
        began = time.perf_counter()
        num_tokens = generate(prompts, num_output)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "num_tokens": num_tokens}), file=answers, flush=True)


def load_headrace(directory: str, options: dict[str, Any]) -> Engine:
    """`options`: dtype, and `engine_args`, which go before everything else."""
    import headrace

    arguments = {
        "model": directory, "dtype": options["dtype"], "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": KV_CACHE_BYTES, **options["engine_args"],
    }  # fmt: skip
    llm = headrace.LLM(**arguments)
    # Idle moments, which servers have and this process not: peers' turns are spent stopped.
    llm.collective_rpc("wait_for_cache", args=(CACHE_TIMEOUT_S,))
    generate = of_llm(llm, headrace.SamplingParams)
    facts = {"version": headrace.__version__, **read_per_token(llm, generate)}
    return generate, facts


def read_per_token(llm: Any, generate: Generate) -> dict[str, int]:
    """Bytes that one decoding step reads: of weights, and per token of context.

    Nothing where the kernels are torch's.
    """
    (is_native,) = llm.collective_rpc("start_op_profile")
    if not is_native:
        return {}
    num_prompt, num_output = 8, 9
    generate([list(range(1000, 1000 + num_prompt))], num_output)
    (totals,) = llm.collective_rpc("stop_op_profile")
    steps, ops = totals["decode"]["num_steps"], totals["decode"]["ops"]
    weights = sum(op["num_bytes"] for name, op in ops.items() if name != "attention")
    num_seen = sum(range(num_prompt + 1, num_prompt + 1 + steps))
    return {
        "weight_bytes": weights // steps,
        "kv_bytes_per_token": ops["attention"]["num_bytes"] // num_seen,
    }


def load_vllm(directory: str, options: dict[str, Any]) -> Engine:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_CACHE_BYTES >> 30))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm

    arguments = {"dtype": options["dtype"], "max_model_len": MAX_MODEL_LEN}
    llm = vllm.LLM(directory, **arguments, **options["engine_args"])
    return of_llm(llm, vllm.SamplingParams), {"version": vllm.__version__}


def of_llm(llm: Any, params_class: Any) -> Generate:
    def generate(prompts: list[list[int]], num_output: int) -> int:
        params = params_class(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def load_transformers(directory: str, options: dict[str, Any]) -> Engine:
    import torch
    import transformers

    torch.set_num_threads(options["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, options["dtype"]), attn_implementation="sdpa"
    ).eval()

    def generate(prompts: list[list[int]], num_output: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                use_cache=True,
                min_new_tokens=num_output,
                max_new_tokens=num_output,
            )
        return int(output[:, ids.shape[1] :].numel())

    facts = {"version": transformers.__version__, "torch": torch.__version__,
             "threads": torch.get_num_threads()}  # fmt: skip
    return generate, facts


if __name__ == "__main__":
    main()
