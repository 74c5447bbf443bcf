"""Options of running on several workers, replicas and machines."""

# ruff: noqa: RUF009 (every default here is made by option(), a dataclass field)

import dataclasses
from functools import partial

from headrace.configs.options import option

_option = partial(option, group="ParallelConfig")
_later = partial(_option, status="later")


@dataclasses.dataclass
class ParallelOptions:
    """How many workers there are, where they run, and what class they have."""

    distributed_executor_backend: str | type | None = _option(
        None,
        "how workers are run: uni (in the engine core, if there is one), mp (processes), ray "
        "(actors of a Ray cluster), external_launcher (an engine in every process that torchrun "
        "has started), or module.Class; default: uni or mp, by their number, or ray in one of "
        "Ray's placement groups",
    )
    pipeline_parallel_size: int = _option(
        1, "number of stages that the layers are divided into", flags=["-pp"], minimum=1
    )
    tensor_parallel_size: int = _option(
        1, "number of shards that each layer is divided into", flags=["-tp"], minimum=1
    )
    pp_layer_partition: str | None = _option(
        None, "layers of each stage, as 14,16; default: as even as can be"
    )
    data_parallel_size: int = _option(
        1, "number of replicas of the model, in all; requests are spread over those of this server",
        flags=["-dp"], minimum=1,
    )  # fmt: skip
    data_parallel_rank: int | None = _option(
        None, "run the one replica of this rank, behind a load balancer of yours (external mode)",
        flags=["-dpn"], minimum=0,
    )  # fmt: skip
    data_parallel_size_local: int | None = _option(
        None, "number of replicas of this server; default: all, or 1 in external mode",
        flags=["-dpl"], minimum=0,
    )  # fmt: skip
    data_parallel_start_rank: int | None = _option(
        None, "rank of the first replica of this server (hybrid mode)", flags=["-dpr"], minimum=0
    )
    data_parallel_external_lb: bool = _option(
        False, "external mode: one replica in each server, needs its rank", flags=["-dpe"]
    )
    data_parallel_hybrid_lb: bool = _option(
        False, "hybrid mode: some of the replicas in each server, which spreads over its own",
        flags=["-dph"],
    )  # fmt: skip
    data_parallel_address: str | None = _later(None, "address of the first machine", flags=["-dpa"])
    data_parallel_rpc_port: int | None = _later(
        None, "port for replicas on other machines", flags=["-dpp"]
    )
    data_parallel_backend: str = _option(
        "mp", "who starts replicas: mp, on this machine; ray, on the nodes of a Ray cluster",
        flags=["-dpb"], choices=["mp", "ray"],
    )  # fmt: skip
    enable_expert_parallel: bool = _later(
        False, "spread experts over workers instead of cutting them", flags=["-ep"]
    )
    enable_eplb: bool = _later(False, "balance the load of experts")
    num_redundant_experts: int = _later(0, "spare copies of experts", minimum=0)
    eplb_window_size: int = _later(1000, "steps of load history for balancing experts")
    eplb_step_interval: int = _later(3000, "steps between two rearrangements of experts")
    eplb_log_balancedness: bool = _later(False, "log how balanced experts are")
    max_parallel_loading_workers: int | None = _later(
        None, "workers that load weights at the same time"
    )
    ray_workers_use_nsight: bool = _later(False, "profile Ray workers with Nsight")
    disable_custom_all_reduce: bool = _later(
        False, "use the library's all-reduce only; always so", holds=[True]
    )
    worker_cls: str = _option("auto", "class of the workers, as module.Class; auto: ours")
    worker_extension_cls: str = _option(
        "", "class mixed into the workers, as module.Class; collective_rpc can call its methods"
    )
    enable_multimodal_encoder_data_parallel: bool = _later(
        False, "run media encoders data-parallel"
    )
    nnodes: int = _option(
        1,
        "number of machines that run workers of mp; the others run `headrace serve --headless`",
        flags=["-n"],
        minimum=1,
    )
    node_rank: int = _option(
        0, "number of this machine; 0 is the one that answers", flags=["-r"], minimum=0
    )
    master_addr: str = _option(
        "127.0.0.1", "address of machine 0, which it listens on for the other machines"
    )
    master_port: int = _option(29501, "port of machine 0 for the other machines", minimum=1)
    cluster_key_file: str | None = _option(
        None,
        "key of the connections between machines, a copy on each; `headrace doctor --make-key "
        "FILE` makes one",
    )
