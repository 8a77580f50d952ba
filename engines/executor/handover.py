"""The decode side of a hand-over: which tickets it takes, and how long it waits for their KV.

An executor may wait for ever for blocks that the other side has evicted or lost (TensorRT-LLM issue 12542).
So a generation-only call has a deadline for its first token.
"""

from __future__ import annotations

from collections.abc import Iterable

from engines.executor.calls import InFlight, Note
from engines.executor.types import ContextTicket, Incident
from engines.types import EngineRequest


def check_ticket(request: EngineRequest, ticket: ContextTicket, fingerprint: str, block_tokens: int) -> None:
    """Raises ValueError for a ticket of another engine, or one that leaves nothing to decode."""
    for name, value in (("fingerprint", fingerprint), ("block_tokens", block_tokens)):
        if getattr(ticket, name) != value:
            raise ValueError(
                f"{name}: the ticket of {request.request_id} has {getattr(ticket, name)!r}, this engine "
                f"{value!r}; both sides of a hand-over must run the same bundle"
            )
    given = len(ticket.first_gen_tokens)
    if given < 1:
        raise ValueError("first_gen_tokens: the ticket has none; the prefill side must give the first token")
    if given >= request.max_new_tokens:
        raise ValueError(
            f"max_new_tokens: of {request.max_new_tokens} the prefill side gave {given}; nothing is left"
        )


def expire(calls: Iterable[InFlight], now_s: float, timeout_s: float, note: Note) -> None:
    """Fail those whose first token did not come in time."""
    for call in calls:
        if call.deadline_s is None or call.stream is None:
            continue
        if call.stream.received or call.stream.ended:
            call.deadline_s = None
        elif now_s >= call.deadline_s:
            call.deadline_s = None
            what = f"transfer: no token within {timeout_s} s"
            note(Incident.TRANSFER_TIMED_OUT, f"call {call.call.call_id}: {what}")
            call.stream.fail(what)


def postpone(calls: Iterable[InFlight], by_s: float) -> None:
    """Nobody listened for so long."""
    for call in calls:
        if call.deadline_s is not None:
            call.deadline_s += by_s
