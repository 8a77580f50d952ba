"""The requests that an engine holds, the calls that it made for them, and how answers reach them.

A request has one real call, and before that one call a part of its prompt. A *part* is over with its call: it
leaves blocks in the cache and holds nothing. A real call holds blocks until it ends, on the prefill side of a
hand-over until its KV was pulled.

Admission. The executor starts a call only when its whole need is sure to fit beside those that run (its
policy GUARANTEED_NO_EVICT), and leaves it in its queue until then, with everything behind it. So the same sum
is done here before a call is sent: what real calls may grow to, and blocks that have leaked, are taken. Parts
are left out, since they end by themselves.

Ranks against eviction. A part's blocks rank highest until the next part has found them. A block keeps its
rank when it is found by a call that asks for none (read in a source near 1.x, loadOrAllocateBlocks and
claimBlock). So the real call asks for an ordinary one, also for blocks that a session shares; and of parts
whose request is given up the rank ends with time, where a backend can be told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from engines.blocks import chain_hash, chain_hashes
from engines.executor.ledger import Ledger
from engines.executor.stream import AnswerStream, Output
from engines.executor.types import (
    Answer,
    Call,
    CallKind,
    ContextTicket,
    Ending,
    Incident,
)
from engines.types import Capabilities, EngineRequest

PART_PRIORITY = 100  # of blocks that the next part of a prompt needs, against eviction; 0 to 100
PART_PRIORITY_S = 120.0  # its rank after that ends: the next part is late, or never comes
RETAIN_PRIORITY = 80  # of a session's
ORDINARY_PRIORITY = 35  # an executor's own, of blocks that nobody ranks

Note = Callable[[Incident, str], None]


@dataclass(slots=True, eq=False)
class InFlight:
    """A call that was made.

    start: prompt tokens that it was to find in the cache; reused: that it found, where the executor said so.
    blocks: its whole need. stream: of a real call, its answer; None for a part. mark: of the ledger, when it
    was sent. names: chain hashes of its request's prompt. deadline_s: for the first token of a hand-over.
    copies: names of blocks that it computes though they are cached or another call holds them, as the last
    of a prompt that is there to its end: it has these for itself. held, private: blocks counted as its own.
    """

    call: Call
    start: int
    blocks: int
    live: Live | None
    names: tuple[int, ...]
    stream: AnswerStream | None = None
    mark: int = 0
    deadline_s: float | None = None
    reused: int | None = None
    ticket: ContextTicket | None = None
    final: bool = False
    error: str | None = None  # of a part
    copies: frozenset[int] = frozenset()
    held: tuple[int, ...] = ()
    private: int = 0

    @property
    def found(self) -> int:
        """Prompt tokens that were in the cache, as far as is known."""
        return self.start if self.reused is None else self.reused

    @property
    def reserved(self) -> int:
        """Blocks to keep for it: none where it is a part, or has given its last token and is about to end."""
        stream = self.stream
        if stream is None:
            return 0
        over = stream.ended and not stream.failed and self.call.kind is not CallKind.CONTEXT_ONLY
        return 0 if over else self.blocks

    @property
    def answered(self) -> bool:
        """Whether it has what a prefill pass waits for."""
        if self.stream is None or self.call.kind is CallKind.CONTEXT_ONLY:
            return self.final
        return bool(self.stream.outputs)  # its end is one too


@dataclass(slots=True, eq=False)
class Live:
    """A request that the engine holds. position, reported: what the results said, KV tokens and tokens of
    the answer; what the executor is ahead waits in the stream of its call."""

    request: EngineRequest
    hashes: tuple[int, ...]
    position: int = 0
    reported: int = 0
    in_parts: bool = False  # whether it had a part
    real: InFlight | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    @property
    def outputs(self) -> deque[Output]:
        """What its real call has given and was not reported yet."""
        stream = self.real.stream if self.real is not None else None
        return stream.outputs if stream is not None else deque()


class CallBook:
    """See the module text. `ledger` is shared with the engine."""

    def __init__(self, limits: Capabilities, ledger: Ledger, note: Note) -> None:
        self.limits = limits
        self.ledger = ledger
        self.live: dict[str, Live] = {}
        self.calls: dict[str, InFlight] = {}
        self.tickets: dict[str, InFlight] = {}  # context-only calls whose KV was not pulled yet
        self.leaked_blocks = 0
        self._note = note
        self._numbers = count(1)

    # --- requests ---

    def add(self, request: EngineRequest) -> Live:
        """Raises ValueError for a known id or a request that can never run here."""
        request_id, prompt_tokens = request.request_id, len(request.token_ids)
        if request_id in self.live or request_id in self.tickets:
            raise ValueError(f"request_id: {request_id} is already known")
        if prompt_tokens < 1:
            raise ValueError("token_ids: the prompt is empty")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        limits, tokens = self.limits, prompt_tokens + request.max_new_tokens
        tokens_max = min(limits.context_tokens_max, limits.kv_blocks_total * limits.block_tokens)
        if tokens > tokens_max:
            raise ValueError(
                f"prompt and max_new_tokens need {tokens} tokens; this engine holds {tokens_max}"
            )
        live = Live(request, chain_hashes(request.token_ids, limits.block_tokens))
        self.live[request_id] = live
        return live

    def answered(self, request_id: str) -> bool | None:
        """Whether a request has its first token; None where it is not known."""
        live = self.live.get(request_id)
        return None if live is None else live.reported > 0

    def prompt_tokens(self, request_id: str) -> int:
        return self.live[request_id].prompt_tokens

    def forget(self, live: Live) -> list[InFlight]:
        """The request is over, or has failed. Returns its calls that still run; they count no more."""
        self.live.pop(live.request.request_id, None)
        calls = [call for call in self.calls.values() if call.live is live]
        for call in calls:
            del self.calls[call.call.call_id]
        if live.real is not None:
            self.let_go(live.real)
        return [call for call in calls if not call.final]

    def finish(self, live: Live) -> None:
        """Its last token was reported. The executor's own word that the call is over may still come."""
        self.live.pop(live.request.request_id, None)
        if live.real is not None:
            live.real.live = None
            self.let_go(live.real)

    def unhear(self, live: Live) -> bool:
        """The request is over; its calls run on and count until they end. False where none does."""
        self.live.pop(live.request.request_id, None)
        calls = [call for call in self.calls.values() if call.live is live]
        for call in calls:
            call.live = call.deadline_s = None
            if call.final:
                del self.calls[call.call.call_id]
        running = any(not call.final for call in calls)
        if live.real is not None and live.real not in [call for call in calls if not call.final]:
            self.let_go(live.real)
        return running

    def clear(self) -> tuple[str, ...]:
        """The executor is gone. Returns the ids of all that it held, or was to get."""
        lost = tuple(dict.fromkeys((*self.live, *self.tickets)))
        real = [live.real for live in self.live.values() if live.real is not None]
        for call in (*self.calls.values(), *self.tickets.values(), *real):
            self.let_go(call)
        self.live.clear()
        self.calls.clear()
        self.tickets.clear()
        return lost

    # --- calls ---

    def cached_tokens(self, live: Live) -> int:
        """Leading prompt tokens in the cache now, never the last: its logits are needed."""
        block = self.limits.block_tokens
        return self.ledger.lookup(live.hashes[: (live.prompt_tokens - 1) // block]) * block

    def part(self, live: Live, start: int, end: int) -> InFlight:
        """A call for the first `end` prompt tokens, for the sake of its blocks."""
        request, live.in_parts = live.request, True
        call = Call(
            self._name(request),
            CallKind.GENERATE,
            request.token_ids[:end],
            1,
            priority=PART_PRIORITY,
            priority_s=PART_PRIORITY_S,
        )
        return InFlight(call, start, self._blocks(end + 1), live, live.hashes)

    def real(self, live: Live, kind: CallKind, start: int, stream: AnswerStream) -> InFlight:
        request = live.request
        ordinary = ORDINARY_PRIORITY if live.in_parts else None
        call = Call(
            self._name(request),
            kind,
            request.token_ids,
            request.max_new_tokens,
            request.sampling,
            stream.end_id,
            RETAIN_PRIORITY if request.retain else ordinary,
        )
        need = self._blocks(live.prompt_tokens + request.max_new_tokens)
        made = InFlight(call, start, need, live, live.hashes, stream)
        computed = live.hashes[start // self.limits.block_tokens :]
        made.copies = frozenset([value for value in computed if self.ledger.is_there(value)])
        return made

    @property
    def blocks_to_be_had(self) -> int:
        """By a new call, beside all that real calls may grow to and what has leaked."""
        reserved = sum([call.reserved for call in self.calls.values()])
        reserved += sum([call.blocks for call in self.tickets.values()])
        return max(0, self.limits.kv_blocks_total - self.leaked_blocks - reserved)

    def no_room(self, call: InFlight, to_be_had: int) -> str | None:
        """Why `call` would wait for others to end, if it would."""
        if call.blocks <= to_be_had:
            return None
        leaked = f" ({self.leaked_blocks} have leaked)" if self.leaked_blocks else ""
        return f"out of KV blocks: {call.blocks} needed, {to_be_had} to be had{leaked}"

    def sent(self, call: InFlight) -> None:
        """It is about to be."""
        call.mark = self.ledger.mark()
        self.calls[call.call.call_id] = call
        if call.stream is not None and call.live is not None:
            call.live.real = call

    @property
    def blocks_explained(self) -> int:
        """The most that the executor can hold for us."""
        return sum(call.blocks for call in (*self.calls.values(), *self.tickets.values()))

    @property
    def awaited(self) -> bool:
        """Whether calls wait for the executor."""
        return any(not call.final for call in self.calls.values())

    def hold(self, call: InFlight, tokens: int) -> None:
        """A real call has KV of so many tokens. Full blocks of the prompt have names, others are its own."""
        if not call.held and not call.private:
            call.held = tuple([value for value in call.names if value not in call.copies])
            self.ledger.hold(call.held)
        more = self._blocks(tokens) - len(call.held) - call.private
        if more > 0:
            call.private += more
            self.ledger.hold((), more)

    def let_go(self, call: InFlight) -> None:
        self.ledger.let_go(call.held, call.private)
        call.held, call.private = (), 0

    # --- answers ---

    def answer(self, answer: Answer) -> None:
        """Calls that are not known, or over, are of requests that were cancelled: left out."""
        call = self.calls.get(answer.call_id)
        if call is None or call.final:
            return
        if answer.reused_tokens is not None and call.reused is None:
            self._reused(call, answer.reused_tokens)
        call.final = answer.final or answer.error is not None
        stream, failed = call.stream, _failure(answer)
        if answer.ticket is not None:
            call.ticket = answer.ticket
            if not answer.tokens and stream is not None and not stream.tokens:
                answer = replace(answer, tokens=answer.ticket.first_gen_tokens[:1])
        if stream is None:
            call.error = failed
        else:
            repeated = stream.repeated
            stream.take(answer)
            if stream.repeated and not repeated:
                self._note(Incident.DUPLICATE_FIRST_TOKEN, f"of call {call.call.call_id} was dropped")
        if call.final:
            self._ended(call, failed is None)

    def _ended(self, call: InFlight, well: bool) -> None:
        if well:
            self.ledger.settle(call.mark, self._left_by(call))
        if call.call.kind is CallKind.CONTEXT_ONLY and call.live is not None:
            return  # its blocks wait to be pulled; the pass that it is of takes it from here
        del self.calls[call.call.call_id]
        if call.live is None:
            self.let_go(call)

    def _left_by(self, call: InFlight) -> Sequence[int]:
        """Chain hashes of what a call left in the cache, as is likely: events say it for sure."""
        block, prompt = self.limits.block_tokens, call.call.token_ids
        if call.call.kind is CallKind.GENERATION_ONLY:
            return ()  # whether pulled blocks become reusable is not verified
        left = list(call.names[: len(prompt) // block])
        if call.stream is not None and call.call.kind is not CallKind.CONTEXT_ONLY:
            # The last token of the output is taken to have no KV (read in a source near 1.x, releaseBlocks).
            output = call.stream.tokens[: -2 if call.stream.added_end else -1]
            tail = (*prompt[len(left) * block :], *output)
            for start in range(0, len(tail) - block + 1, block):
                left.append(chain_hash(left[-1] if left else 0, tail[start : start + block]))
        return left

    def _reused(self, call: InFlight, tokens: int) -> None:
        block, name = self.limits.block_tokens, call.call.call_id
        if tokens % block or not 0 <= tokens < len(call.call.token_ids):
            self._note(Incident.BAD_REPORT, f"call {name} says it reused {tokens} tokens; left out")
            return
        call.reused = tokens
        if tokens < call.start:
            what = f"call {name} found {tokens} tokens in the cache, {call.start} were thought to be there"
            self._note(Incident.EVICTED, what)

    def _name(self, request: EngineRequest) -> str:
        return f"{request.request_id}/{next(self._numbers)}"

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)


def _failure(answer: Answer) -> str | None:
    """Why the call failed, if it did."""
    if answer.error is not None:
        return answer.error
    if answer.ending in (Ending.TIMED_OUT, Ending.CANCELLED):
        return f"the executor ended it: {answer.ending}"
    return None
