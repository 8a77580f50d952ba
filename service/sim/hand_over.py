"""Hand-over of KV in a run: what the passes of a prompt computed goes over a link to the decode side.

Each instance has a link, or all share one. The life of a hand-over is the core's table (`core/handover`): it
begins with the first token, is offered at once, and is pulled when its last byte has arrived. Until then its
blocks count as taken where admission looks (`KvBudget`), so a link that is too slow ends up holding dispatch
back. Expired and failed ones are counted, and not prefilled again. Not modelled: decode instances (any number
of pulls may go to one), and the round trip from an offer to the first byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from engines.models import load_model
from service.core.handover import HandoverDeadlines, HandoverTable
from service.core.kv_link import KvLink, LinkSettings, peak_bytes_per_s
from service.core.scheduler import PrefillScheduler
from service.core.types import Request
from service.sim.agenda import Agenda

BUILD = "one"  # all instances of a run are of one build


@dataclass(frozen=True, slots=True)
class HandOverSettings:
    """link: of each instance, or the one that all share. bytes_per_token: of KV. streamed: chunks are offered
    as they are done, not all of a prompt at its end."""

    link: LinkSettings
    bytes_per_token: int
    streamed: bool = True
    shared: bool = False
    deadlines: HandoverDeadlines = field(default_factory=HandoverDeadlines)

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1:
            raise ValueError(f"bytes_per_token must be at least 1, got {self.bytes_per_token}")


def kv_bytes(model: str) -> int:
    """KV bytes a token, from the model's shape. Raises ValueError where that is not known."""
    shape = load_model(model).shape
    if shape is None:
        raise ValueError(f"{model}: its shape must be known, for the KV bytes of a token")
    return shape.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Seconds: first token, and when decode could begin."""

    request: Request
    instance_id: str
    first_token_s: float
    decode_s: float

    @property
    def delay_s(self) -> float:
        return self.decode_s - self.first_token_s


@dataclass(frozen=True, slots=True)
class HandOverFigures:
    """Of a run. delay: from first token to decode, seconds, None where nothing was handed over. peak: of the
    busiest link over 100 ms. held_bytes_max: of prompts with a first token, all instances together."""

    handed_over: int
    delay_s_mean: float | None
    delay_s_p99: float | None
    peak_bytes_per_s: float
    held_bytes_max: int
    expired: int
    failed: int


@dataclass(slots=True)
class _Line:
    """A link and the instances behind it. wake_s: when it is next looked at."""

    link: KvLink
    places: list[_Place] = field(default_factory=list)
    wake_s: float | None = None


@dataclass(slots=True, eq=False)
class _Place:
    """The prefill side of one instance."""

    instance_id: str
    line: _Line
    table: HandoverTable
    sent_tokens: dict[str, int] = field(default_factory=dict)  # offered so far
    whole: dict[str, tuple[Request, float]] = field(default_factory=dict)  # with its first token, since when


class HandOvers:
    """The hand-overs of one run: give a fresh one to `kernel.run`, and ask it afterwards."""

    def __init__(self, settings: HandOverSettings) -> None:
        self.settings = settings
        self.done: list[HandedOver] = []
        self.expired = 0
        self.failed = 0
        self.held_bytes_max = 0  # of prompts with a first token, all instances together
        self.held_byte_s = 0.0
        self._held_bytes = 0
        self._held_since_s = 0.0
        self._places: dict[str, _Place] = {}
        self._at: dict[str, _Place] = {}  # by request
        self._lines: list[_Line] = []

    def begin(self, agenda: Agenda, scheduler: PrefillScheduler, freed: Callable[[], None]) -> None:
        """Called by the kernel. freed: to be told that blocks are free again."""
        self._agenda, self._scheduler, self._freed = agenda, scheduler, freed

    @property
    def links(self) -> tuple[KvLink, ...]:
        return tuple(line.link for line in self._lines)

    def figures(self) -> HandOverFigures:
        delays_s = sorted(each.delay_s for each in self.done)
        return HandOverFigures(
            handed_over=len(delays_s),
            delay_s_mean=fmean(delays_s) if delays_s else None,
            delay_s_p99=delays_s[math.ceil(0.99 * len(delays_s)) - 1] if delays_s else None,
            peak_bytes_per_s=max((peak_bytes_per_s(link, 0.1) for link in self.links), default=0.0),
            held_bytes_max=self.held_bytes_max,
            expired=self.expired,
            failed=self.failed,
        )

    def computed(self, instance_id: str, request: Request, position: int, *, whole: bool) -> None:
        """The KV of `position` tokens of a prompt exists now; whole: with them all and the first token.

        Raises ValueError for a request that is to decode here.
        """
        if request.max_new_tokens > 1:
            raise ValueError(
                f"{request.request_id} asks for {request.max_new_tokens} tokens: with a hand-over a request "
                "ends with its first one, and the rest is decoded elsewhere"
            )
        now_s, place = self._agenda.now_s, self._place(instance_id)
        if self._at.get(request.request_id, place) is not place:
            self.ended(request.request_id)  # it began on another instance and lost its KV there
        before = place.sent_tokens.get(request.request_id, 0)
        if whole:
            self._hold(place, request, now_s)
        elif not self.settings.streamed or position <= before:
            return
        self._at[request.request_id] = place
        place.sent_tokens[request.request_id] = position
        size_bytes = (position - before) * self.settings.bytes_per_token
        link = place.line.link
        link.offer(request.request_id, size_bytes, now_s, of_bytes=self._bytes(request), more=not whole)
        self._look_again(place.line)

    def ended(self, request_id: str) -> None:
        """The request was cancelled or refused: whatever of it waits is given up."""
        place = self._at.pop(request_id, None)
        if place is None:
            return
        if request_id in place.whole:
            self.failed += 1
            place.table.failed(request_id, self._agenda.now_s)
        self._give_up(place, request_id)

    def lost(self, instance_id: str) -> None:
        """The process ended, and with it all KV that waits there."""
        place = self._places.pop(instance_id, None)
        if place is not None:
            for request_id in list(place.sent_tokens):
                self.ended(request_id)
            place.line.places.remove(place)

    # --- inside ---

    def _place(self, instance_id: str) -> _Place:
        place = self._places.get(instance_id)
        if place is None:
            if not self._lines or not self.settings.shared:
                self._lines.append(_Line(KvLink(self.settings.link)))
            table = HandoverTable(self.settings.deadlines, BUILD)
            place = self._places[instance_id] = _Place(instance_id, self._lines[-1], table)
            place.line.places.append(place)
        return place

    def _bytes(self, request: Request) -> int:
        return request.prompt_tokens * self.settings.bytes_per_token

    def _hold(self, place: _Place, request: Request, now_s: float) -> None:
        kv = self._scheduler.instances[place.instance_id].kv
        kv.reserve(_held(request.request_id), request.prompt_tokens)
        place.table.begin(request.request_id, kv.blocks_for(request.prompt_tokens), now_s)
        place.table.offer(request.request_id, BUILD, now_s)
        place.whole[request.request_id] = (request, now_s)
        self._account(self._bytes(request))

    def _account(self, more_bytes: int) -> None:
        now_s = self._agenda.now_s
        self.held_byte_s += self._held_bytes * (now_s - self._held_since_s)
        self._held_since_s = now_s
        self._held_bytes += more_bytes
        self.held_bytes_max = max(self.held_bytes_max, self._held_bytes)

    def _look_again(self, line: _Line) -> None:
        """Ask to be woken when the turn of the link ends, or a deadline before that."""
        wake_s = line.link.next_s
        if wake_s is None:
            return
        for place in line.places:
            wake_s = min(wake_s, place.table.next_deadline_s() or wake_s)
        if wake_s != line.wake_s:
            line.wake_s = wake_s
            self._agenda.at(wake_s, self._advance, line)

    def _advance(self, line: _Line) -> None:
        now_s = self._agenda.now_s
        for transfer in line.link.advance(now_s):
            place = self._at.pop(transfer.request_id)
            request, first_token_s = place.whole[transfer.request_id]
            place.table.pulled(transfer.request_id, transfer.end_s)
            place.table.done(transfer.request_id, transfer.end_s)
            self.done.append(HandedOver(request, place.instance_id, first_token_s, transfer.end_s))
            self._forget(place, transfer.request_id)
        for place in line.places:
            for entry in place.table.expire(now_s):
                self.expired += 1
                del self._at[entry.request_id]
                self._give_up(place, entry.request_id)
        self._look_again(line)

    def _give_up(self, place: _Place, request_id: str) -> None:
        place.line.link.drop(request_id, self._agenda.now_s)
        self._forget(place, request_id)
        self._look_again(place.line)

    def _forget(self, place: _Place, request_id: str) -> None:
        place.sent_tokens.pop(request_id, None)
        whole = place.whole.pop(request_id, None)
        if whole is None:
            return
        self._account(-self._bytes(whole[0]))
        instance = self._scheduler.instances.get(place.instance_id)
        if instance is not None:
            instance.kv.release(_held(request_id))
            self._freed()


def _held(request_id: str) -> str:
    """The name under which blocks are kept once the request itself has ended."""
    return f"hand-over/{request_id}"
