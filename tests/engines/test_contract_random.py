"""The contract of engines under random operation: positions, budgets, blocks and events add up, always."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from factories import asked, held_blocks
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engines.base import Engine
from engines.types import BlocksStored, ItemResult, Pass, PassItem, PassKind

_pass_ids = count(1)


@dataclass
class Known:
    """What the test knows of a live request."""

    prompt_tokens: int
    max_new_tokens: int
    position: int = 0
    generated: int = 0
    started: bool = False


class EngineMachine(RuleBasedStateMachine):
    """`mirror` is what the events say is cached."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        super().__init__()
        self.engine = make()
        self.mirror: set[int] = set()
        self.names = count()
        self.live: dict[str, Known] = {}

    @rule(tokens=st.integers(1, 150), max_new_tokens=st.integers(1, 6), family=st.integers(0, 2))
    def submit(self, tokens: int, max_new_tokens: int, family: int) -> None:
        request_id = f"h{next(self.names)}"
        self.engine.submit(asked(request_id, tokens, max_new_tokens, family))
        self.live[request_id] = Known(tokens, max_new_tokens)

    @rule(data=st.data(), budget=st.integers(1, 64))
    def prefill(self, data: st.DataObject, budget: int) -> None:
        waiting = [i for i, known in self.live.items() if known.generated == 0]
        if waiting:
            chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=3, unique=True))
            self._execute(PassKind.PREFILL, chosen, budget)

    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        decoding = [i for i, known in self.live.items() if known.generated > 0]
        if decoding:
            chosen = data.draw(st.lists(st.sampled_from(decoding), min_size=1, max_size=3, unique=True))
            self._execute(PassKind.DECODE, chosen, 1)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.live:
            request_id = data.draw(st.sampled_from(list(self.live)))
            self.engine.cancel(request_id)
            del self.live[request_id]

    def _execute(self, kind: PassKind, ids: list[str], budget: int) -> None:
        items = tuple(PassItem(i, budget, self.live[i].position) for i in ids)
        before = self.engine.stats()
        try:
            result = self.engine.execute(Pass(next(_pass_ids), kind, items))
        except ValueError:
            known = [self.live[i] for i in ids]
            left = [budget if kind is PassKind.DECODE else k.prompt_tokens - k.position for k in known]
            sizes = [(min(budget, rest), k.position) for rest, k in zip(left, known, strict=True)]
            assert self.engine.profiles.executed(sizes) is None
            assert self.engine.stats() == before
            return
        assert [item.request_id for item in result.items] == ids
        assert result.kind is kind
        assert sum(item.computed for item in result.items) <= result.executed_tokens
        assert result.executed_tokens <= self.engine.profiles.tokens_max
        assert result.elapsed_s >= 0.0
        for item in result.items:
            self._check_item(item, kind, budget)

    def _check_item(self, item: ItemResult, kind: PassKind, budget: int) -> None:
        known = self.live[item.request_id]
        if item.error is not None:
            assert (item.computed, item.token, item.finish) == (0, None, None)
            del self.live[item.request_id]
            return
        assert 1 <= item.computed <= budget
        assert item.position == known.position + item.reused + item.computed
        assert item.reused == 0 or not known.started
        assert item.reused % self.engine.capabilities.block_tokens == 0
        known.started = True
        known.position = item.position
        done = item.position >= known.prompt_tokens
        assert (item.token is not None) == done
        known.generated += done
        if kind is PassKind.DECODE or done:
            assert item.position == known.prompt_tokens + known.generated - 1
        assert (item.finish is not None) == (known.generated == known.max_new_tokens)
        if item.finish is not None:
            del self.live[item.request_id]

    @invariant()
    def accounts_agree(self) -> None:
        stats, block = self.engine.stats(), self.engine.capabilities.block_tokens
        assert stats.requests_live == len(self.live)
        assert 0 <= held_blocks(self.engine) <= sum(-(-k.position // block) for k in self.live.values())
        for event in self.engine.kv_events():
            change = set(event.block_hashes)
            if isinstance(event, BlocksStored):
                assert not self.mirror & change
                self.mirror |= change
            else:
                assert change <= self.mirror
                self.mirror -= change
        assert stats.kv_blocks_cached <= len(self.mirror)

    def teardown(self) -> None:
        for request_id in self.live:
            self.engine.cancel(request_id)
        self.live.clear()
        self.accounts_agree()
        assert held_blocks(self.engine) == 0
        assert self.engine.stats().kv_blocks_cached == len(self.mirror)
        self.engine.close()


def test_nothing_leaks_whatever_happens(make: Callable[[], Engine]) -> None:
    run_state_machine_as_test(
        lambda: EngineMachine(make),
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
