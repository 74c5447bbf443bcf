"""Which worker a process of torchrun's is; what does not fit is refused with numbers."""

import pytest

from headrace.configs.config import ParallelConfig
from headrace.configs.errors import ConfigurationError
from headrace.executors.external_launcher import launched_setup

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


def test_the_environment_says_which() -> None:
    setup = launched_setup(ParallelConfig(2, 2), TORCHRUN)
    assert (setup.rank, setup.local_rank, setup.local_size) == (3, 1, 2)
    assert setup.store == "env://"
    alone = TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert launched_setup(ParallelConfig(), alone).store == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": ""}, "needs RANK in the environment: start .* torchrun --nproc-per-node 4"),
        ({"RANK": "x"}, "is no number"),
        ({"WORLD_SIZE": "2"}, r"started 2 processes .*tensor_parallel_size 2 and .* need 4"),
        ({"RANK": "4"}, "this is rank 4"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        launched_setup(ParallelConfig(2, 2), TORCHRUN | change)
