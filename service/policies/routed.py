"""Early binding: a router gives every request to an instance when it arrives; each has a queue of its own.

This is how a gateway in front of independent engines works (SGLang router, SMG, llm-d): what is bound waits
there, however idle the others become. A request is placed anew only where it must be: its instance is gone,
or its pass lost its KV, which a gateway answers by trying again. What a revoked pass gives back stays where
it is. The queues of the instances are those of engines: they know no targets.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from engines.profiles import Profiles
from engines.types import Capabilities, PassKind
from service.core.policy import InFlight, Instance, PassPlan, Plan, PrefillPolicy
from service.core.tracked import Tracked
from service.core.types import Lane


@dataclass(slots=True, eq=False)
class Station:
    """An instance with its own queue, and the sums that routers look at. Written by `Routed` only.

    waiting: requests in the queue. tokens, attention, history: their prompts as in the cost model, with what
    was cached here when they came. cut_*: what is left of the prompts of the last pass, until they are back.
    """

    instance: Instance
    policy: PrefillPolicy
    waiting: int = 0
    tokens: int = 0
    attention: float = 0.0
    history: int = 0
    cut_tokens: int = 0
    cut_attention: float = 0.0
    sent: deque[tuple[str, ...]] = field(default_factory=lambda: deque(maxlen=2))  # ids of the last passes

    @property
    def requests(self) -> int:
        """Live requests here: waiting, in a prefill pass, or decoding."""
        instance = self.instance
        in_passes = _size(instance.running) + _size(instance.staged)
        return self.waiting + in_passes + len(instance.decode.running)

    @property
    def tokens_ahead(self) -> int:
        """Prompt tokens that are still to be computed here, those of the passes under way included."""
        return self.tokens + self.cut_tokens + _tokens(self.instance.running) + _tokens(self.instance.staged)


def _size(flight: InFlight | None) -> int:
    return len(flight.pass_.items) if flight is not None and flight.pass_.kind is PassKind.PREFILL else 0


def _tokens(flight: InFlight | None) -> int:
    return flight.pass_.tokens if flight is not None and flight.pass_.kind is PassKind.PREFILL else 0


def _kind(station: Station) -> tuple[Capabilities, Profiles]:
    return station.instance.spec.capabilities, station.instance.spec.profiles


class Router(Protocol):
    """Where a request goes. `choose` is called once per placement; `stations` is not empty and in the order
    in which they came up. `joined` and `left` follow the fleet."""

    def joined(self, station: Station) -> None: ...

    def left(self, station: Station) -> None: ...

    def choose(self, tracked: Tracked, stations: Sequence[Station], now_s: float) -> Station: ...


class Routed:
    """`service.core.policy.PrefillPolicy` of a router over local policies, one per instance."""

    def __init__(self, router: Router, make_local: Callable[[], PrefillPolicy]) -> None:
        self._router = router
        self._make_local = make_local
        self._stations: dict[str, Station] = {}
        self._where: dict[str, tuple[Station, tuple[int, int]]] = {}  # request -> station, (new, history)
        self._sent_to: dict[str, tuple[Station, int]] = {}  # request of a recent pass -> where, its failures
        self._unplaced: dict[str, Tracked] = {}  # no instance may take them now
        self._load = {lane: [0, 0] for lane in Lane}  # requests, prompt tokens
        self._up: list[Station] = []  # the same, in a list
        self._kinds: Counter[tuple[Capabilities, Profiles]] = Counter()  # one kind takes the same requests
        self._closed: set[str] = set()  # instances that take nothing new, and some that do again

    # --- the fleet ---

    def instance_up(self, instance: Instance, now_s: float) -> None:
        station = Station(instance, self._make_local())
        self._stations[instance.instance_id] = station
        self._up.append(station)
        self._kinds[_kind(station)] += 1
        station.policy.instance_up(instance, now_s)
        self._router.joined(station)
        stranded = sorted(self._unplaced.values(), key=lambda t: t.seq)
        self._unplaced.clear()
        for tracked in stranded:
            self._place(tracked, now_s, arrival=True)

    def instance_down(self, instance: Instance, now_s: float) -> None:
        station = self._stations.pop(instance.instance_id)
        self._up.remove(station)
        self._closed.discard(instance.instance_id)
        self._kinds -= Counter([_kind(station)])
        self._router.left(station)
        while station.sent:
            self._forget_oldest_pass(station)
        stranded = sorted(station.policy.waiting(), key=lambda t: t.seq)
        for tracked in stranded:
            del self._where[tracked.request_id]
            self._place(
                tracked, now_s, arrival=True
            )  # nowhere if its KV was here: the scheduler takes it back

    def closed(self, instance: Instance, now_s: float) -> None:
        self._closed.add(instance.instance_id)
        meant = (t for t in self._stations[instance.instance_id].policy.waiting() if t.instance_id is None)
        for tracked in sorted(meant, key=lambda t: t.seq):
            self._take_out(tracked)
            self._place(tracked, now_s, arrival=True)

    # --- the queues ---

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        self._count(tracked, 1)
        self._place(tracked, now_s, arrival=arrival)

    def remove(self, tracked: Tracked) -> None:
        self._count(tracked, -1)
        if self._unplaced.pop(tracked.request_id, None) is not None:
            return
        self._take_out(tracked)

    def _take_out(self, tracked: Tracked) -> None:
        """Of the queue of its instance."""
        station, (new, history) = self._where.pop(tracked.request_id)
        station.policy.remove(tracked)
        station.waiting -= 1
        station.tokens -= new
        station.attention -= new * (new + 2 * history)
        station.history -= history
        if station.waiting == 0:
            station.attention = 0.0  # no rest from rounding

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        station = self._stations[plan.items[0].tracked.instance_id or ""]
        station.policy.dispatched(plan, now_s)
        if len(station.sent) == station.sent.maxlen:
            self._forget_oldest_pass(station)
        station.sent.append(tuple(item.tracked.request_id for item in plan.items))
        station.cut_tokens, station.cut_attention = 0, 0.0
        for item in plan.items:
            self._sent_to[item.tracked.request_id] = station, item.tracked.failures
            position = item.new_tokens + item.history
            rest = item.tracked.request.prompt_tokens - position
            station.cut_tokens += rest
            station.cut_attention += rest * (rest + 2.0 * position)

    def _forget_oldest_pass(self, station: Station) -> None:
        for request_id in station.sent.popleft():
            sent = self._sent_to.get(request_id)
            if sent is not None and sent[0] is station:
                del self._sent_to[request_id]

    def _place(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        station = self._home(tracked) or self._routed(tracked, now_s)
        if station is None:
            self._unplaced[tracked.request_id] = tracked
            return
        new, history = station.instance.item_of(tracked)
        self._where[tracked.request_id] = station, (new, history)
        station.policy.add(tracked, now_s, arrival=arrival)
        station.waiting += 1
        station.tokens += new
        station.attention += new * (new + 2 * history)
        station.history += history
        if tracked.instance_id is not None:
            station.cut_tokens = max(0, station.cut_tokens - new)
            station.cut_attention = max(0.0, station.cut_attention - new * (new + 2.0 * history))

    def _home(self, tracked: Tracked) -> Station | None:
        """Where a request goes without a router: to its KV, or where its revoked pass was."""
        if tracked.instance_id is not None:
            return self._stations.get(tracked.instance_id)
        station, failures = self._sent_to.get(tracked.request_id, (None, 0))
        if station is None or not station.instance.takes_new:
            return None
        return station if tracked.failures == failures else None

    def _routed(self, tracked: Tracked, now_s: float) -> Station | None:
        stations = self._up
        self._closed = {name for name in self._closed if not self._stations[name].instance.takes_new}
        if len(self._kinds) > 1 or self._closed or tracked.avoids is not None:
            stations = [station for station in stations if station.instance.may_take(tracked)]
        elif stations and not stations[0].instance.may_take(tracked):
            return None
        return self._router.choose(tracked, stations, now_s) if stations else None

    # --- the plan ---

    def plan(self, instance: Instance, now_s: float) -> Plan:
        station = self._stations[instance.instance_id]
        return station.policy.plan(instance, now_s) if station.waiting else None

    def late(self, now_s: float) -> list[Tracked]:
        return []

    def waiting(self) -> Iterator[Tracked]:
        queues = (station.policy.waiting() for station in self._stations.values())
        return chain(chain.from_iterable(queues), self._unplaced.values())

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        requests, tokens = self._load[lane]
        return requests, tokens

    def window(self) -> tuple[float, int]:
        return 0.0, 0

    def _count(self, tracked: Tracked, sign: int) -> None:
        load = self._load[tracked.lane]
        load[0] += sign
        load[1] += sign * tracked.remaining
