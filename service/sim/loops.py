"""The sources of requests: open loop, closed loop, sessions.

An *open loop* sends at its own times, whatever the service does. A *closed loop* has a number of clients,
each with one request at a time (how LAPS measured). *Sessions* are conversations: the next turn follows the
end of the one before after a time to think; sessions begin at times of their own, or are so many at a time.

A request that was refused ends like one that was answered: its client goes on. If it ended in the instant in
which it came, its client waits `REFUSED_PAUSE_S` first; without that, a closed loop that is refused would
send without end at one instant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from service.core.types import Lane, Request
from service.sim.arrivals import Floats, RateProfile, Shares, arrival_times
from service.sim.contents import Content, Drawn
from service.sim.conversations import Conversation, ConversationContent
from service.sim.workload import REPORT_SHORT_TOKENS, Arrival

REFUSED_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Targets:
    """The time-to-first-token targets of the metric, seconds.

    cost_request_s: predicted seconds of a request alone, of (new tokens, history tokens).
    short: `short_s`. long: max(`short_s`, `long_factor` x alone + `long_offset_s`).
    """

    cost_request_s: Callable[[int, int], float]
    short_s: float = 0.4
    long_factor: float = 3.0
    long_offset_s: float = 0.2

    def of(self, prompt_tokens: int, cached_tokens: int) -> tuple[Lane, float]:
        """The lane that a request is reported under, and its target."""
        new_tokens = prompt_tokens - cached_tokens
        if new_tokens <= REPORT_SHORT_TOKENS:
            return Lane.SHORT, self.short_s
        alone_s = self.cost_request_s(new_tokens, cached_tokens)
        return Lane.LONG, max(self.short_s, self.long_factor * alone_s + self.long_offset_s)


class Issuer:
    """Numbers requests and gives them their targets; stops at `requests_max` or after `seconds`."""

    def __init__(self, targets: Targets, requests_max: int | None, seconds: float | None) -> None:
        if requests_max is None and seconds is None:
            raise ValueError("requests_max or seconds must be given: the source would never end")
        if requests_max is not None and requests_max < 1:
            raise ValueError(f"requests_max must be at least 1, got {requests_max}")
        if seconds is not None and not seconds > 0.0:
            raise ValueError(f"seconds must be above 0, got {seconds}")
        self._targets = targets
        self._requests_max = float("inf") if requests_max is None else requests_max
        self._seconds = float("inf") if seconds is None else seconds
        self.issued = 0

    def open_at(self, time_s: float) -> bool:
        """Whether a request may still be sent at `time_s`."""
        return self.issued < self._requests_max and time_s <= self._seconds

    def issue(self, drawn: Drawn, time_s: float, session: str = "") -> Arrival:
        prompt_tokens, output_tokens, hashes, cached_tokens, _ = drawn
        lane, target_s = self._targets.of(prompt_tokens, cached_tokens)
        request_id = f"r{self.issued}"
        self.issued += 1
        return Arrival(
            Request(
                request_id,
                prompt_tokens,
                output_tokens,
                time_s,
                hashes,
                ttft_target_s=target_s,
                session=session,
            ),
            lane,
        )


class OpenLoop:
    """Requests at times of their own."""

    def __init__(
        self, issuer: Issuer, contents: Sequence[Content], plan: Iterator[tuple[float, int]]
    ) -> None:
        self._issuer, self._contents, self._plan = issuer, contents, plan

    def next_arrival(self) -> Arrival | None:
        time_s, part = next(self._plan)
        if not self._issuer.open_at(time_s):
            return None
        drawn = self._contents[part].draw()
        return self._issuer.issue(drawn, time_s, drawn.session)

    def ended(self, request: Request, now_s: float) -> Iterable[Arrival]:
        return ()


class ClosedLoop:
    """`concurrency` clients, each with one request at a time; all send their first at 0."""

    def __init__(self, issuer: Issuer, contents: Sequence[Content], shares: Shares, concurrency: int) -> None:
        self._issuer, self._contents, self._shares = issuer, contents, shares
        self._concurrency = concurrency
        self._started = 0

    def next_arrival(self) -> Arrival | None:
        if self._started == self._concurrency:
            return None
        self._started += 1
        return self._send(0.0)

    def ended(self, request: Request, now_s: float) -> Iterable[Arrival]:
        arrival = self._send(_free_s(request, now_s))
        return () if arrival is None else (arrival,)

    def _send(self, now_s: float) -> Arrival | None:
        if not self._issuer.open_at(now_s):
            return None
        return self._issuer.issue(self._contents[self._shares.draw_one(now_s)].draw(), now_s)


class Sessions:
    """Conversations, one turn at a time each.

    plan: when sessions begin and of which part. concurrency: instead, so many sessions at any time, each
    followed by a new one as soon as its last turn ended.
    """

    def __init__(
        self,
        issuer: Issuer,
        contents: Sequence[ConversationContent],
        *,
        plan: Iterator[tuple[float, int]] | None = None,
        shares: Shares | None = None,
        concurrency: int = 0,
    ) -> None:
        self._issuer, self._contents = issuer, contents
        self._plan, self._shares, self._concurrency = plan, shares, concurrency
        self._live: dict[str, Conversation] = {}
        self._begun = 0

    def next_arrival(self) -> Arrival | None:
        if self._plan is not None:
            return self._begin(*next(self._plan))
        if self._begun == self._concurrency:
            return None
        return self._begin_next(0.0)

    def ended(self, request: Request, now_s: float) -> Iterable[Arrival]:
        turn = next(self._live[request.session], None)
        free_s = _free_s(request, now_s)
        if turn is None:
            del self._live[request.session]
            arrival = self._begin_next(free_s) if self._plan is None else None
        elif self._issuer.open_at(free_s + turn.think_s):
            arrival = self._issuer.issue(turn.drawn, free_s + turn.think_s, request.session)
        else:
            arrival = None
        return () if arrival is None else (arrival,)

    def _begin_next(self, now_s: float) -> Arrival | None:
        assert self._shares is not None
        return self._begin(now_s, self._shares.draw_one(now_s))

    def _begin(self, time_s: float, part: int) -> Arrival | None:
        if not self._issuer.open_at(time_s):
            return None
        conversation = self._contents[part].start()
        session = f"s{self._begun}"
        self._begun += 1
        self._live[session] = conversation
        return self._issuer.issue(next(conversation).drawn, time_s, session)


def _free_s(request: Request, now_s: float) -> float:
    """When the client of a request that ended may go on."""
    return now_s + REFUSED_PAUSE_S if now_s <= request.arrival_s else now_s


def plan_of(gaps: Iterator[Floats], profile: RateProfile, shares: Shares) -> Iterator[tuple[float, int]]:
    """(time, part) of each arrival."""
    for block in arrival_times(gaps, profile):
        yield from zip(block.tolist(), shares.draw(block).tolist(), strict=True)
