"""The garbage collector of a process that has started."""

import gc

from headrace.configs.garbage import settle_garbage_collector


def test_what_is_there_is_not_looked_through_again() -> None:
    thresholds = gc.get_threshold()
    kept = [[number] for number in range(1000)]
    try:
        settle_garbage_collector()
        assert gc.get_freeze_count() > len(kept) and gc.get_threshold()[0] > thresholds[0]
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1, "and what comes later is still collected"
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
