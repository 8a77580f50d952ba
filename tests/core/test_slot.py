"""Laws of the worker slot: passes start in the order in which they came, each is answered exactly once."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engines.types import Pass, PassItem, PassKind
from service.core.slot import SlotError, WorkerSlot


def a_pass(pass_id: int) -> Pass:
    return Pass(pass_id, PassKind.PREFILL, (PassItem("r", 1, 0),))


class SlotMachine(RuleBasedStateMachine):
    """Against a plain list of what was dispatched and is not answered, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.slot = WorkerSlot()
        self.open: list[int] = []
        self.started = False  # whether open[0] runs
        self.next_id = 1

    @rule(staged=st.booleans())
    def dispatch(self, staged: bool) -> None:
        waiting = len(self.open) - self.started
        legal = waiting == 0 and (staged or not self.started)
        if legal:
            self.slot.dispatch(a_pass(self.next_id), staged)
            self.open.append(self.next_id)
        else:
            with pytest.raises(SlotError):
                self.slot.dispatch(a_pass(self.next_id), staged)
        self.next_id += 1

    @rule()
    def start_next(self) -> None:
        begun = self.slot.start_next()
        if self.open and not self.started:
            assert begun is not None
            assert begun.pass_id == self.open[0]
            self.started = True
        else:
            assert begun is None

    @precondition(lambda self: self.next_id > 1)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        pass_id = data.draw(st.integers(max(1, self.next_id - 4), self.next_id))
        waiting = self.open[self.started :]
        assert self.slot.revoke(pass_id) == (pass_id in waiting)
        if pass_id in waiting:
            self.open.remove(pass_id)

    @rule()
    def finish(self) -> None:
        if self.started:
            assert self.slot.finish().pass_id == self.open.pop(0)
            self.started = False
        else:
            with pytest.raises(SlotError):
                self.slot.finish()

    @invariant()
    def holds_what_is_open(self) -> None:
        held = [p.pass_id for p in (self.slot.running, self.slot.staged) if p is not None]
        assert held == self.open
        assert (self.slot.running is not None) == self.started


TestSlot = SlotMachine.TestCase
