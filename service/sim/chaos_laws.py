"""The laws of a chaos run, each one sentence. AssertionError names the first that is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from hashlib import sha256

from service.core import invariants
from service.core.lifecycle import HealthState, InstanceState, RequestState
from service.core.scheduler import PrefillScheduler
from service.core.types import InstanceUp, Outcome, Role
from service.sim.chaos_front import ChaosFront, ChaosSteps
from service.sim.chaos_schedule import Schedule

EVERY = 5  # polls between two looks at the whole state
AT_REST = 40  # periods in which a controller that is left alone must have come to rest


class Laws:
    """Looks as the run goes (`after_poll`), and at its end."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._polls = 0
        self.wait_ratio_max = 0.0  # longest wait of anybody over its bound
        self.ejections = 0
        self._out: set[str] = set()

    def after_poll(self, front: ChaosFront) -> None:
        """The books of the scheduler balance; nobody starves; a bounded share is ejected."""
        self._polls += 1
        if self._polls % EVERY:
            return
        scheduler = front.scheduler
        invariants.check(scheduler)
        out = check_ejected(scheduler)
        self.ejections += len(out - self._out)
        self._out = out
        self._check_ends(front)
        self._check_waits(front)

    def _check_ends(self, front: ChaosFront) -> None:
        """After a poll nobody is live past its deadline."""
        scheduler, now_s = front.scheduler, front.agenda.now_s
        for name, tracked in scheduler.live.items():
            deadline_s = tracked.request.deadline_s
            assert deadline_s is None or deadline_s > now_s, f"{name} is live past its deadline"

    def _check_waits(self, front: ChaosFront) -> None:
        """While an instance is up and does not drain, a waiting request starts within
        age_bound + (1 + 1 / share) (n + 1) d, from the last time that instances came, went or stood still: d
        being the longest pass, n the passes of all who were live when it came, and share what the aged get of
        the engine (`aged_share`; 1 for the peers).

        The bound of docs/scheduling.md counts one pass for each request before it, where there is room for
        KV. Here room is scarce, and the peers run a prompt to its end, so all passes of each are counted.
        LAPS serves the class of its last instance first, and who lost an instance is behind others anew:
        there n is everybody so far."""
        scheduler, now_s = front.scheduler, front.agenda.now_s
        if not any(instance.state is InstanceState.UP for instance in scheduler.instances.values()):
            return
        for tracked in scheduler.live.values():
            if tracked.state is RequestState.QUEUED:
                ahead = front.passes_ahead[tracked.request_id]
                behind_all = self._schedule.policy == "laps_slides" or tracked.failures > 0
                passes = front.passes_so_far if behind_all else ahead
                share = scheduler.settings.aged_share if self._schedule.policy == "plaserve" else 1.0
                turns_s = (1 + 1 / share) * (passes + 1) * max(front.pass_s_max, 0.1)
                bound_s = scheduler.settings.age_bound_s + turns_s
                waited_s = now_s - max(tracked.waiting_since_s, front.disturbed_s)
                self.wait_ratio_max = max(self.wait_ratio_max, waited_s / bound_s)
                assert waited_s <= bound_s, (
                    f"{tracked.request_id} starves: {waited_s:.3f} s, bound {bound_s:.3f} s"
                )

    def at_end(self, front: ChaosFront, steps: ChaosSteps | None) -> None:
        self._check_answers(front)
        if not front.away:
            check_nothing_held(front)
        if steps is not None and not front.away:
            self._check_roles(front, steps)

    def _check_answers(self, front: ChaosFront) -> None:
        """Every request is answered once, those that completed with all their tokens."""
        records = front.records
        assert len(records) == len(self._schedule.asks), "conservation: some never arrived"
        live = [name for name, record in records.items() if record.outcome is None]
        assert not live, f"conservation: {live[:5]} never ended"
        for name, record in records.items():
            if record.outcome is Outcome.COMPLETED:
                got, asked = record.output_tokens, record.request.max_new_tokens
                assert got == asked, f"{name}: completed with {got} of {asked} tokens"
                assert record.new_tokens + record.history_tokens >= record.request.prompt_tokens

    def _check_roles(self, front: ChaosFront, steps: ChaosSteps) -> None:
        """Left alone, the controller comes to rest, and the roles are those that it wants."""
        now_s, moved = front.agenda.now_s, 0
        for turn in range(AT_REST):
            moved = steps.step(max(now_s, steps.away_until_s) + 1.0 + turn)
        roles = {instance.role for instance in front.scheduler.instances.values()}
        assert not moved, "the controller does not come to rest"
        seen = sum(front.scheduler.accepted_requests.values())
        if self._schedule.mode == "spatial" and len(front.scheduler.instances) > 1 and seen > 20:
            assert Role.MIXED not in roles or len(roles) == 1, f"roles are left over: {roles}"


def check_ejected(scheduler: PrefillScheduler) -> set[str]:
    """Of each kind at most the stated share of instances is ejected, never all. Returns who is."""
    found: set[str] = set()
    out: Counter[object] = Counter()
    kinds: Counter[object] = Counter()
    for name, instance in scheduler.instances.items():
        if instance.state is InstanceState.DRAINING:
            continue
        kind: object = (instance.spec.capabilities, instance.spec.profiles)
        state = scheduler.outliers.state(name)
        kinds[kind] += 1
        if state in (HealthState.EJECTED, HealthState.HALF_OPEN):
            found.add(name)
            out[kind] += 1
        assert instance.takes_new or name in found, f"{name} takes nothing new and nobody knows why"
    for kind, count in out.items():
        assert count <= scheduler.settings.outlier_share_max * kinds[kind], "too many are ejected"
    return found


def check_nothing_held(front: ChaosFront) -> None:
    """At the end no instance that is up holds a request or a block, nor is one promised."""
    scheduler = front.scheduler
    invariants.check(scheduler)
    assert not scheduler.live, "the scheduler holds a request that nobody waits for"
    for instance in scheduler.instances.values():
        assert instance.running is None, f"{instance.instance_id}: a pass without end"
        assert instance.kv.blocks_reserved == 0, f"{instance.instance_id}: KV promised to nobody"
    for session in front.cluster.sessions():
        session.model.check()
        stats = session.model.stats()
        assert stats.requests_live == 0, f"{session.instance_id}: the engine holds {stats.requests_live}"
        held = stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached
        assert held == 0, f"{session.instance_id}: {held} KV blocks are leaked"


def digest(front: ChaosFront) -> str:
    """Of everything that happened, in order, and of what clients got."""
    what = sha256()
    for now_s, entry in front.log:
        name = entry.spec.instance_id if isinstance(entry, InstanceUp) else repr(entry)
        what.update(f"{now_s!r} {type(entry).__name__} {name}\n".encode())
    for name, record in front.records.items():
        values = [getattr(record, item.name) for item in fields(record) if item.name != "request"]
        what.update(f"{name} {values!r}\n".encode())
    return what.hexdigest()
