"""Shards as operators see them: who leads and who stands by, the workers by role, what waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from protos.plaserve.v1 import fleet_pb2 as pb
from service.core.reconcile import FleetView
from service.core.types import Role
from service.fleet.membership import FleetSnapshot, Member, MemberKind
from service.fleet.shards import leader_of, scheduled, wanted_shard


def shards_of(snapshot: FleetSnapshot, views: Mapping[str, FleetView]) -> list[pb.FleetShard]:
    """Every shard that has a process, or is wanted for one, or is retired. views: of those that answer."""
    workers = snapshot.of(MemberKind.WORKER)
    names = scheduled(snapshot) | set(snapshot.retired) | {worker.shard for worker in workers}
    names |= {wanted_shard(snapshot, worker) for worker in workers}
    return [_shard(name, snapshot, workers, views.get(name)) for name in sorted(names)]


def other_takers(snapshot: FleetSnapshot, shard: str) -> set[str]:
    """Shards that take new requests, but for this one."""
    return {
        name
        for name in scheduled(snapshot) - {shard} - set(snapshot.retired)
        if leader_of(snapshot, name) is not None
    }


def _shard(
    name: str, snapshot: FleetSnapshot, workers: Sequence[Member], view: FleetView | None
) -> pb.FleetShard:
    leader = leader_of(snapshot, name)
    here = [worker for worker in workers if worker.shard == name]
    leaving = [worker for worker in here if wanted_shard(snapshot, worker) != name]
    coming = [w for w in workers if w.shard != name and wanted_shard(snapshot, w) == name]
    roles = Counter(w.report.role if w.report is not None else Role.MIXED for w in here)
    loads = view.instances if view is not None else ()
    leads = leader.candidate if leader is not None else ""
    return pb.FleetShard(
        shard_id=name,
        leader=leads,
        epoch=leader.epoch if leader is not None else 0,
        standbys=[m.member_id for m in snapshot.of(MemberKind.SCHEDULER, name) if m.member_id != leads],
        retired=name in snapshot.retired,
        sp_count=roles[Role.SP],
        lp_count=roles[Role.LP],
        mixed_count=roles[Role.MIXED],
        coming_count=len(coming),
        leaving_count=len(leaving),
        queued_count=sum(load.requests_waiting for load in loads),
        backlog_s=fmean([load.backlog_s for load in loads]) if loads else 0.0,
        utilisation=fmean([load.utilisation for load in loads]) if loads else 0.0,
        note=_note(name, snapshot, here, bool(leads)),
    )


def _note(name: str, snapshot: FleetSnapshot, here: Sequence[Member], led: bool) -> str:
    if name not in snapshot.retired:
        return "" if led else "no scheduler leads"
    pinned = [w.member_id for w in here if (a := snapshot.assignments.get(w.member_id)) and a.pinned]
    if pinned:
        return f"pinned workers stay: {', '.join(pinned)}"
    if here and not other_takers(snapshot, name):
        return "no other shard takes its workers"
    return f"retired by {snapshot.retired[name].by}"
