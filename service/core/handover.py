"""Hand-over of finished prefills to a decode instance: states, deadlines, held blocks.

KV blocks stay on the prefill side until they are pulled, so every live state has a deadline and held blocks
count against admission. A hand-over that expires or fails is prefilled again, once, if the decode side has
emitted nothing (`may_prefill_again`). The first token comes from prefill; the decode side starts after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.core.lifecycle import HANDOVER, HandoverState, step


@dataclass(frozen=True, slots=True)
class HandoverDeadlines:
    """Seconds that a hand-over may stay in each live state."""

    prefilled_s: float = 1.0
    offered_s: float = 5.0
    pulled_s: float = 1.0

    def of(self, state: HandoverState) -> float | None:
        return {
            HandoverState.PREFILLED: self.prefilled_s,
            HandoverState.OFFERED: self.offered_s,
            HandoverState.PULLED: self.pulled_s,
        }.get(state)


@dataclass(slots=True)
class Handover:
    """One hand-over. `fingerprint` names the engine build; both sides must match."""

    request_id: str
    fingerprint: str
    blocks: int
    since_s: float
    state: HandoverState = HandoverState.PREFILLED
    prefills: int = 1


class HandoverTable:
    """All live hand-overs of one prefill instance."""

    def __init__(self, deadlines: HandoverDeadlines, fingerprint: str) -> None:
        self._deadlines = deadlines
        self._fingerprint = fingerprint
        self._live: dict[str, Handover] = {}

    @property
    def blocks_held(self) -> int:
        """Blocks that admission must count as taken."""
        return sum(entry.blocks for entry in self._live.values())

    def begin(self, request_id: str, blocks: int, now_s: float, *, prefills: int = 1) -> Handover:
        if request_id in self._live:
            raise ValueError(f"hand-over of {request_id} is already under way")
        entry = Handover(request_id, self._fingerprint, blocks, now_s, prefills=prefills)
        self._live[request_id] = entry
        return entry

    def offer(self, request_id: str, decode_fingerprint: str, now_s: float) -> HandoverState:
        """OFFERED, or FAILED when the decode side runs another build (its KV layout may differ)."""
        matches = decode_fingerprint == self._fingerprint
        return self._move(request_id, HandoverState.OFFERED if matches else HandoverState.FAILED, now_s)

    def pulled(self, request_id: str, now_s: float) -> HandoverState:
        return self._move(request_id, HandoverState.PULLED, now_s)

    def done(self, request_id: str, now_s: float) -> HandoverState:
        return self._move(request_id, HandoverState.DONE, now_s)

    def failed(self, request_id: str, now_s: float) -> HandoverState:
        return self._move(request_id, HandoverState.FAILED, now_s)

    def expire(self, now_s: float) -> tuple[Handover, ...]:
        """Hand-overs whose state outlived its deadline; they leave the table, their blocks are free."""
        late = [entry for entry in self._live.values() if now_s >= self._deadline_s(entry)]
        for entry in late:
            self._move(entry.request_id, HandoverState.EXPIRED, now_s)
        return tuple(late)

    def next_deadline_s(self) -> float | None:
        return min((self._deadline_s(entry) for entry in self._live.values()), default=None)

    def _deadline_s(self, entry: Handover) -> float:
        allowed_s = self._deadlines.of(entry.state)
        assert allowed_s is not None, "an ended hand-over is not in the table"
        return entry.since_s + allowed_s

    def _move(self, request_id: str, state: HandoverState, now_s: float) -> HandoverState:
        entry = self._live[request_id]
        entry.state = step(HANDOVER, entry.state, state, f"hand-over of {request_id}")
        entry.since_s = now_s
        if not HANDOVER[state]:
            del self._live[request_id]
        return state


def may_prefill_again(entry: Handover, *, decode_emitted: bool) -> bool:
    """One re-prefill at most, and none once the client has seen a token that prefill did not give."""
    return entry.prefills < 2 and not decode_emitted
