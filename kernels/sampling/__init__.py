"""Random choice of a token: Gumbel-max with a counter-based generator."""

from headrace.kernels.sampling.reference import (
    GUMBEL_MAX,
    PURPOSE_SAMPLE,
    gumbel_max,
    gumbel_noise,
    philox4x32,
    seed_to_int64,
)

__all__ = [
    "GUMBEL_MAX",
    "PURPOSE_SAMPLE",
    "gumbel_max",
    "gumbel_noise",
    "philox4x32",
    "seed_to_int64",
]
