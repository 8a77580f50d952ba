"""Groups of requests that go through the layers of the model together, a block of layers at a time.

A group is given a *pass*: so many new tokens of each member, in `blocks` equal blocks of layers. Each block
is a pass of the engine; only the last one moves positions on. Between blocks the members wait (PARTIAL) with
the sizes that the pass began with, and anything else may run. A prompt that is not finished by its pass
stays in its group, which gets another one.

A group comes to be with the dispatch of its first block. Who leaves it: a request that is answered or
cancelled does not come back and is dropped. One that comes back QUEUED (its KV is lost, its pass was
revoked) is a newcomer again. After a failed pass the engine stands before the first block, so those who come
back with another count of failures begin anew, each in a group of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from service.core.lifecycle import RequestState
from service.core.policy import Instance, PassPlan, PlanItem
from service.core.tracked import Tracked
from service.core.types import DispatchNumbers, Reason
from service.policies.waiting import Waiting


@dataclass(slots=True, eq=False)
class Group:
    """failures: of each member when it joined. items: sizes of the pass under way, empty between passes.

    block: the next one. pass_s: predicted seconds of the pass, all blocks.
    """

    members: dict[str, Tracked] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    items: dict[str, tuple[int, int]] = field(default_factory=dict)
    block: int = 0
    blocks: int = 1
    pass_s: float = 0.0

    @property
    def head(self) -> Tracked:
        """The member that the group is ordered by."""
        return next(iter(self.members.values()))

    @property
    def left_s(self) -> float:
        """Predicted seconds until its head is answered, running alone from now on."""
        whole_s = max(self.pass_s, self.head.service_s) if self.items else self.head.service_s
        return whole_s - (self.pass_s * self.block / self.blocks if self.items else 0.0)

    def next_block(self, reason: Reason, numbers: DispatchNumbers) -> PassPlan:
        """The next block of the pass under way, with all members that are still there."""
        items = tuple(
            PlanItem(t, *self.items[name]) for name, t in self.members.items() if name in self.items
        )
        return PassPlan(items, reason, self.pass_s / self.blocks, numbers, self.block, self.blocks)


class LayerGroups:
    """The groups of all instances, each in the order in which they came to be."""

    def __init__(self) -> None:
        self._on: dict[str, list[Group]] = {}
        self._of: dict[str, Group] = {}

    def of(self, request_id: str) -> Group | None:
        return self._of.get(request_id)

    def came_back(self, tracked: Tracked) -> None:
        """`tracked` waits again after a pass."""
        name, group = tracked.request_id, self._of.get(tracked.request_id)
        partial = tracked.state is RequestState.PARTIAL
        if group is not None and not (partial and group.failures[name] == tracked.failures):
            self._leave(group, name)
            group = None
        if partial and group is None:
            assert tracked.instance_id is not None
            self._make(tracked.instance_id, tracked)

    def dispatched(self, plan: PassPlan) -> Group:
        """A block is on its way; returns its group. After the last block the group has no pass."""
        first = plan.items[0].tracked
        group = self._of.get(first.request_id)
        if group is None:
            assert first.instance_id is not None
            group = self._make(first.instance_id, first)
        if plan.layer_block == 0:
            for item in plan.items:
                self._join(group, item.tracked)
            group.items = {item.tracked.request_id: item.size for item in plan.items}
            group.blocks, group.pass_s = plan.layer_blocks, plan.predicted_s * plan.layer_blocks
        group.block = plan.layer_block + 1
        if group.block == group.blocks:
            group.items = {}
        return group

    def waiting(self, instance: Instance, waiting: Waiting) -> list[Group]:
        """The groups of an instance on which none of their passes runs, without the members that ended."""
        instance_id, kept = instance.instance_id, []
        for group in self._on.get(instance_id, ()):
            for name in [name for name, t in group.members.items() if t not in waiting]:
                self._leave(group, name)
            if group.members:
                kept.append(group)
        self._on[instance_id] = kept
        return list(kept)

    def hold_staging(self, instance: Instance, waiting: Waiting) -> bool:
        """Whether nothing may be staged now, because a group here has more to do.

        A block that is taken back looks like one that ran, so only newcomers are staged; and none before a
        group whose pass runs and is not its last.
        """
        flight = instance.running
        if flight is None:
            return False
        for item in flight.pass_.items:
            group = self._of.get(item.request_id)
            tracked = group.members.get(item.request_id) if group is not None else None
            left = tracked is not None and item.history + item.new_tokens < tracked.request.prompt_tokens
            if group is not None and (left or not flight.pass_.completes):
                return True
        return bool(self.waiting(instance, waiting))

    def drop_instance(self, instance_id: str) -> None:
        for group in self._on.pop(instance_id, ()):
            for name in list(group.members):
                self._leave(group, name)

    def _make(self, instance_id: str, first: Tracked) -> Group:
        group = Group()
        self._on.setdefault(instance_id, []).append(group)
        self._join(group, first)
        return group

    def _join(self, group: Group, tracked: Tracked) -> None:
        name = tracked.request_id
        old = self._of.get(name)
        if old is not group:
            if old is not None:
                self._leave(old, name)
            group.members[name], group.failures[name] = tracked, tracked.failures
            self._of[name] = group

    def _leave(self, group: Group, name: str) -> None:
        del group.members[name]
        group.items.pop(name, None)
        del self._of[name]


def blocks_of(instance: Instance, pass_s: float, block_s: float) -> int:
    """How many blocks make a pass of `pass_s` stop about every `block_s`, as far as the engine can."""
    most = instance.spec.capabilities.layer_blocks_max
    return min(max(1, math.ceil(pass_s / block_s - 1e-9)), most)
