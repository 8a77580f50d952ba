"""The link over which finished prefills hand their KV to decode instances: a model, and pacing.

A pass that ends makes the KV of all its prompts ready at one instant (the open problem D2 of the LAPS talk).
Three things shape the burst:

    budget     pulls take `budget_ratio` of the link's rate and no more, so whoever else uses the link keeps
               the rest at every moment
    streaming  the KV of a chunk is offered when its pass ends (`more`), not all of a prompt at its end
    order      one pull at a time, at the full rate allowed: with equal shares all of a burst would end late.
               Next is the one needed first,

                   needed = offered + stretch x (time that the whole request takes on the link alone)

               looked at anew after every `granule_bytes`. A stretch of 0 is first come, first served, where
               one long prompt holds up all short ones behind it; a very large one is smallest first. No pull
               waits for any that was offered after it was needed, so none starves. Prompts that are not
               whole yet come last: nobody waits for their KV. So streaming costs a pull no more than the
               granules under way when it, or another one that is needed sooner, has its turn.

Time to the first token is untouched by all of it: that token comes from prefill. What a budget costs is the
time until decode can begin, and blocks that are held longer on the prefill side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """bytes_per_s: of the link; 50e9 is 400 Gbit/s. budget_ratio: of that rate, what pulls may take, above 0
    and at most 1. stretch: see the module text. granule_bytes: what is never cut; 8 MiB are a block of 32
    tokens of a model with 256 KiB a token. Why these defaults: docs/scheduling.md, Hand-over."""

    bytes_per_s: float
    budget_ratio: float = 0.5
    stretch: float = 1.0
    granule_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if not 0.0 < self.bytes_per_s < math.inf:
            raise ValueError(f"bytes_per_s must be above 0 and finite, got {self.bytes_per_s}")
        if not 0.0 < self.budget_ratio <= 1.0:
            raise ValueError(f"budget_ratio must be above 0 and at most 1, got {self.budget_ratio}")
        if not 0.0 <= self.stretch < math.inf:
            raise ValueError(f"stretch must be at least 0 and finite, got {self.stretch}")
        if self.granule_bytes < 1:
            raise ValueError(f"granule_bytes must be at least 1, got {self.granule_bytes}")

    @property
    def pull_bytes_per_s(self) -> float:
        return self.budget_ratio * self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request whose KV has arrived. Seconds: when the last of it was offered, and when it had arrived."""

    request_id: str
    size_bytes: int
    offered_s: float
    end_s: float

    @property
    def delay_s(self) -> float:
        return self.end_s - self.offered_s


_Rank = tuple[bool, float, int]  # more to come, needed, number


@dataclass(slots=True)
class _Pull:
    """rank: while it has bytes to send, lowest first."""

    request_id: str
    of_bytes: int
    offered_s: float = 0.0
    offered_bytes: int = 0
    left_bytes: int = 0
    more: bool = True
    dropped: bool = False
    rank: _Rank = (True, 0.0, 0)


