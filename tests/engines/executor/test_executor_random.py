"""Laws of an engine over an executor, under random operation and every vice that an executor may have.

Whatever happens: held, cached and free blocks are the pool; every token is reported once, in order, and is
the one that the executor made; nothing follows a finish; a pass is at most one enqueue; an error names all
that was lost; what the events tell of the cache is what the engine counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from executor_rig import BLOCK, EOS, Rig, answer_of, asked, rig
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engines.base import PassError
from engines.executor.types import CancelMode, LinkLost
from engines.types import BlocksStored, EngineRequest, FinishReason, ItemResult, PassKind, PassResult
from tests.executor_fakes.vices import Vices

STOP_AFTER = 3


@dataclass
class Known:
    """What the test knows of a live request."""

    request: EngineRequest
    position: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    def stops(self, stop_after: int | None) -> bool:
        wanted = self.request.max_new_tokens
        return not self.request.sampling.ignore_eos and stop_after is not None and stop_after <= wanted

    def expected(self, stop_after: int | None) -> list[int]:
        tokens = answer_of(self.request, None if self.request.sampling.ignore_eos else EOS)
        return [*tokens[: (stop_after or 1) - 1], EOS] if self.stops(stop_after) else tokens


class ExecutorMachine(RuleBasedStateMachine):
    """`mirror` is what the events say is cached. strict: the executor is honest and told in full."""

    def __init__(self, make: Any, strict: bool, stop_after: int | None) -> None:
        super().__init__()
        self.rig: Rig = make()
        self.strict = strict
        self.stop_after = stop_after
        self.mirror: set[int] = set()
        self.names = count()
        self.live: dict[str, Known] = {}
        self.over: set[str] = set()

    @rule(
        tokens=st.integers(1, 150),
        max_new_tokens=st.integers(1, 8),
        family=st.integers(0, 2),
        ignore_eos=st.booleans(),
        retain=st.booleans(),
    )
    def submit(self, tokens: int, max_new_tokens: int, family: int, ignore_eos: bool, retain: bool) -> None:
        name = f"h{next(self.names)}"
        request = asked(name, tokens, max_new_tokens, family, ignore_eos=ignore_eos, retain=retain)
        self.rig.engine.submit(request)
        self.live[name] = Known(request)

    @rule(data=st.data(), budget=st.integers(1, 64))
    def prefill(self, data: st.DataObject, budget: int) -> None:
        waiting = [name for name, known in self.live.items() if not known.tokens]
        if not waiting:
            return
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=3, unique=True))
        budget = max(1, budget // len(chosen))
        items = [self._part(name, budget) for name in chosen]
        if sum(new for _, new, _ in items) <= self.rig.engine.profiles.tokens_max:
            self._pass(PassKind.PREFILL, items)

    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        decoding = [name for name, known in self.live.items() if known.tokens]
        if decoding:
            chosen = data.draw(st.lists(st.sampled_from(decoding), min_size=1, max_size=3, unique=True))
            self._pass(PassKind.DECODE, [(name, 1, self.live[name].position) for name in chosen])

    @rule(iterations=st.integers(1, 12))
    def run_ahead(self, iterations: int) -> None:
        if self.rig.link.executor is not None:
            self.rig.run_ahead(iterations)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.live:
            name = data.draw(st.sampled_from(list(self.live)))
            self.rig.engine.cancel(name)
            del self.live[name]
            self.over.add(name)

    @rule(data=st.data())
    def cancel_and_come_again(self, data: st.DataObject) -> None:
        if self.live:
            name = data.draw(st.sampled_from(list(self.live)))
            self.rig.engine.cancel(name)
            self.rig.engine.submit(self.live[name].request)
            self.live[name] = Known(self.live[name].request)

    def _part(self, name: str, budget: int) -> tuple[str, int, int]:
        known = self.live[name]
        end = known.position + budget
        if end < known.prompt_tokens:
            end = max(end // BLOCK, known.position // BLOCK + 1) * BLOCK
        return name, min(end, known.prompt_tokens) - known.position, known.position

    def _pass(self, kind: PassKind, items: list[tuple[str, int, int]]) -> None:
        before, starts = len(self.rig.link.enqueued), self.rig.link.starts
        evicted = self.rig.incidents.get("evicted", 0)
        try:
            if kind is PassKind.PREFILL:
                result = self.rig.prefill(*items)
            else:
                result = self.rig.decode(*[(name, past) for name, _, past in items])
        except PassError as error:
            self._check_loss(error, self.rig.link.starts > starts)
            return
        assert len(self.rig.link.enqueued) - before <= (kind is PassKind.PREFILL)
        found_less = self.rig.incidents.get("evicted", 0) > evicted
        self._check_result(result, items, found_less)

    def _check_loss(self, error: PassError, restarted: bool) -> None:
        assert not self.strict
        assert error.request_ids
        assert not restarted or self.live.keys() <= set(error.request_ids)
        for name in error.request_ids:
            self.live.pop(name, None)

    def _check_result(self, result: PassResult, items: list[tuple[str, int, int]], found_less: bool) -> None:
        named = [item.request_id for item in result.items]
        assert named[: len(items)] == [name for name, _, _ in items]
        for (_, budget, _), item in zip(items, result.items, strict=False):
            assert item.computed <= budget or found_less
            self._check_item(item)
        for item in result.items[len(items) :]:
            assert item.token is not None or item.error is not None
            self._check_item(item)

    def _check_item(self, item: ItemResult) -> None:
        known = self.live[item.request_id]  # a KeyError: it follows a finish, an error or a cancel
        if item.error is not None:
            assert (item.computed, item.token, item.finish) == (0, None, None)
            self._end(item.request_id)
            return
        if not known.tokens:
            came = known.position + item.reused + item.computed
            assert item.position == came or item.position < came
            assert item.reused % BLOCK == 0
            assert (item.token is not None) == (item.position == known.prompt_tokens)
        else:
            assert (item.computed, item.reused) == (1, 0)
        known.position = item.position
        if item.token is None:
            assert item.position % BLOCK == 0
            return
        known.tokens.append(item.token)
        expected = known.expected(self.stop_after)
        assert known.tokens == expected[: len(known.tokens)]
        assert item.position == known.prompt_tokens + len(known.tokens) - 1
        assert (item.finish is not None) == (len(known.tokens) == len(expected))
        if item.finish is not None:
            stopped = known.stops(self.stop_after)
            assert item.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            self._end(item.request_id)

    def _end(self, name: str) -> None:
        del self.live[name]
        self.over.add(name)

    @invariant()
    def accounts_agree(self) -> None:
        engine = self.rig.engine
        stats = engine.stats()
        engine._ledger.check()
        assert stats.requests_live == len(self.live)
        assert min(stats.kv_blocks_free, stats.kv_blocks_cached, self.rig.held) >= 0
        if engine._settings.cancel is CancelMode.ENGINE:
            assert self.rig.held <= sum(-(-known.position // BLOCK) for known in self.live.values())
        for event in engine.kv_events():
            change = set(event.block_hashes)
            if isinstance(event, BlocksStored):
                assert not self.mirror & change
                self.mirror |= change
            else:
                assert change <= self.mirror
                self.mirror -= change
        assert stats.kv_blocks_cached <= len(self.mirror)

    def teardown(self) -> None:
        engine = self.rig.engine
        for name in list(self.live):
            self.cancel_now(name)
        self.rig.run_ahead()
        try:
            engine._take(self.rig.link.receive(0.0))
        except LinkLost:
            assert not self.strict
            engine.close()
            return
        self.accounts_agree()
        assert self.rig.held == 0
        assert not engine._book.calls
        if self.strict:
            assert engine.stats().kv_blocks_cached == len(self.mirror) == self.rig.executor.pool.idle
            assert self.rig.executor.pool.held == 0
            assert not set(self.rig.incidents) - {"evicted", "split"}
        engine.close()

    def cancel_now(self, name: str) -> None:
        self.rig.engine.cancel(name)
        del self.live[name]


CASES: dict[str, tuple[Any, bool, int | None]] = {
    "honest": (lambda: rig(), True, None),
    "stops": (lambda: rig(executor={"stop_after": STOP_AFTER}), True, STOP_AFTER),
    "stops silently": (
        lambda: rig(Vices(end_id_left_out=True), executor={"stop_after": STOP_AFTER}),
        True,
        STOP_AFTER,
    ),
    "unheard": (lambda: rig(cancel=CancelMode.UNHEARD), False, None),
    "no events": (lambda: rig(link={"cache_events": False}), False, None),
    "reuse not told": (lambda: rig(link={"reports_reuse": False}), False, None),
    "statistics late": (lambda: rig(link={"late_statistics": True}), True, None),
    "crash on abort": (lambda: rig(Vices(crash_on_abort=True), restarts_max=1000), False, None),
    "hangs": (lambda: rig(Vices(hang=7), restarts_max=1000), False, None),
    "events lost": (lambda: rig(Vices(lost_events=3)), False, None),
    "evicts": (lambda: rig(Vices(evict_between_parts=True)), False, None),
    "leaks": (
        lambda: rig(Vices(leak_on_cancel=True), leak_iterations=3, restarts_max=1000, pass_timeout_s=0.5),
        False,
        None,
    ),
    "quirks": (
        lambda: rig(
            Vices(
                split=1,
                merge=True,
                late_perf_metrics=True,
                duplicate_final=True,
                drained_stats=True,
                delay_shared_prefix=True,
                error_response=7,
            )
        ),
        False,
        None,
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_the_laws_hold_whatever_happens(case: str) -> None:
    run_state_machine_as_test(
        lambda: ExecutorMachine(*CASES[case]),
        settings=settings(
            max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
