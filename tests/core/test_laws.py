"""The laws of the scheduler under any interleaving of arrivals, results, failures, cancels, moves of roles,
changes of caches, and instances that come, drain and go."""

from __future__ import annotations

import math

from helpers import CLASSED, CPU_COST, PACKED, RECTANGULAR, request, spec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.types import BlocksRemoved, BlocksStored, FinishReason, ItemResult, Pass, PassKind, PassResult
from service.core.invariants import check
from service.core.settings import LatePolicy, SchedulerSettings
from service.core.slot import WorkerSlot
from service.core.types import (
    Abort,
    Cancel,
    Dispatch,
    Idle,
    InstanceDown,
    InstanceDraining,
    InstanceResumed,
    InstanceUp,
    KvChanged,
    Outcome,
    PassFailed,
    PassFinished,
    PassRevoked,
    PassStarted,
    Reject,
    Revoke,
    Role,
    RoleChanged,
    Submit,
    WaitUntil,
)
from service.policies import POLICIES, make_scheduler

PROMPTS = st.sampled_from([1, 5, 31, 32, 33, 64, 200, 256, 257, 700, 1500, 3000])
PREFIXES = [tuple(range(1000 * n, 1000 * n + 93)) for n in range(3)]  # block hashes of the longest prompt
PROFILES = {"packed": PACKED, "classed": CLASSED, "rectangular": RECTANGULAR}


