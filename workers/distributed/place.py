"""Where a worker stands among those of its replica."""

from dataclasses import dataclass

from headrace.configs.config import ParallelConfig


@dataclass(frozen=True)
class Place:
    """A worker's shard and stage.

    Ranks go stage by stage, and in a stage shard by shard, so that the shards of a stage, which
    talk most, are neighbours.
    """

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @classmethod
    def of(cls, rank: int, config: ParallelConfig) -> "Place":
        return cls(rank, config.tensor_parallel_size, config.pipeline_parallel_size)

    @property
    def shard(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def samples(self) -> bool:
        """Whether this worker draws the tokens for all: the first shard of the last stage."""
        return self.is_last_stage and self.shard == 0

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def shard_ranks(self, stage: int | None = None) -> list[int]:
        """The ranks of a stage, by default of this worker's."""
        first = (self.stage if stage is None else stage) * self.tensor_parallel_size
        return list(range(first, first + self.tensor_parallel_size))

    def rank_in_stage(self, stage: int) -> int:
        """The worker with this one's shard of another stage."""
        return stage * self.tensor_parallel_size + self.shard

    def describe(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, shard {self.shard})"