class KvLink:
    """One link. Calls come in order of time; `advance` to `next_s` keeps it going.

    busy: (from, to) in seconds, apart from each other, when it carried something, at the rate allowed.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self.settings = settings
        self.busy: list[tuple[float, float]] = []
        self.bytes_carried = 0
        self._pulls: dict[str, _Pull] = {}
        self._waiting: list[tuple[_Rank, _Pull]] = []  # a heap
        self._arrived: list[Transfer] = []  # not told yet
        self._count = 0
        self._current: _Pull | None = None
        self._turn_bytes = 0  # of the current pull, until `_end_s`
        self._start_s = self._end_s = 0.0

    @property
    def next_s(self) -> float | None:
        """When the link has to look again; None while it has nothing to carry."""
        return None if self._current is None else self._end_s

    @property
    def waiting_bytes(self) -> int:
        """Offered and not known to have been carried."""
        return sum(pull.left_bytes for pull in self._pulls.values())

    def offer(
        self,
        request_id: str,
        size_bytes: int,
        now_s: float,
        *,
        of_bytes: int | None = None,
        more: bool = False,
    ) -> None:
        """`size_bytes` of a request can be pulled from now on.

        of_bytes: of the whole request, by which it is ranked; said with its first piece. more: there is more
        to come.
        Raises ValueError for an empty piece.
        """
        if size_bytes < 1:
            raise ValueError(f"{request_id}: size_bytes must be at least 1, got {size_bytes}")
        self._run(now_s)
        pull = self._pulls.get(request_id)
        if pull is None:
            pull = self._pulls[request_id] = _Pull(request_id, of_bytes or size_bytes)
        if pull.left_bytes == 0 or not more:
            self._rank(pull, now_s, more)
        pull.offered_s, pull.more = now_s, more
        pull.offered_bytes += size_bytes
        pull.left_bytes += size_bytes
        if self._current is None:
            self._begin(now_s)
        elif self._waiting and self._waiting[0][0] < self._current.rank:
            self._cut(now_s)

    def advance(self, now_s: float) -> tuple[Transfer, ...]:
        """Requests that have arrived whole and were not told yet, in order."""
        self._run(now_s)
        arrived, self._arrived = tuple(self._arrived), []
        return arrived

    def drop(self, request_id: str, now_s: float) -> None:
        """Give up what is left of a request, but for the granule under way. It does not arrive."""
        self._run(now_s)
        pull = self._pulls.pop(request_id, None)
        if pull is not None:
            pull.dropped = True
            if pull is self._current:
                self._cut(now_s)
            else:
                self._leave(pull)

    def _rank(self, pull: _Pull, now_s: float, more: bool) -> None:
        """Give it a new place among those that wait."""
        alone_s = pull.of_bytes / self.settings.pull_bytes_per_s
        self._count += 1
        pull.rank = (more, now_s + self.settings.stretch * alone_s, self._count)
        if pull is not self._current:
            if pull.left_bytes:
                self._leave(pull)
            heappush(self._waiting, (pull.rank, pull))

    def _leave(self, pull: _Pull) -> None:
        self._waiting = [entry for entry in self._waiting if entry[1] is not pull]
        heapify(self._waiting)

    def _run(self, now_s: float) -> None:
        while (pull := self._current) is not None and self._end_s <= now_s:
            at_s = self._end_s
            pull.left_bytes -= self._turn_bytes
            self._note()
            if not pull.dropped:
                if pull.left_bytes:
                    heappush(self._waiting, (pull.rank, pull))
                elif not pull.more:
                    del self._pulls[pull.request_id]
                    self._arrived.append(Transfer(pull.request_id, pull.offered_bytes, pull.offered_s, at_s))
            self._begin(at_s)

    # --- one turn: a pull from a start to its end or the next one that goes before it ---

    def _begin(self, now_s: float) -> None:
        self._current = heappop(self._waiting)[1] if self._waiting else None
        if self._current is not None:
            self._start_s = now_s
            self._take(self._current.left_bytes)

    def _cut(self, now_s: float) -> None:
        """End the turn with the granule that is under way."""
        granule = self.settings.granule_bytes
        done = math.floor((now_s - self._start_s) * self.settings.pull_bytes_per_s / granule)
        if (done + 1) * granule < self._turn_bytes:
            self._take((done + 1) * granule)

    def _take(self, size_bytes: int) -> None:
        self._turn_bytes = size_bytes
        self._end_s = self._start_s + size_bytes / self.settings.pull_bytes_per_s

    def _note(self) -> None:
        self.bytes_carried += self._turn_bytes
        if self.busy and self.busy[-1][1] == self._start_s:
            self.busy[-1] = (self.busy[-1][0], self._end_s)
        else:
            self.busy.append((self._start_s, self._end_s))


def peak_bytes_per_s(link: KvLink, over_s: float) -> float:
    """The highest rate over any stretch of `over_s`: what another user of the link feels.

    Raises ValueError where `over_s` is not above 0.
    """
    if not over_s > 0.0:
        raise ValueError(f"over_s must be above 0, got {over_s}")
    # The load over a sliding stretch is piecewise linear: its peak begins or ends with something.
    busy, most_s, first, inside_s = link.busy, 0.0, 0, 0.0
    for start_s, end_s in busy:  # stretches that end with this one
        inside_s += end_s - start_s
        while busy[first][1] <= end_s - over_s:
            inside_s -= busy[first][1] - busy[first][0]
            first += 1
        cut_s = max(0.0, end_s - over_s - busy[first][0])
        most_s = max(most_s, inside_s - cut_s)
    return link.settings.pull_bytes_per_s * min(most_s, over_s) / over_s
