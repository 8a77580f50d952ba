"""Role moves that load an engine, as operators see them: from what workers tell to what the fleet shows."""

from __future__ import annotations

from collections.abc import Sequence

from protos.plaserve.v1 import fleet_pb2 as pb
from service.core.types import Role
from service.fleet.membership import Facts, FleetSnapshot, MemberKind, Move
from service.fleet.role_facts import MoveEnd, MoveState, engines_of, move_of, moves_of


def describe_moves(made: pb.FleetInstance, facts: Facts, now_time_s: float) -> None:
    """Its engine, the move under way, and why the last one failed. now_time_s: time of day."""
    engines, move, ended = engines_of(facts), move_of(facts), moves_of(facts)
    if engines is not None:
        made.engine, made.move_cost_s = engines.loaded, engines.move_s
    if move is not None:
        made.state, made.move_phase = "moving", move.at.value
        made.move_duration.FromNanoseconds(round(1e9 * max(0.0, now_time_s - move.at_time_s)))
    elif ended and ended[0].at is MoveEnd.FAILED:
        made.move_error = ended[0].error


def describe_ends(made: Sequence[pb.RoleMove], moves: Sequence[Move], snapshot: FleetSnapshot) -> None:
    """Add to moves what became of them, where the worker still tells."""
    ends = {
        (member.member_id, one.number): one
        for member in snapshot.of(MemberKind.WORKER)
        for one in (*moves_of(member.facts), *filter(None, [move_of(member.facts)]))
    }
    for shown, move in zip(made, moves, strict=True):
        state = ends.get((move.worker_id, move.number))
        if state is not None:
            shown.outcome += f": {in_words(state)}"
            if isinstance(state.at, MoveEnd):
                shown.end_time.FromNanoseconds(round(state.at_time_s * 1e9))


def load_in_words(facts: Facts, role: Role) -> str:
    """What a move to `role` takes, to be put after what is done; empty where it is a label."""
    engines = engines_of(facts)
    if engines is None or not engines.loads(role):
        return ""
    return f"; it loads engine {engines.engines[role]}, drain and load took {engines.move_s:.0f} s last"


def in_words(state: MoveState) -> str:
    """Such as `done in 12.1 s (draining 2.0, loading 9.8)`; phases of less than 50 ms are left out."""
    parts = ", ".join(f"{phase} {took_s:.1f}" for phase, took_s in state.seconds.items() if took_s >= 0.05)
    text = f"{state.at.value.replace('_', ' ')} in {state.total_s:.1f} s" + (f" ({parts})" if parts else "")
    if not isinstance(state.at, MoveEnd):
        text = f"{state.at.value}"
    if state.cut_off:
        text += f", {state.cut_off} requests cut off"
    return text + (f": {state.error}" if state.error else "")
