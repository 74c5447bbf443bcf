"""Statistics of a replica over the losses of its engine cores."""

from headrace.engine_core.control_messages import EngineDown
from headrace.engine_core.messages import EngineStats
from headrace.engine_core.replica_view import ReplicaView


def test_every_loss_counts_and_what_was_handed_out_stays() -> None:
    """Loggers keep the last record, and count what has grown since."""
    view = ReplicaView(0)
    first = view.total(EngineStats(step=3))
    for epoch in (1, 2):  # the second one before any statistics have come
        view.lose(EngineDown(0, epoch, "killed"))
        view.recovered(num_replayed=5)
    assert (first.num_restarts, first.num_replayed_requests) == (0, 0)
    now = view.total(EngineStats(step=1))
    assert (now.num_restarts, now.num_replayed_requests, now.step) == (2, 10, 4)
    view.lose(EngineDown(0, 3, "killed"))
    view.count_replayed(2)
    assert now.num_replayed_requests == 10
    assert view.idle(num_waiting=0).num_replayed_requests == 12
