"""Where the workers' time goes, by operation of the native kernels; or a trace of torch's profiler.

python scripts/workers/profile_steps.py --model smollm2-135m --batch-size 8
python scripts/workers/profile_steps.py --trace-dir traces
"""

import argparse

from headrace import LLM, SamplingParams


def main() -> None:
    """Profile a batch, and print what each worker has found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--trace-dir", help="write traces of torch's profiler there instead")
    args = parser.parse_args()
    profiler = None if args.trace_dir is None else {"torch_profiler_dir": args.trace_dir}
    llm = LLM(args.model, tensor_parallel_size=args.tensor_parallel_size, profiler_config=profiler)
    params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
    prompts = [f"Story number {number}:" for number in range(args.batch_size)]
    llm.generate(prompts, params, use_tqdm=False)
    if args.trace_dir is not None:
        llm.start_profile()
        llm.generate(prompts, params, use_tqdm=False)
        for rank, path in enumerate(llm.collective_rpc("stop_profile")):
            print(f"worker {rank}: {path}")
    elif all(llm.collective_rpc("start_op_profile")):
        llm.generate(prompts, params, use_tqdm=False)
        for rank, totals in enumerate(llm.collective_rpc("stop_op_profile")):
            print(f"worker {rank}:")
            for kind, found in totals.items():
                print(f"  {kind}: {found['num_steps']} steps; ms and MiB of each step")
                for name, op in found["ops"].items():
                    ms = 1e3 * op["seconds"] / found["num_steps"]
                    mib = op["num_bytes"] / 2**20 / found["num_steps"]
                    print(f"    {name:16}{ms:9.3f}{mib:10.1f}")
    else:
        print("these workers run torch's kernels: give --trace-dir")
    llm.close()


if __name__ == "__main__":
    main()