class Machine(RuleBasedStateMachine):
    """A driver that knows nothing but the contract: events in, commands out, workers as slots."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        layout=st.sampled_from(sorted(PROFILES)),
        blocks=st.sampled_from([120, 512]),
        layers=st.sampled_from([1, 4]),
        lead_s=st.sampled_from([0.0, 0.05]),
        late=st.sampled_from(list(LatePolicy)),
    )
    def begin(
        self, policy: str, layout: str, blocks: int, layers: int, lead_s: float, late: LatePolicy
    ) -> None:
        knobs = SchedulerSettings(
            stage_lead_s=lead_s, queue_requests_max=12, age_bound_s=0.5, queue_age_s_max=5.0, late_policy=late
        )
        self.scheduler = make_scheduler(policy, knobs)
        self.specs = {
            name: spec(name, profiles=PROFILES[layout], cost=CPU_COST, blocks=blocks, layer_blocks=layers)
            for name in ("a", "b", "c")
        }
        self.now_s = 0.0
        self.slots: dict[str, WorkerSlot] = {}
        self.prompts: dict[str, int] = {}
        self.position: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.begun: dict[str, tuple[int, int, int, int]] = {}  # next block of how many, new tokens, history
        self.answered: dict[str, str] = {}
        self.draining: dict[str, set[str]] = {}  # instance -> what it holds of before
        self.wake_s = math.inf
        self.count = 0
        self.up("a")

    # --- rules ---

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=5),
        new=st.integers(1, 4),
        priority=st.integers(-1, 1),
        deadline=st.sampled_from([None, None, 0.3]),
        step_s=st.sampled_from([0.0, 0.01]),
    )
    def submit(
        self, prompts: list[int], new: int, priority: int, deadline: float | None, step_s: float
    ) -> None:
        for prompt in prompts:
            self.submit_one(prompt, new, priority, deadline)
            self.now_s += step_s

    def submit_one(self, prompt: int, new: int, priority: int, deadline: float | None) -> None:
        self.count += 1
        name = f"r{self.count}"
        self.prompts[name], self.position[name], self.tokens[name] = prompt, 0, 0
        due_s = None if deadline is None else self.now_s + deadline
        hashes = PREFIXES[self.count % 3][: prompt // 32] if self.count % 4 else ()
        wanted = request(
            name,
            prompt,
            self.now_s,
            max_new_tokens=new,
            priority=priority,
            deadline_s=due_s,
            block_hashes=hashes,
        )
        self.event(Submit(wanted))

    @rule(step_s=st.sampled_from([0.0, 0.001, 0.05, 0.4, 2.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        self.poll()

    @precondition(lambda self: self.wake_s < math.inf)
    @rule()
    def timer_fires(self) -> None:
        self.now_s = max(self.now_s, self.wake_s)
        self.poll()

    @precondition(lambda self: self.busy())
    @rule(pick=st.randoms(use_true_random=False), short_by=st.sampled_from([0, 0, 0, 1]))
    def pass_ends(self, pick, short_by: int) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.busy()))
        pass_ = self.slots[name].finish()
        self.now_s += 0.01
        self.blocks_went_on(pass_)
        items = tuple(self.result(item.request_id, item.new_tokens, pass_, short_by) for item in pass_.items)
        self.event(PassFinished(name, PassResult(pass_.pass_id, pass_.kind, items, pass_.tokens, 0, 0.01)))
        self.start(name)

    @precondition(lambda self: self.busy())
    @rule(pick=st.randoms(use_true_random=False), all_lost=st.booleans())
    def pass_fails(self, pick, all_lost: bool) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.busy()))
        pass_ = self.slots[name].finish()
        ids = tuple(item.request_id for item in pass_.items)
        for request_id in ids:
            self.begun.pop(request_id, None)
        self.event(PassFailed(name, pass_.pass_id, ids if all_lost else ids[:1], "injected"))
        self.start(name)

    @precondition(lambda self: self.scheduler.live)
    @rule(pick=st.randoms(use_true_random=False), finished=st.booleans())
    def cancel(self, pick, finished: bool) -> None:  # type: ignore[no-untyped-def]
        self.event(Cancel(pick.choice(sorted(self.scheduler.live)), finished))

    @precondition(lambda self: len(self.slots) < 3)
    @rule(role=st.sampled_from([None, *Role]))
    def another_comes(self, role: Role | None) -> None:
        name = next(name for name in "abc" if name not in self.slots)
        self.up(name)
        if role is not None:
            self.event(RoleChanged(name, role))

    @precondition(lambda self: len(self.slots) > 1)
    @rule(pick=st.randoms(use_true_random=False))
    def one_goes(self, pick) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.slots))
        del self.slots[name]
        self.draining.pop(name, None)
        lost = [t.request_id for t in self.scheduler.live.values() if t.instance_id == name]
        self.begun = {i: at for i, at in self.begun.items() if i not in lost}
        self.event(InstanceDown(name, "injected"))

    @precondition(lambda self: len(self.slots) > 1)
    @rule(pick=st.randoms(use_true_random=False))
    def drains(self, pick) -> None:  # type: ignore[no-untyped-def]
        """It may end what it holds, and must not be given more."""
        name = pick.choice(sorted(self.slots))
        held = {t.request_id for t in self.scheduler.live.values() if t.instance_id == name}
        self.draining.setdefault(name, held)
        self.event(InstanceDraining(name))

    @precondition(lambda self: self.draining)
    @rule(pick=st.randoms(use_true_random=False))
    def stays_after_all(self, pick) -> None:  # type: ignore[no-untyped-def]
        name = pick.choice(sorted(self.draining))
        del self.draining[name]
        self.event(InstanceResumed(name))
        assert self.scheduler.instances[name].takes_new

    @rule(pick=st.randoms(use_true_random=False), role=st.sampled_from(list(Role)))
    def role_changes(self, pick, role: Role) -> None:  # type: ignore[no-untyped-def]
        self.event(RoleChanged(pick.choice(sorted(self.slots)), role))

    @rule(
        pick=st.randoms(use_true_random=False),
        which=st.integers(0, 2),
        blocks=st.integers(1, 90),
        kept=st.booleans(),
    )
    def cache_changes(self, pick, which: int, blocks: int, kept: bool) -> None:  # type: ignore[no-untyped-def]
        """Blocks of one of the three prefixes come into a cache, or go from its end."""
        row = PREFIXES[which]
        change = BlocksStored(row[:blocks]) if kept else BlocksRemoved(row[blocks:])
        self.event(KvChanged(pick.choice(sorted(self.slots)), (change,)))

    # --- laws ---

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "scheduler"):
            check(self.scheduler)

    def teardown(self) -> None:
        """Left alone, everything that was submitted ends, once, and no memory stays promised."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if not self.scheduler.live and not self.busy():
                break
            for name in sorted(self.busy()):
                pass_ = self.slots[name].finish()
                self.blocks_went_on(pass_)
                items = tuple(self.result(i.request_id, i.new_tokens, pass_, 0) for i in pass_.items)
                self.now_s += 0.01
                self.event(
                    PassFinished(name, PassResult(pass_.pass_id, pass_.kind, items, pass_.tokens, 0, 0.01))
                )
                self.start(name)
            if not self.busy() and self.wake_s < math.inf:
                self.now_s = max(self.now_s, self.wake_s)
            self.poll()
        assert not self.scheduler.live, "work is left that never ends"
        check(self.scheduler)
        assert all(i.kv.blocks_reserved == 0 for i in self.scheduler.instances.values())
        assert sum(self.scheduler.outcomes.values()) == self.count

    def blocks_are_in_order(self, pass_: Pass) -> None:
        """A prompt goes through all blocks of layers in order, with the sizes that it began with."""
        for item in pass_.items:
            asked = pass_.layer_block, pass_.layer_blocks, item.new_tokens, item.history
            assert self.begun.get(item.request_id, (0, *asked[1:])) == asked, "layers left out or run twice"

    def blocks_went_on(self, pass_: Pass) -> None:
        for item in pass_.items:
            self.begun.pop(item.request_id, None)
            if not pass_.completes:
                at = pass_.layer_block + 1, pass_.layer_blocks, item.new_tokens, item.history
                self.begun[item.request_id] = at

    # --- the driver ---

    def busy(self) -> set[str]:
        return {name for name, slot in self.slots.items() if slot.running is not None}

    def up(self, name: str) -> None:
        self.slots[name] = WorkerSlot()
        self.event(InstanceUp(self.specs[name]))

    def result(self, request_id: str, new_tokens: int, pass_: Pass, short_by: int) -> ItemResult:
        history = next(i.history for i in pass_.items if i.request_id == request_id)
        if pass_.kind is PassKind.DECODE:
            self.tokens[request_id] += 1
            finish = FinishReason.LENGTH if self.tokens[request_id] >= 4 else None
            return ItemResult(request_id, history + 1, 1, token=7, finish=finish)
        reached = max(1, history + new_tokens - short_by) if new_tokens > 1 else history + new_tokens
        self.position[request_id] = reached
        if reached < self.prompts[request_id]:
            return ItemResult(request_id, reached, new_tokens)
        self.tokens[request_id] = 1
        return ItemResult(request_id, reached, new_tokens, token=7)

    def start(self, name: str) -> None:
        pass_ = self.slots[name].start_next()
        if pass_ is not None:
            self.event(PassStarted(name, pass_.pass_id))

    def event(self, event: object) -> None:
        self.scheduler.on_event(event, self.now_s)  # type: ignore[arg-type]
        for name, held in self.draining.items():
            held &= {t.request_id for t in self.scheduler.live.values() if t.instance_id == name}
        self.poll()

    def poll(self) -> None:
        commands = self.scheduler.poll(self.now_s)
        assert isinstance(commands[-1], WaitUntil | Idle)
        assert not any(isinstance(c, WaitUntil | Idle) for c in commands[:-1])
        self.wake_s = commands[-1].time_s if isinstance(commands[-1], WaitUntil) else math.inf
        assert self.wake_s > self.now_s, "a wake-up in the past would spin"
        for command in commands[:-1]:
            match command:
                case Dispatch(name, pass_, staged):
                    self.blocks_are_in_order(pass_)
                    for item in pass_.items:
                        assert item.request_id not in self.answered or staged, "an ended request runs"
                        kept = self.draining.get(name)
                        assert kept is None or item.request_id in kept, "given to one that leaves"
                    self.slots[name].dispatch(pass_, staged)
                    self.start(name)
                case Revoke(name, pass_id):
                    if self.slots[name].revoke(pass_id):
                        self.event(PassRevoked(name, pass_id))
                case Reject(request_id, outcome):
                    assert request_id not in self.answered, "answered twice"
                    assert outcome in Outcome
                    self.answered[request_id] = outcome
                case Abort():
                    pass


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLaws = Machine.TestCase
