"""How a worker goes to another shard: it is wanted there, drains for its own, leaves it, and joins the other.

    serving -> draining -> leaving -> serving in the new shard
                  `-> serving as before

Draining: the scheduler is asked for nothing new; what is here ends and is read. Nothing begins before the
other shard has an active scheduler. The move is called off, and work taken again at once, when the worker is
wanted elsewhere meanwhile. After `drain_s` it is given up, unless the shard that it leaves is retired: then
it leaves what is left. Answers that have begun go on elsewhere (`going_on`).

Leaving: schedulers of the old shard are refused from then on, whatever their epoch, and those of the new one
that are older than the one that leads. Only after that others are told where it is. What its cache holds goes
with it.

Where membership can't be told, it stays in its old shard and tries again when that is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from service.fleet.membership import Assignment, FleetSnapshot, Lease, Membership, MembershipError
from service.fleet.shards import leader_of, wanted_shard
from service.fleet.worker_service import WorkerServicer

log = logging.getLogger(__name__)

LOOK_S = 0.02
READ_S = 1.0


class ShardMover:
    """lock: held from draining on, since a change of engine must not come between."""

    def __init__(
        self,
        membership: Membership,
        lease: Lease,
        worker: WorkerServicer,
        lock: asyncio.Lock,
        drain_s: float,
    ) -> None:
        self._membership = membership
        self._lease = lease
        self._worker = worker
        self._lock = lock
        self._drain_s = drain_s
        self._target = ""  # of the move that is under way
        self._leaving = False  # past the point where it can be called off
        self._given_up = 0  # number of the assignment that could not be carried out
        self._moving: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Keep to what is wanted; ends with membership or by cancellation."""
        try:
            async for snapshot in self._membership.watch():
                await self._look(snapshot)
        finally:
            await self._call_off()

    async def _look(self, snapshot: FleetSnapshot) -> None:
        here = self._lease.member
        wanted, target = snapshot.assignments.get(here.member_id), wanted_shard(snapshot, here)
        if self._moving is not None and not self._moving.done():
            if target == self._target:
                return
            if self._leaving:  # to its end, which is bounded; what is wanted by then may be another shard
                await asyncio.wait({self._moving})
                await self._look(self._membership.snapshot())
                return
            log.info("the move to shard %s is called off", self._target)
            await self._call_off()
        may = wanted is not None and wanted.number != self._given_up and not snapshot.stale
        if may and target != here.shard and leader_of(snapshot, target) is not None:
            assert wanted is not None
            self._target = target
            self._moving = asyncio.create_task(self._move(wanted, target), name=f"to shard {target}")
            self._moving.add_done_callback(_log_failure)

    async def _call_off(self) -> None:
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    async def _move(self, wanted: Assignment, target: str) -> None:
        worker, here = self._worker, self._lease.member.shard
        async with self._lock:
            log.info("it leaves shard %s for %s: %s", here, target, wanted.reason)
            worker.hold(f"it goes to shard {target}")
            try:
                drained = await self._drained()
                if worker.leaving.done() or worker.failed.done():
                    return
                if not drained and here not in self._membership.snapshot().retired:
                    log.warning("after %g s it still has requests; it stays in shard %s", self._drain_s, here)
                    self._given_up = wanted.number
                    return
                await self._leave(here, target)
            finally:
                worker.release()

    async def _drained(self) -> bool:
        """Whether all that was here has ended and is read."""
        worker = self._worker
        try:
            async with asyncio.timeout(self._drain_s):
                while not (worker.quiet and worker.engine.idle) and not worker.leaving.done():  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            return False
        return True

    async def _read_out(self) -> None:
        """Front ends of the old shard alone look for tokens here only until they hear where it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                while not self._worker.engine.book.idle:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)

    async def _leave(self, here: str, target: str) -> None:
        self._leaving = True
        try:
            leader = leader_of(self._membership.snapshot(), target)
            self._worker.join_shard(target, leader.epoch if leader is not None else 0)
            await self._read_out()
            await self._lease.update(shard=target)
            log.info("it is in shard %s now, it was in %s", target, here)
        except MembershipError as error:
            log.warning("it stays in shard %s, as nobody can be told: %s", here, error)
            self._worker.join_shard(here)
            with contextlib.suppress(MembershipError):  # a write of unknown fate is undone when it can be
                await self._lease.update(shard=here)
        finally:
            self._leaving = False


def _log_failure(moving: asyncio.Task[None]) -> None:
    """Tried again when membership changes."""
    if not moving.cancelled() and moving.exception() is not None:
        log.error("the move to another shard failed", exc_info=moving.exception())
