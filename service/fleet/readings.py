"""What front ends, workers and controllers tell at scrape time, read from what they keep anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from engines.types import PassKind
from service.core.types import Role
from service.fleet.controller import FleetController
from service.fleet.front_end import FrontEndProcess
from service.fleet.link import Claim
from service.fleet.membership import MemberKind, Membership
from service.fleet.pressures import Pressures
from service.fleet.worker_service import WorkerServicer
from service.fleet.worker_watch import WorkerCounts
from service.telemetry import fleet_names as fleet
from service.telemetry import names
from service.telemetry.readings import Reading


def of_front_end(process: FrontEndProcess) -> Iterator[Reading]:
    runtime = process.runtime
    yield Reading(names.DRAINING, float(runtime.draining))
    yield Reading(fleet.SENT_AGAIN, runtime.sent_again)
    for shard in runtime.uplinks.shards:
        yield Reading(fleet.SCHEDULER_LINK, float(shard not in runtime.uplinks.down), (shard,))
    for worker, connected in process.token_links.items():
        yield Reading(fleet.TOKEN_LINK, float(connected), (worker,))


def of_worker(servicer: WorkerServicer, counts: WorkerCounts) -> Iterator[Reading]:
    name, engine = servicer.spec.instance_id, servicer.engine
    for kind in PassKind:
        yield Reading(fleet.WORKER_PASSES, counts.passes[kind], (kind.value,))
        yield Reading(fleet.WORKER_TOKENS, counts.tokens[kind], (kind.value,))
        yield Reading(fleet.WORKER_ENGINE, counts.engine_s[kind], (kind.value,))
    yield Reading(fleet.WORKER_FAILED, counts.passes_failed)
    stats = engine.stats()
    held = stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached
    yield Reading(names.KV_BLOCKS, held, (name, names.HELD))
    yield Reading(names.KV_BLOCKS, stats.kv_blocks_cached, (name, names.CACHED))
    yield Reading(names.KV_BLOCKS, stats.kv_blocks_free, (name, names.FREE))
    for incident, count in stats.incidents:
        yield Reading(names.INCIDENTS, count, (name, incident))
    streams = servicer.streams
    yield Reading(fleet.WORKER_LINK, float(servicer.linked))
    yield Reading(fleet.WORKER_EPOCH, servicer.epoch)
    yield Reading(fleet.WORKER_STREAMS, streams.total())
    yield Reading(fleet.WORKER_TAKEOVERS, streams[Claim.TAKEOVER])
    yield Reading(fleet.STREAM_BACKLOG, engine.book.kept_total)
    yield Reading(fleet.FRONT_ENDS_CUT, engine.book.cuts)
    yield Reading(names.DRAINING, float(servicer.leaving.done()))
    for role in Role:
        yield Reading(fleet.WORKER_ROLE, float(servicer.spec.role is role), (role.value,))


def of_controller(
    controller: FleetController, membership: Membership, pressures: Pressures
) -> Iterator[Reading]:
    """A standby has no pressures: it looks at no loads."""
    snapshot = membership.snapshot()
    leads = controller.leadership is not None
    yield Reading(fleet.LEADS, float(leads))
    yield Reading(fleet.MEMBERSHIP_AGE, snapshot.age_s if snapshot.stale else 0.0)
    for reason, count in controller.moves.items():
        yield Reading(fleet.MOVES, count, (reason.value,))
    for (shard, role), pressure in pressures.pools(controller.views if leads else {}).items():
        yield Reading(fleet.PRESSURE, pressure, (shard, role.value))
    sizes: Counter[tuple[str, Role, str]] = Counter()
    shards = set()
    for member in snapshot.of(MemberKind.WORKER):
        shards.add(member.shard)
        real = member.report.role if member.report is not None else Role.MIXED
        assigned = snapshot.assignments.get(member.member_id)
        sizes[member.shard, real, fleet.REAL] += 1
        sizes[member.shard, assigned.role if assigned is not None else real, fleet.WANTED] += 1
    for shard in sorted(shards):
        for role in Role:
            for which in (fleet.WANTED, fleet.REAL):
                yield Reading(fleet.POOL_SIZE, sizes[shard, role, which], (shard, role.value, which))
