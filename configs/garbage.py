"""Garbage collection of the processes that are ours alone."""

import gc

YOUNG_OBJECTS = 10_000  # new containers between two looks at them; Python's default is 700


def settle_garbage_collector() -> None:
    """Call when a process has started: what it holds now stays, and is not looked through again.

    Steps and tokens leave no cycles behind, so that collections find next to nothing; torch's
    modules alone make a full one take a tenth of a second.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
