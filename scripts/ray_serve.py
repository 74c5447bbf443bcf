"""A completions endpoint on Ray Serve: replicas that Ray places, each with its workers.

    pip install 'headrace[ray]' 'ray[serve]'
    python scripts/ray_serve.py smollm2-135m --replicas 2 --tensor-parallel-size 2
    curl http://127.0.0.1:8000/ -d '{"prompt": "Once upon a time", "max_tokens": 20}'

A replica is an actor with a placement group: one bundle for the actor and its first worker, and one
for every other worker. The engine finds the group and puts its workers there.
"""

import argparse
import contextlib
import uuid
from typing import Any

from ray import serve
from starlette.requests import Request

from headrace import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


@serve.deployment(max_ongoing_requests=256)
class Completions:
    """Answers POSTs with `prompt` and any fields of SamplingParams."""

    def __init__(self, model: str, tensor_parallel_size: int) -> None:
        self._args = AsyncEngineArgs(
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            distributed_executor_backend="ray",
        )
        self._engine: AsyncLLMEngine | None = None

    async def __call__(self, request: Request) -> dict[str, Any]:
        if self._engine is None:
            self._engine = AsyncLLMEngine.from_engine_args(self._args)
        fields = await request.json()
        prompt = fields.pop("prompt")
        final = None
        async for output in self._engine.generate(
            prompt, SamplingParams(**fields), uuid.uuid4().hex
        ):
            final = output
        assert final is not None
        return {"text": [choice.text for choice in final.outputs]}


def main() -> None:
    """Deploy, and serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    # The actor needs a little for itself beside the worker in its bundle.
    bundles = [{"CPU": 1.0 if index else 1.1} for index in range(args.tensor_parallel_size)]
    deployment = Completions.options(
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": 0.1},
        placement_group_bundles=bundles,
        placement_group_strategy="PACK",
    )
    with contextlib.suppress(KeyboardInterrupt):
        serve.run(deployment.bind(args.model, args.tensor_parallel_size), blocking=True)


if __name__ == "__main__":
    main()
