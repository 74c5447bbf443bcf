"""Which data-parallel replica a request goes to: few outstanding tokens, and its prefix in cache.

The outstanding tokens of a replica are prompt tokens not computed yet plus output tokens that are
expected. An engine core tells them with each step, for the requests of all its clients: that is how
several API servers know of each other's. What this client has sent since is added, until a message
says that it is counted. All of it is arithmetic: no sockets, no clocks.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.engine_core.messages import EngineCoreRequest, RoutingReason
from headrace.engine_core.output_lengths import UNKNOWN_LENGTH, OutputLengths

# Replicas up to this far above the mean count as equally loaded, so that a prefix decides.
SLACK = 0.08
MAX_REMEMBERED_BLOCKS = 32_768  # per replica; some 6 MB
MAX_HASHED_BLOCKS = 1_024  # of a prompt; a longer common prefix counts as that long
HOME_BLOCKS = 16  # leading blocks that decide where several clients look for a prefix first


class RecentPrefixes:
    """Blocks that were sent to one replica lately: a guess at what its prefix cache holds.

    As there, the longest unused ones go first, and of a prompt its last ones.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # The longest unused first. A dict would search for its first entry past those removed.
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._hashes)

    def num_found(self, hashes: Sequence[int]) -> int:
        """Leading blocks that were sent."""
        known = self._hashes
        for index, value in enumerate(hashes):
            if value not in known:
                return index
        return len(hashes)

    def add(self, hashes: Sequence[int]) -> None:
        known = self._hashes
        for value in reversed(hashes):
            known[value] = None
            known.move_to_end(value)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def clear(self) -> None:
        self._hashes.clear()


@dataclass
class _Replica:
    """One that is up, as seen from here."""

    prefixes: RecentPrefixes
    block_size: int  # tokens
    reported: int = 0  # outstanding tokens, as it last said
    num_placed: int = 0
    # Request -> (its number among those placed, its tokens), until a report counts it.
    uncounted: dict[str, tuple[int, int]] = field(default_factory=dict)
    num_uncounted: int = 0  # their tokens

    @property
    def load(self) -> int:
        return self.reported + self.num_uncounted

    def forget(self, request_id: str) -> None:
        _, tokens = self.uncounted.pop(request_id, (0, 0))
        self.num_uncounted -= tokens


