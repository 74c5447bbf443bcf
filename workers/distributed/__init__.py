"""A worker's place among those that run one model, and what they do together."""

from headrace.workers.distributed.communicator import ALONE, Communicator
from headrace.workers.distributed.place import Place

__all__ = ["ALONE", "Communicator", "Place"]
