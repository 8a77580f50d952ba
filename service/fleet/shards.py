"""What a snapshot of membership says of shards: who leads them, what their workers can do."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from service.core.pricing import Pricer
from service.core.types import InstanceSpec
from service.fleet.membership import DRAINING, FleetSnapshot, Leader, Member, MemberKind

EVERY_SHARD = "*"  # in the settings of a front end: those that are there, and those that come
TOKENS_PER_S = "tokens_per_s"  # fact of a worker: its prefill rate at the knee, by its cost model
_ELECTION = "shard-"


def election_of(shard: str) -> str:
    """The election that the schedulers of a shard stand in."""
    return f"{_ELECTION}{shard}"


def leader_of(snapshot: FleetSnapshot, shard: str) -> Leader | None:
    return snapshot.leaders.get(election_of(shard))


def address_of(snapshot: FleetSnapshot, shard: str) -> str | None:
    """Where the active scheduler of a shard is; None without one."""
    leader = leader_of(snapshot, shard)
    member = snapshot.members.get(leader.candidate) if leader is not None else None
    return member.address if member is not None else None


def led(snapshot: FleetSnapshot) -> dict[str, int]:
    """Shards that have an active scheduler, with its epoch."""
    return {
        name.removeprefix(_ELECTION): leader.epoch
        for name, leader in snapshot.leaders.items()
        if name.startswith(_ELECTION)
    }


def scheduled(snapshot: FleetSnapshot) -> set[str]:
    """Shards that have a scheduler, active or not."""
    return led(snapshot).keys() | {member.shard for member in snapshot.of(MemberKind.SCHEDULER)}


def worker_capacities(snapshot: FleetSnapshot) -> dict[str, float]:
    """Of each worker that is not about to leave the fleet; 1 is the middle one. One that does not say how
    fast it is counts as 1."""
    workers = [member for member in snapshot.of(MemberKind.WORKER) if DRAINING not in member.facts]
    told = {member.member_id: rate for member in workers if (rate := _rate(member)) > 0.0}
    middle = median(told.values()) if told else 1.0
    return {member.member_id: told.get(member.member_id, middle) / middle for member in workers}


def shard_capacities(snapshot: FleetSnapshot) -> Mapping[str, float]:
    """Of each shard with a scheduler: its workers together, less those that are on their way out of it."""
    found = dict.fromkeys(scheduled(snapshot), 0.0)
    for worker_id, capacity in worker_capacities(snapshot).items():
        shard = snapshot.members[worker_id].shard
        if shard in found and wanted_shard(snapshot, snapshot.members[worker_id]) == shard:
            found[shard] += capacity
    return found


def served_by(worker: Member) -> tuple[str, str]:
    """The model and bundle that a worker says it serves; empty where it does not say."""
    return str(worker.facts.get("model", "")), str(worker.facts.get("bundle_id", ""))


def in_words(served: tuple[str, str]) -> str:
    model, bundle_id = served
    return f"{model or 'no model'} (bundle {bundle_id[:12] or 'none'})"


def wanted_shard(snapshot: FleetSnapshot, worker: Member) -> str:
    """Where it is to be; where it is, if nobody wants it elsewhere."""
    wanted = snapshot.assignments.get(worker.member_id)
    return wanted.shard if wanted is not None and wanted.shard else worker.shard


def knee_rate(spec: InstanceSpec) -> float:
    """Prefill tokens/s at the knee."""
    pricer = Pricer(spec.cost, spec.profiles)
    return pricer.knee_tokens / pricer.pass_s([(pricer.knee_tokens, 0)])


def _rate(member: Member) -> float:
    rate = member.facts.get(TOKENS_PER_S)
    return float(rate) if isinstance(rate, int | float) else 0.0
