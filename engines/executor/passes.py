"""From the items of a pass to calls, and from what the executor answered to results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engines.executor.calls import CallBook, InFlight, Live
from engines.executor.stream import AnswerStream, Output
from engines.executor.types import CallKind, ExecutorRole, Incident
from engines.profiles import Profiles
from engines.types import EngineRequest, FinishReason, ItemResult, Pass, PassItem, PassKind

_NO_TICKET = Output(error="the context-only call left no ticket to hand over")


@dataclass(slots=True)
class Step:
    """One item of a prefill pass: prompt tokens from `start`, which is cached, to `end`.

    call: None where not one whole block fits in what the pass may compute. error: it got no call.
    """

    live: Live
    start: int
    end: int
    call: InFlight | None = None
    error: str | None = None

    @property
    def computed(self) -> int:
        """Prompt tokens that its call computed, as far as is known."""
        return 0 if self.call is None else self.end - self.call.found


class PassMaker:
    """decoding: requests with their first token reported, in that order. stop: gives a request up.

    end_id: the end token of a request, None where it is ignored.
    """

    def __init__(
        self,
        book: CallBook,
        profiles: Profiles,
        role: ExecutorRole,
        end_id: Callable[[EngineRequest], int | None],
        stop: Callable[[Live], None],
        give_up_kv: Callable[[InFlight], None],
    ) -> None:
        self.decoding: dict[str, Live] = {}
        self._book = book
        self._profiles = profiles
        self._role = role
        self._end_id = end_id
        self._stop = stop
        self._give_up_kv = give_up_kv

    # --- before ---

    def plan(self, pass_: Pass) -> list[Step]:
        """The steps of a prefill pass; nothing changes yet. Raises ValueError where no profile takes them."""
        steps = [self._step(item) for item in pass_.items]
        self.check_fits(pass_, [(step.end - step.start, step.start) for step in steps])
        return steps

    def check_fits(self, pass_: Pass, sizes: Sequence[tuple[int, int]]) -> None:
        ran = [(new, past) for new, past in sizes if new > 0]
        if ran and self._profiles.executed(ran) is None:
            raise ValueError(f"pass {pass_.pass_id}: no profile takes {ran}")

    def _step(self, item: PassItem) -> Step:
        live, block = self._book.live[item.request_id], self._book.limits.block_tokens
        start = self._book.cached_tokens(live)
        end = min(start + item.new_tokens, live.prompt_tokens)
        if end < live.prompt_tokens:
            end = end // block * block
        return Step(live, start, end)

    def make_calls(self, steps: Sequence[Step], note: Callable[[Incident, str], None]) -> list[InFlight]:
        """Calls for those that have room. The others have failed, alone."""
        to_be_had = self._book.blocks_to_be_had
        for step in steps:
            live, name = step.live, step.live.request.request_id
            if step.start < live.position:
                what = f"{live.position - step.start} of {live.position} tokens that {name} left in the cache"
                note(Incident.EVICTED, what)
            if step.end == step.start:
                continue
            call = self._call(step)
            step.error = self._book.no_room(call, to_be_had)
            if step.error is None:
                step.call = call
                to_be_had -= call.reserved
                self._book.sent(call)
            else:
                self._stop(live)
        return [step.call for step in steps if step.call is not None]

    def _call(self, step: Step) -> InFlight:
        live, context = step.live, self._role is ExecutorRole.CONTEXT
        if step.end < live.prompt_tokens:
            return self._book.part(live, step.start, step.end)
        kind = CallKind.CONTEXT_ONLY if context else CallKind.GENERATE
        tokens = 1 if context else live.request.max_new_tokens
        return self._book.real(live, kind, step.start, AnswerStream(tokens, self._end_id(live.request)))

    # --- after ---

    def prefilled(self, step: Step) -> ItemResult:
        live, call, name = step.live, step.call, step.live.request.request_id
        if step.error is not None:
            return ItemResult(name, live.position, 0, error=step.error)
        found = step.start if call is None else call.found
        output = Output() if call is None else self._first_output(live, call)
        if output.error is not None:
            self._stop(live)
            return ItemResult(name, live.position, 0, error=output.error)
        reused, live.position = max(0, found - live.position), step.end
        if output.token is not None:
            live.reported = 1
            self.decoding[name] = live
            self._advance(live, output)
        return ItemResult(name, step.end, step.computed, reused, output.token, output.finish)

    def unfinished(self, pass_: Pass) -> list[Live]:
        """Those of a pass that took too long whose part of it is not done."""
        live = [self._book.live[i.request_id] for i in pass_.items if i.request_id in self._book.live]
        if pass_.kind is PassKind.DECODE:
            return [one for one in live if not one.outputs]
        awaited = {id(call.live) for call in self._book.calls.values()}
        return [one for one in live if id(one) in awaited]

    def decoded(self, live: Live) -> ItemResult:
        """The next output of a request that decodes; there must be one."""
        output, name = live.outputs.popleft(), live.request.request_id
        if output.error is not None:
            self._stop(live)
            return ItemResult(name, live.position, 0, error=output.error)
        live.position += 1
        live.reported += 1
        self._advance(live, output)
        return ItemResult(name, live.position, 1, token=output.token, finish=output.finish)

    def riders(self) -> Iterator[ItemResult]:
        """All that decoding requests have got meanwhile."""
        for request_id, live in list(self.decoding.items()):
            while live.outputs and request_id in self._book.live:
                yield self.decoded(live)

    def _first_output(self, live: Live, call: InFlight) -> Output:
        if call.stream is None:
            return Output(error=call.error)
        output = live.outputs.popleft()
        if call.call.kind is CallKind.CONTEXT_ONLY and output.error is None:
            return self._keep_ticket(live, call, output)
        return output

    def _advance(self, live: Live, output: Output) -> None:
        if output.finish is not None:
            self.decoding.pop(live.request.request_id, None)
            self._book.finish(live)
        elif live.real is not None:
            self._book.hold(live.real, live.position)

    def _keep_ticket(self, live: Live, call: InFlight, output: Output) -> Output:
        """The end of a context-only call. After an end token nobody decodes, so its KV is given up."""
        del self._book.calls[call.call.call_id]
        live.real = None
        if output.finish is FinishReason.STOP or call.ticket is None:
            self._give_up_kv(call)
            return output if output.finish is FinishReason.STOP else _NO_TICKET
        first = call.ticket.first_gen_tokens or (output.token or 0,)
        call.ticket = replace(call.ticket, first_gen_tokens=first)
        self._book.hold(call, live.prompt_tokens)
        self._book.tickets[live.request.request_id] = call
        return output
