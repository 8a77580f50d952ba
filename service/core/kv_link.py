"""The link over which finished prefills hand their KV to decode instances: a model, and pacing.

A pass that ends with many requests starts many transfers at once; the larger the batch, the higher the burst
(the open problem D2 of the LAPS talk). Transfers of a link go one after the other in the order in which they
were offered, each at the full rate that it is allowed: with equal shares all of a burst would end late, with
a queue the first ends as early as it can and the last no later.

    unpaced   the rate is that of the link, `bytes_per_s`
    paced     the rate is `budget_ratio` of it, so that whoever else uses the link keeps the rest

Time to the first token is untouched by either: that token comes from prefill. What pacing costs is the time
until decode can begin, and blocks that are held longer on the prefill side.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """bytes_per_s: of the link. latency_s: from the offer to the first byte. budget_ratio: of the rate that
    pulls may take, above 0 and at most 1."""

    bytes_per_s: float
    latency_s: float = 0.0
    budget_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s must be above 0 and finite, got {self.bytes_per_s}")
        if not 0.0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be at least 0 and finite, got {self.latency_s}")
        if not 0.0 < self.budget_ratio <= 1.0:
            raise ValueError(f"budget_ratio must be above 0 and at most 1, got {self.budget_ratio}")

    @property
    def pull_bytes_per_s(self) -> float:
        return self.budget_ratio * self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Transfer:
    """One pull. Seconds: offered, when its bytes begin to flow, when the last has arrived."""

    request_id: str
    size_bytes: int
    offered_s: float
    start_s: float
    end_s: float

    @property
    def waited_s(self) -> float:
        """Behind others, latency not counted."""
        return self.start_s - self.offered_s


class KvLink:
    """One link. Calls come in order of time."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._free_s = -math.inf  # when the last transfer has left the link
        self._under_way: deque[Transfer] = deque()
        self.bytes_offered = 0
        self.waiting_bytes_max = 0  # largest amount that was offered and had not arrived

    def offer(self, request_id: str, size_bytes: int, now_s: float) -> Transfer:
        """Plan the pull of a finished prefill. Raises ValueError for an empty one."""
        if size_bytes < 1:
            raise ValueError(f"{request_id}: size_bytes must be at least 1, got {size_bytes}")
        settings = self._settings
        start_s = max(now_s + settings.latency_s, self._free_s)
        end_s = start_s + size_bytes / settings.pull_bytes_per_s
        self._free_s = end_s
        transfer = Transfer(request_id, size_bytes, now_s, start_s, end_s)
        self._under_way.append(transfer)
        self.bytes_offered += size_bytes
        self.waiting_bytes_max = max(self.waiting_bytes_max, self.waiting_bytes(now_s))
        return transfer

    def arrived(self, now_s: float) -> tuple[Transfer, ...]:
        """Those that have ended since the last call, in order."""
        ended = []
        while self._under_way and self._under_way[0].end_s <= now_s:
            ended.append(self._under_way.popleft())
        return tuple(ended)

    def waiting_bytes(self, now_s: float) -> int:
        """Offered and not arrived yet, whole transfers: their blocks are held on the prefill side."""
        return sum(t.size_bytes for t in self._under_way if t.end_s > now_s)


def peak_bytes_per_s(transfers: tuple[Transfer, ...], over_s: float) -> float:
    """The highest rate over any stretch of `over_s`: what another user of the link feels.

    Raises ValueError where `over_s` is not above 0.
    """
    if not over_s > 0.0:
        raise ValueError(f"over_s must be above 0, got {over_s}")

    def carried(from_s: float) -> float:
        """Bytes that flow in [from_s, from_s + over_s)."""
        total = 0.0
        for t in transfers:
            shared_s = min(t.end_s, from_s + over_s) - max(t.start_s, from_s)
            if shared_s > 0.0:
                total += t.size_bytes * shared_s / (t.end_s - t.start_s)
        return total

    # The load over a sliding stretch is piecewise linear: its peak lies where one begins or ends.
    moments = [t.start_s for t in transfers] + [t.end_s - over_s for t in transfers]
    return max((carried(moment) for moment in moments), default=0.0) / over_s
