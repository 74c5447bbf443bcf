"""When requests are sent: all at once, at random intervals of a given rate, or along a ramp."""

import math
import random
from dataclasses import dataclass
from typing import Literal

RampUp = Literal["linear", "exponential"]


@dataclass(frozen=True)
class Arrivals:
    """`rate`: requests a second, inf for all at once. `burstiness`: shape of the gamma distributed
    intervals; 1 is a Poisson process, less is burstier, more is steadier. With `ramp_up` the rate
    goes from `start_rate` to `end_rate` over the run and `rate` is not used.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp_up: RampUp | None = None
    start_rate: float = 0.0
    end_rate: float = 0.0

    def times(self, count: int, rng: random.Random) -> list[float]:
        """`count` ascending times in seconds; the first request is sent at 0.

        Without a ramp the intervals are scaled to add up to what the rate promises, so that the
        offered load does not depend on the seed.
        """
        if self.ramp_up is None and math.isinf(self.rate):
            return [0.0] * count
        intervals = [
            rng.gammavariate(self.burstiness, 1 / self.burstiness) / self._rate_at(i, count)
            for i in range(1, count)
        ]
        total = sum(intervals)
        scale = (count - 1) / self.rate / total if self.ramp_up is None and total else 1.0
        times = [0.0]
        for interval in intervals:
            times.append(times[-1] + interval * scale)
        return times[:count]

    def _rate_at(self, number: int, count: int) -> float:
        if self.ramp_up is None:
            return self.rate
        progress = number / max(1, count - 1)
        if self.ramp_up == "linear":
            return self.start_rate + (self.end_rate - self.start_rate) * progress
        return float(self.start_rate * (self.end_rate / self.start_rate) ** progress)
