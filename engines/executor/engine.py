"""An `engines.base.Engine` over any executor: passes become calls, reports become results.

A prefill pass is one `enqueue` of all its calls, so that the executor can take them into one iteration. An
item that ends before its prompt is an ordinary call for the prompt up to there with one output token, which
nobody gets; the next part finds its blocks in the cache. The item that ends its prompt is the real call, and
from its first token on the executor decodes by itself, in passes or between them. So tokens are kept as they
come, and reported by the next pass of either kind, in order, after its own items.

A budget counts from what is cached at that moment, whole blocks, never the last prompt token. What a call
really found in the cache is known when it has run; where that is less than was thought, the result says so.

No wait is without an end. A pass that takes too long fails and its calls are cancelled. An executor that runs
nothing while calls wait is ended. One that is gone is started again, a bounded number of times, and all that
it held is lost: the error names every request, also those outside the pass. Where the loss shows in a call
that must not fail, as `cancel`, the next pass raises it.

A hand-over. The prefill side runs context-only calls: a request finishes with its first token and leaves a
ticket; its blocks stay counted until `release` or `cancel`. The decode side adopts the ticket, and its first
token must come within `handover_timeout_s`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from engines.base import EngineError, PassError, check_pass
from engines.executor.calls import CallBook, InFlight, Live
from engines.executor.fidelity import Fidelity
from engines.executor.handover import check_ticket, expire, postpone
from engines.executor.health import STANDSTILL_S, Faults, LeakProbe, Progress
from engines.executor.ledger import Ledger
from engines.executor.measure import measure
from engines.executor.passes import PassMaker
from engines.executor.stream import AnswerStream, Habit
from engines.executor.supervisor import Supervisor
from engines.executor.types import (
    Answer,
    CacheGap,
    CacheRemoved,
    CacheStored,
    CallKind,
    CancelMode,
    ContextTicket,
    ExecutorLink,
    ExecutorRole,
    ExecutorSettings,
    Facts,
    Incident,
    Iteration,
    LinkLost,
    Report,
    Unread,
)
from engines.profiles import Profiles
from engines.types import (
    Capabilities,
    EngineRequest,
    EngineStats,
    ItemResult,
    KvEvent,
    Pass,
    PassKind,
    PassResult,
    Ran,
)

log = logging.getLogger(__name__)


class ExecutorEngine:
    """See the module text. `capabilities.kv_blocks_total` is replaced by what the executor says of itself.

    fingerprint: bundle id; both sides of a hand-over must have the same. clock: seconds, monotonic.
    """

    def __init__(
        self,
        link: ExecutorLink,
        capabilities: Capabilities,
        profiles: Profiles,
        settings: ExecutorSettings | None = None,
        role: ExecutorRole = ExecutorRole.BOTH,
        *,
        fingerprint: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capabilities = capabilities
        self._profiles = profiles
        self._settings = settings or ExecutorSettings()
        self.role = role
        self.fingerprint = fingerprint
        self._clock = clock
        self.incidents: Counter[Incident] = Counter()
        self._supervisor = Supervisor(link, self._settings, self._note)
        self._ledger = Ledger(capabilities.kv_blocks_total, capabilities.block_tokens)
        self._book = CallBook(capabilities, self._ledger, self._note)
        self._maker = PassMaker(self._book, profiles, role, self._end_id, self._stop, self._end_call)
        self._habit = Habit()
        self._fidelity = Fidelity()
        self._leak = LeakProbe(self._settings.leak_iterations)
        self._progress, self._faults = Progress(clock()), Faults()
        self._passes_done = 0
        self._gapped = False  # events were lost: blocks that follow unknown ones are no surprise
        self._random = Random()

    # --- the protocol ---

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def profiles(self) -> Profiles:
        return self._profiles

    def start(self) -> None:
        """Bring the executor up. Raises LinkLost, BackendUnavailable, ValueError for another block size."""
        self._up(self._supervisor.start())

    def submit(self, request: EngineRequest) -> None:
        self._check_usable()
        self._book.add(request)

    def execute(self, pass_: Pass) -> PassResult:
        self._check_usable()
        failed: list[str] = []  # requests that fail alone in this pass
        try:
            return self._run(pass_, failed)
        except LinkLost as lost:
            self._passes_done += 1
            raise self._executor_lost(pass_, failed, lost) from lost

    def cancel(self, request_id: str) -> None:
        held = self._book.tickets.pop(request_id, None)
        if held is not None:
            self._book.let_go(held)
            self._end_call(held)
        live = self._book.live.get(request_id)
        if live is not None:
            self._stop(live)

    def stats(self) -> EngineStats:
        ledger = self._ledger
        return EngineStats(
            ledger.blocks_total,
            ledger.blocks_free,
            ledger.blocks_cached,
            len(self._book.live),
            self._passes_done,
            tuple(sorted((incident.value, times) for incident, times in self.incidents.items())),
        )

    def kv_events(self) -> tuple[KvEvent, ...]:
        return self._ledger.take_events()

    def interrupt(self, why: str = "the service is stopping") -> None:
        """From any thread: a pass that runs, or a restart in it, ends soon with EngineError. Then only
        `close` is of use."""
        self._supervisor.interrupt(why)

    def close(self) -> None:
        self._forget_all()
        self._supervisor.close("the engine is closed")

    def measure(self, tokens: int, history: int) -> float:
        """Seconds of one prefill pass of this size, for calibration: see `engines.executor.measure`."""
        return measure(self, tokens, history, self._random)

    # --- hand-over ---

    def take_ticket(self, request_id: str) -> ContextTicket:
        """Of a request that finished on the prefill side. Raises KeyError."""
        ticket = self._book.tickets[request_id].ticket
        assert ticket is not None
        return replace(ticket, fingerprint=self.fingerprint, block_tokens=self._capabilities.block_tokens)

    def release(self, request_id: str) -> None:
        """The decode side has pulled its KV. Unknown ids are ignored."""
        held = self._book.tickets.pop(request_id, None)
        if held is not None:
            self._book.let_go(held)

    def adopt(self, request: EngineRequest, ticket: ContextTicket) -> None:
        """Go on with a request whose prompt another instance computed. Its max_new_tokens are all in all.

        Raises ValueError as `submit`, and for a ticket of another engine. A request that finds no room fails
        with the next pass.
        """
        self._check_usable()
        if self.role is ExecutorRole.CONTEXT:
            raise ValueError("role: this is the prefill side of hand-overs; adopt on a decode side")
        check_ticket(request, ticket, self.fingerprint, self._capabilities.block_tokens)
        given = ticket.first_gen_tokens
        live = self._book.add(request)
        stream = AnswerStream(request.max_new_tokens, self._end_id(request), given, self._habit)
        call = self._book.real(live, CallKind.GENERATION_ONLY, live.prompt_tokens, stream)
        call.call = replace(call.call, ticket=ticket)
        call.deadline_s = self._clock() + self._settings.handover_timeout_s
        live.position, live.reported = live.prompt_tokens + len(given) - 1, len(given)
        self._maker.decoding[request.request_id] = live
        no_room = self._book.no_room(call, self._book.blocks_to_be_had)
        if no_room is not None:
            live.real, call.final = call, True
            stream.fail(no_room)
            return
        self._book.sent(call)
        self._book.hold(call, live.position)
        self._supervisor.enqueue_quietly(call.call)

    # --- a pass ---

    def _run(self, pass_: Pass, failed: list[str]) -> PassResult:
        self._take(self._supervisor.receive(0.0))
        self._restart_if_leaked()
        self._supervisor.give_up_if(self._faults.next_pass())
        begin_s = self._clock()
        self._progress.begin(begin_s)
        check_pass(pass_, self._capabilities, self._book.answered, self._book.prompt_tokens)
        run = self._prefill if pass_.kind is PassKind.PREFILL else self._decode
        items, ran = run(pass_, begin_s, failed)
        items += self._maker.riders()
        self._passes_done += 1
        tokens = sum(item.computed for item in items)
        history = sum(item.position - item.computed for item in items if item.computed)
        elapsed_s = self._clock() - begin_s
        return PassResult(pass_.pass_id, pass_.kind, tuple(items), tokens, history, elapsed_s, ran)

    def _prefill(self, pass_: Pass, begin_s: float, failed: list[str]) -> tuple[list[ItemResult], Ran | None]:
        steps = self._maker.plan(pass_)
        calls = self._maker.make_calls(steps, self._note)
        failed += [step.live.request.request_id for step in steps if step.error is not None]
        self._fidelity.begin(sum(step.end - step.start for step in steps if step.call is not None))
        if calls:
            # Executors that fill an iteration before they look into their cache count cached tokens against
            # it: who brings most of them goes last, and takes what is left.
            calls.sort(key=lambda call: call.start)
            self._supervisor.enqueue([call.call for call in calls])
        self._wait(pass_, begin_s, failed, lambda: all(call.answered for call in calls))
        ran = self._fidelity.ran(sum(step.computed for step in steps))
        return [self._maker.prefilled(step) for step in steps], ran

    def _decode(self, pass_: Pass, begin_s: float, failed: list[str]) -> tuple[list[ItemResult], None]:
        decoding = [self._maker.decoding[item.request_id] for item in pass_.items]
        self._maker.check_fits(pass_, [(1, live.position) for live in decoding])
        self._wait(pass_, begin_s, failed, lambda: all(live.outputs for live in decoding))
        return [self._maker.decoded(live) for live in decoding], None

    def _wait(self, pass_: Pass, begin_s: float, failed: list[str], done: Callable[[], bool]) -> None:
        """Take reports until `done`. Raises PassError, LinkLost."""
        settings, calls = self._settings, self._book.calls
        while True:
            now_s = self._clock()
            expire(calls.values(), now_s, settings.handover_timeout_s, self._note)
            if done():
                return
            pass_end_s = begin_s + settings.pass_timeout_s
            progress_end_s = self._progress.since + settings.progress_timeout_s
            if now_s >= progress_end_s:
                what = f"no answer and no iteration for {settings.progress_timeout_s} s while calls wait"
                self._note(Incident.NO_PROGRESS, f"pass {pass_.pass_id}: {what}")
                self._supervisor.give_up_if(what)
            if now_s >= pass_end_s:
                self._passes_done += 1
                self._progress.gave_up(now_s)
                raise self._pass_timed_out(pass_, failed)
            ends_s = [call.deadline_s for call in calls.values() if call.deadline_s is not None]
            asked_s = min(pass_end_s, progress_end_s, *ends_s) - now_s
            self._take(self._supervisor.receive(asked_s))
            waited_s = self._clock() - now_s
            if waited_s > asked_s + STANDSTILL_S:  # this process stood still, not the executor
                begin_s += waited_s
                self._progress.begin(self._clock())
                postpone(calls.values(), waited_s)

    def _stop(self, live: Live) -> None:
        """A request failed or was cancelled: nothing more of it is reported. Its calls are ended."""
        self._maker.decoding.pop(live.request.request_id, None)
        if self._settings.cancel is CancelMode.UNHEARD:
            if self._book.unhear(live):
                self._note(Incident.UNHEARD, f"a call of {live.request.request_id} is left to run to its end")
            return
        for call in self._book.forget(live):
            self._end_call(call)

    def _end_call(self, call: InFlight) -> None:
        """By the executor, where it may be told to."""
        if self._settings.cancel is CancelMode.ENGINE:
            self._supervisor.cancel(call.call.call_id)

    # --- reports ---

    def _take(self, reports: Sequence[Report]) -> None:
        for report in reports:
            self._progress.heard(report, self._clock())
            match report:
                case Answer():
                    self._faults.heard(report)
                    self._book.answer(report)
                case Iteration():
                    self._iterated(report)
                case CacheStored():
                    if not self._ledger.stored(report) and not self._gapped:
                        self._note(Incident.BAD_REPORT, f"blocks stored after unknown block {report.parent}")
                case CacheRemoved():
                    self._ledger.removed(report)
                case CacheGap():
                    self._gapped = True
                    self._note(Incident.EVENTS_LOST, f"{report.missing} events of the prefix cache")
                    self._ledger.clear(names=False)
                case Unread():
                    self._note(Incident.BAD_REPORT, f"{report.count} reports could not be read")

    def _iterated(self, iteration: Iteration) -> None:
        if self._fidelity.saw(iteration):
            self._note(Incident.SPLIT, f"iteration {iteration.number} is the second of one pass")
        if iteration.kv_blocks_used is None:
            return
        explained, before = self._book.blocks_explained, self._leak.leaked_blocks
        if self._leak.saw(iteration.kv_blocks_used, explained):
            what = f"the executor holds {iteration.kv_blocks_used} blocks, its calls explain {explained}"
            if before:
                log.warning("the leak of %d blocks is larger: %s", before, what)
            else:
                self._note(Incident.POOL_LEAKED, what)
        self._book.leaked_blocks = self._leak.leaked_blocks

    # --- what goes wrong ---

    def _pass_timed_out(self, pass_: Pass, failed: Sequence[str]) -> PassError:
        """Cancel what the pass waited for. A part that was done keeps its KV, in the cache."""
        lost = list(failed)
        for live in self._maker.unfinished(pass_):
            lost.append(live.request.request_id)
            self._stop(live)
        what = f"pass {pass_.pass_id} took longer than {self._settings.pass_timeout_s} s"
        self._note(Incident.PASS_TIMED_OUT, f"{what}; lost: {', '.join(lost)}")
        return PassError(what, tuple(lost))

    def _executor_lost(self, pass_: Pass, failed: Sequence[str], why: LinkLost) -> Exception:
        lost = tuple(dict.fromkeys((*failed, *self._forget_all())))
        self._note(Incident.EXECUTOR_LOST, f"{why}; lost: {', '.join(lost) or 'no request'}")
        try:
            self._up(self._supervisor.restart(str(why), self._clock()))
        except (EngineError, ValueError) as error:
            return error if isinstance(error, EngineError) else EngineError(str(error))
        return PassError(f"pass {pass_.pass_id}: the executor was lost and restarted: {why}", lost)

    def _forget_all(self) -> tuple[str, ...]:
        """The executor is gone with all that it held. Returns the ids of the requests."""
        self._maker.decoding.clear()
        lost = self._book.clear()
        self._ledger.clear()
        self._leak.reset()
        self._book.leaked_blocks, self._gapped = 0, False
        return lost

    def _restart_if_leaked(self) -> None:
        """Half the pool is gone: restart, in a moment when nobody loses anything."""
        begun = any(live.position for live in self._book.live.values())
        busy = begun or self._book.calls or self._book.tickets
        leaked = self._leak.leaked_blocks
        if 2 * leaked <= self._ledger.blocks_total or busy:
            return
        waiting = dict(self._book.live)
        self._forget_all()
        self._book.live.update(waiting)
        self._supervisor.end()
        self._up(self._supervisor.restart(f"{leaked} blocks leaked", self._clock()))

    def _up(self, facts: Facts) -> None:
        limits = self._capabilities
        if facts.block_tokens != limits.block_tokens:
            self._supervisor.gone = (
                f"block_tokens: the executor has {facts.block_tokens}, the bundle {limits.block_tokens}; "
                "build the engine again, or correct its manifest"
            )
            raise ValueError(self._supervisor.gone)
        self._capabilities = replace(limits, kv_blocks_total=facts.kv_blocks_total)
        self._book.limits = self._capabilities
        self._ledger.blocks_total = facts.kv_blocks_total
        self._progress, self._faults = Progress(self._clock()), Faults()

    # --- small things ---

    def _end_id(self, request: EngineRequest) -> int | None:
        return None if request.sampling.ignore_eos else self._settings.eos_id

    def _note(self, incident: Incident, what: str) -> None:
        self.incidents[incident] += 1
        log.warning("%s: %s", incident.value, what)

    def _check_usable(self) -> None:
        if self._supervisor.gone is not None:
            raise EngineError(self._supervisor.gone)
