"""The contract of engines under random operation: positions, budgets, blocks and events add up, always."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from factories import asked, batches_by_itself, held_blocks, part_tokens, parts_are_requests
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from engines.base import Engine
from engines.types import BlocksStored, DecodeMode, ItemResult, Pass, PassItem, PassKind, PassResult

_pass_ids = count(1)


@dataclass
class Known:
    """What the test knows of a live request."""

    prompt_tokens: int
    max_new_tokens: int
    position: int = 0
    generated: int = 0
    started: bool = False


@dataclass
class Group:
    """A pass that has run some of its groups of layers."""

    blocks: int
    items: tuple[PassItem, ...]
    done: int = 0


class EngineMachine(RuleBasedStateMachine):
    """`mirror` is what the events say is cached."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        super().__init__()
        self.engine = make()
        self.mirror: set[int] = set()
        self.names = count()
        self.live: dict[str, Known] = {}
        self.group: Group | None = None

    @rule(tokens=st.integers(1, 150), max_new_tokens=st.integers(1, 6), family=st.integers(0, 2))
    def submit(self, tokens: int, max_new_tokens: int, family: int) -> None:
        request_id = f"h{next(self.names)}"
        self.engine.submit(asked(request_id, tokens, max_new_tokens, family))
        self.live[request_id] = Known(tokens, max_new_tokens)

    @rule(data=st.data(), budget=st.integers(1, 64))
    def prefill(self, data: st.DataObject, budget: int) -> None:
        chosen = self._some_waiting(data)
        if chosen:
            self._execute(PassKind.PREFILL, chosen, budget)

    @rule(data=st.data(), budget=st.integers(1, 16), blocks=st.integers(2, 8))
    def begin_layers(self, data: st.DataObject, budget: int, blocks: int) -> None:
        chosen = self._some_waiting(data)
        if chosen and self.group is None and blocks <= self.engine.capabilities.layer_blocks_max:
            self.group = Group(blocks, self._items(PassKind.PREFILL, chosen, budget))
            self.next_layers()

    @rule()
    def next_layers(self) -> None:
        """The next group of layers, over those of its requests that still live."""
        group = self.group
        if group is None:
            return
        items = tuple(item for item in group.items if item.request_id in self.live)
        block, group.done = group.done, group.done + 1
        if not items or group.done == group.blocks:
            self.group = None
        if not items:
            return
        before = {item.request_id: self.live[item.request_id].position for item in items}
        pass_ = Pass(next(_pass_ids), PassKind.PREFILL, items, block, group.blocks)
        result = self.engine.execute(pass_)
        assert [item.request_id for item in result.items] == list(before)
        if pass_.completes:
            for item, done in zip(items, result.items, strict=True):
                self._check_item(done, item.new_tokens)
            return
        for done in result.items:
            assert (done.position, done.computed, done.token) == (before[done.request_id], 0, None)
            if done.error is not None:
                del self.live[done.request_id]

    def _some_waiting(self, data: st.DataObject) -> list[str]:
        """Requests that can be in the next pass, at most three."""
        bound = {item.request_id for item in self.group.items} if self.group else set()
        waiting = [i for i, known in self.live.items() if known.generated == 0 and i not in bound]
        if not waiting:
            return []
        return data.draw(st.lists(st.sampled_from(waiting), min_size=1, max_size=3, unique=True))

    def _items(self, kind: PassKind, ids: list[str], budget: int) -> tuple[PassItem, ...]:
        sizes = dict.fromkeys(ids, 1)
        if kind is PassKind.PREFILL:
            live = self.live
            sizes = {
                i: part_tokens(self.engine, budget, live[i].position, live[i].prompt_tokens) for i in ids
            }
            if not parts_are_requests(self.engine):
                sizes = dict.fromkeys(ids, budget)  # also more than there is
        return tuple(PassItem(i, sizes[i], self.live[i].position) for i in ids)

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
        items = self._items(kind, ids, budget)
        before = self.engine.stats()
        try:
            result = self.engine.execute(Pass(next(_pass_ids), kind, items))
        except ValueError:
            left = [1 if kind is PassKind.DECODE else self.live[i].prompt_tokens for i in ids]
            sizes = [
                (min(item.new_tokens, rest - item.history if kind is PassKind.PREFILL else 1), item.history)
                for rest, item in zip(left, items, strict=True)
            ]
            assert self.engine.profiles.executed(sizes) is None
            assert self.engine.stats() == before
            return
        assert result.kind is kind
        rode = self._check_riders(result, ids)
        assert sum(item.computed for item in result.items) <= result.executed_tokens
        if not batches_by_itself(self.engine):
            assert result.executed_tokens <= self.engine.profiles.tokens_max + rode
        assert result.elapsed_s >= 0.0
        for asked_, item in zip(items, result.items, strict=False):
            self._check_item(item, asked_.new_tokens)
        for item in result.items[len(ids) :]:
            self._check_item(item, 1)

    def _check_riders(self, result: PassResult, ids: list[str]) -> int:
        """The items of the pass come first, in order; then whatever decodes beside a prefill pass."""
        named = [item.request_id for item in result.items]
        assert named[: len(ids)] == ids
        decoding = {i for i, known in self.live.items() if known.generated > 0}
        if batches_by_itself(self.engine):
            assert set(named[len(ids) :]) <= decoding | set(ids)
            return len(named) - len(ids)
        beside = self.engine.capabilities.decode is DecodeMode.BESIDE and result.kind is PassKind.PREFILL
        decoding = decoding if beside else set()
        assert set(named[len(ids) :]) == decoding
        return len(decoding)

    def _check_item(self, item: ItemResult, budget: int) -> None:
        known = self.live[item.request_id]
        if item.error is not None:
            assert (item.computed, item.token, item.finish) == (0, None, None)
            del self.live[item.request_id]
            return
        block = self.engine.capabilities.block_tokens
        by_parts = parts_are_requests(self.engine) and known.generated == 0
        expected = known.position + item.reused + item.computed
        fell_back = by_parts and item.position < expected  # what it had left in the cache was evicted
        recomputed = batches_by_itself(self.engine) and item.computed <= item.position  # evicted in the pass
        assert item.computed <= budget or recomputed
        assert item.computed >= 1 or fell_back
        assert item.position == expected or fell_back
        assert item.reused == 0 or not known.started or by_parts
        assert item.reused % block == 0
        known.started = True
        known.position = item.position
        done = item.position >= known.prompt_tokens
        assert not by_parts or done or item.position % block == 0
        assert (item.token is not None) == done
        known.generated += done
        if done:
            assert item.position == known.prompt_tokens + known.generated - 1
        assert (item.finish is not None) == (known.generated == known.max_new_tokens)
        if item.finish is not None:
            del self.live[item.request_id]

    @invariant()
    def accounts_agree(self) -> None:
        stats, block = self.engine.stats(), self.engine.capabilities.block_tokens
        assert stats.requests_live == len(self.live)
        layered = {item.request_id for item in self.group.items} if self.group else set()
        ends = [k.prompt_tokens if i in layered else k.position for i, k in self.live.items()]
        assert 0 <= held_blocks(self.engine) <= sum(-(-end // block) for end in ends)
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
        self.group = None
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