class Router:
    """The replicas that are up, and the choice among them. Each placed request is then sent."""

    def __init__(self, first_turn: int = 0, *, has_others: bool = False) -> None:
        """`first_turn`: where ties begin; different for each of several clients.

        `has_others`: other clients route to the same replicas and do not tell where they sent a
        prefix. A prompt that is new here then goes, if that is no busier, where all would send it.
        """
        self.lengths = OutputLengths()
        self.decisions: dict[int, Counter[RoutingReason]] = {}  # by rank; they outlive its losses
        self._replicas: dict[int, _Replica] = {}
        self._places: dict[str, int] = {}  # request -> rank, while it is not counted there
        self._turn = first_turn
        self._has_others = has_others

    # -- what replicas there are --------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        """Those that are up, ascending."""
        return sorted(self._replicas)

    def add_replica(self, rank: int, block_size: int, num_blocks: int) -> None:
        """A replica is up, with an empty cache and nothing to do."""
        self.remove_replica(rank)
        prefixes = RecentPrefixes(min(num_blocks, MAX_REMEMBERED_BLOCKS))
        self._replicas[rank] = _Replica(prefixes, block_size)
        self.decisions.setdefault(rank, Counter())

    def remove_replica(self, rank: int) -> None:
        """A replica is lost, and what it had to do with it."""
        replica = self._replicas.pop(rank, None)
        for request_id in replica.uncounted if replica is not None else ():
            del self._places[request_id]

    def load(self, rank: int) -> int:
        """Outstanding tokens of a replica; 0 while it is lost."""
        replica = self._replicas.get(rank)
        return 0 if replica is None else replica.load

    def decisions_of(self, rank: int) -> dict[str, int]:
        """Requests that were placed on a replica, by reason, over all its losses."""
        counts = self.decisions.get(rank)
        return {} if counts is None else {str(reason): count for reason, count in counts.items()}

    # -- requests -----------------------------------------------------------------------------

    def place(
        self,
        request: EngineCoreRequest,
        among: Collection[int] | None = None,
        reason: RoutingReason | None = None,
    ) -> int:
        """Choose a replica and count the request there: its rank.

        `among`: ranks that are up, not none of them; None: all. `reason`: why these, if not for
        load or prefix.
        """
        ranks = self.ranks if among is None else sorted(among)
        hashes: list[int] = []
        num_cached = 0
        why: RoutingReason
        if len(self._replicas) == 1:  # nothing to choose, nothing to remember
            rank, why = ranks[0], reason or "only"
        else:
            block_size = self._replicas[ranks[0]].block_size
            hashes = prefix_hashes(request, block_size)
            found = {r: self._replicas[r].prefixes.num_found(hashes) * block_size for r in ranks}
            home = self._home(request, ranks, block_size) if not any(found.values()) else None
            rank, chosen = self._choose(len(request.prompt_token_ids), found, home)
            why, num_cached = reason or ("only" if len(ranks) == 1 else chosen), found[rank]
        self.decisions[rank][why] += 1
        replica = self._replicas[rank]
        replica.prefixes.add(hashes)
        self._count(replica, rank, request, num_cached)
        return rank

    def forget(self, request_id: str) -> None:
        """A request has ended, or is not wanted any more. Idempotent."""
        rank = self._places.pop(request_id, None)
        if rank is not None:
            self._replicas[rank].forget(request_id)

    def report(self, rank: int, num_outstanding: int, num_received: int) -> None:
        """What a replica says: its outstanding tokens, which count that many of our requests."""
        replica = self._replicas.get(rank)
        if replica is None:
            return
        replica.reported = num_outstanding
        counted = itertools.takewhile(
            lambda item: item[1][0] <= num_received, replica.uncounted.items()
        )
        for request_id in [request_id for request_id, _ in counted]:
            self.forget(request_id)

    def forget_prefixes(self) -> None:
        """The replicas' caches were emptied."""
        for replica in self._replicas.values():
            replica.prefixes.clear()

    def _home(
        self, request: EngineCoreRequest, ranks: Sequence[int], block_size: int
    ) -> int | None:
        prompt = request.prompt_token_ids
        if not self._has_others or len(prompt) <= block_size:
            return None
        num_blocks = min(HOME_BLOCKS, (len(prompt) - 1) // block_size)
        # Hashes of ints, and no others, are the same in all processes.
        return ranks[hash(tuple(prompt[: num_blocks * block_size])) % len(ranks)]

    def _choose(
        self, num_prompt: int, found: dict[int, int], home: int | None
    ) -> tuple[int, RoutingReason]:
        """The rank with the least to compute before the request is done; `found`: tokens cached.

        That is what is not in its cache, and what it has to do above the mean and the slack.
        """
        loads = {rank: self._replicas[rank].load for rank in found}
        bound = (1 + SLACK) * sum(loads.values()) / len(loads)
        costs = {
            rank: (num_prompt - found[rank] + max(0.0, load - bound), rank != home, load)
            for rank, load in loads.items()
        }
        self._turn += 1
        ranks = list(found)
        start = self._turn % len(ranks)
        rank = min(ranks[start:] + ranks[:start], key=costs.__getitem__)  # the first of equals
        least = min(loads.values())
        is_for_prefix = found[rank] > 0 and loads[rank] > least
        return rank, "prefix" if is_for_prefix else "load"

    def _count(
        self, replica: _Replica, rank: int, request: EngineCoreRequest, num_cached: int
    ) -> None:
        self.forget(request.request_id)
        replica.num_placed += 1
        tokens = self._cost(request, num_cached)
        replica.uncounted[request.request_id] = (replica.num_placed, tokens)
        replica.num_uncounted += tokens
        self._places[request.request_id] = rank

    def _cost(self, request: EngineCoreRequest, num_cached: int) -> int:
        """Tokens to compute: the prompt once, outputs of a replay again, outputs to come."""
        limit = request.sampling_params.max_tokens or UNKNOWN_LENGTH
        expected, tokens = self.lengths.expected(limit), len(request.prompt_token_ids) - num_cached
        for choice in request.choices:
            num_known = len(choice.output_token_ids)
            tokens += num_known + max(1, expected - num_known)
        return tokens


def prefix_hashes(request: EngineCoreRequest, block_size: int) -> list[int]:
    """Of each full block of the prompt with all before it, what tells it apart in this process.

    The last token is never found in a cache, since it has to be computed.
    """
    prompt = request.prompt_token_ids
    num_blocks = min((len(prompt) - 1) // block_size, MAX_HASHED_BLOCKS)
    parent = hash((request.weight_version, request.cache_salt))
    hashes = []
    for start in range(0, num_blocks * block_size, block_size):
        parent = hash((parent, *prompt[start : start + block_size]))
        hashes.append(parent)
    return hashes


def spread(loads: Iterable[float]) -> float:
    """The largest of some loads, as a multiple of their mean; 1 if there are none."""
    values = list(loads)
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0
