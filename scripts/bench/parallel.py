"""What several workers or replicas make of this machine's cores: tokens/s, alternating.

    python scripts/bench/random_model.py /tmp/model --shape smollm2-135m-8-heads
    python scripts/bench/parallel.py /tmp/model --layouts tp1 tp2 dp2 --batches 1 32 --rounds 3

A layout is tpN (shards), ppN (stages) or dpN (replicas). One engine runs at a time, with all cores;
a line of JSON tells of each run, a table of the medians.
"""

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict

from headrace import LLM, SamplingParams

OPTIONS = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
}  # fmt: skip
INPUT_LEN, OUTPUT_LEN = 32, 64


def measure(model: str, layout: str, batches: list[int]) -> dict[int, float]:
    """Output tokens/s by batch size: prompts of 32 tokens, and 64 greedy ones after them."""
    option = {OPTIONS[layout[:2]]: int(layout[2:])}
    llm = LLM(model, max_model_len=1024, skip_tokenizer_init=True, seed=0, **option)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    rates = {}
    for batch in batches:
        prompts = [
            {"prompt_token_ids": [(7 * i + 3 * j) % 1000 + 5 for j in range(INPUT_LEN)]}
            for i in range(batch)
        ]
        llm.generate(prompts, params, use_tqdm=False)  # warms up
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        rates[batch] = batch * OUTPUT_LEN / (time.perf_counter() - began)
    llm.close()
    return rates


def main() -> None:
    """Print a line for each run and a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--layouts", nargs="+", default=["tp1", "tp2", "dp2"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for layout in args.layouts:
        if layout[:2] not in OPTIONS or not layout[2:].isdigit():
            parser.error(f"{layout!r} is none of tpN, ppN, dpN")
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for number in range(args.rounds):
        for layout in args.layouts if number % 2 == 0 else reversed(args.layouts):
            for batch, rate in measure(args.model, layout, args.batches).items():
                found[layout, batch].append(rate)
                run = {"round": number + 1, "layout": layout, "batch": batch}
                print(json.dumps(run | {"tokens_per_s": round(rate, 1)}), file=sys.stderr)
    print("tokens/s, medians" + "".join(f"{layout:>18}" for layout in args.layouts))
    for batch in args.batches:
        first = statistics.median(found[args.layouts[0], batch])
        cells = []
        for layout in args.layouts:
            median = statistics.median(found[layout, batch])
            cells.append(f"{median:,.1f} ({median / first:.2f})")
        print(f"batch {batch:<11}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
