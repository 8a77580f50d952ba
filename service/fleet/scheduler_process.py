"""The scheduler of a fleet: stands for election in its shard, leads with a `Reign` or waits as a standby."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from service.core.scheduler import PrefillScheduler
from service.fleet.gate import SchedulerGate
from service.fleet.health import LinkSettings
from service.fleet.membership import Lease, LeaseState, Member, MemberKind, Membership
from service.fleet.place import Place, Port, join, tell_failure
from service.fleet.reign import Observe, Reign
from service.fleet.rest import Rest
from service.fleet.shards import election_of, leader_of
from service.fleet.trace_link import TraceLink
from service.runtime.contract import Snapshot

log = logging.getLogger(__name__)

RETIRE_LOOK_S = 0.5


class SchedulerProcess:
    """failed: set to the reason once one of its loops can't go on. retired: once its shard is out of service
    and it holds nothing; the process should end then. make: a fresh scheduling core, one a reign.
    observe: who hears of a reign's requests and passes."""

    def __init__(
        self,
        place: Place,
        membership: Membership,
        make: Callable[[], PrefillScheduler],
        policy: str,
        backend: str,
        observe: Observe = lambda model, backend, t_classes: (),
        link: LinkSettings | None = None,
        traces: TraceLink | None = None,
    ) -> None:
        self._place = place
        self._membership = membership
        self._make = make
        self._policy = policy
        self._backend = backend
        self._observe = observe
        self._link = link
        self._traces = traces
        self.gate = SchedulerGate(place.member_id)
        self._port = Port(place, [self.gate.handlers, self.gate.status_handlers])
        self._lease: Lease | None = None
        self._running: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.retired: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None
        self.reigns = 0

    @property
    def address(self) -> str:
        return self._port.address

    async def start(self) -> None:
        await self._port.start()
        member = Member(self._place.member_id, MemberKind.SCHEDULER, self.address, self._place.shard)
        self._lease = await join(self._membership, member)
        self._running = asyncio.create_task(self._run(), name="election")
        self._running.add_done_callback(partial(tell_failure, self.failed))
        self._watching = asyncio.create_task(self._until_retired(), name="retirement")
        self._watching.add_done_callback(partial(tell_failure, self.failed))

    def snapshot(self) -> Snapshot:
        """Of the present reign, counts begin with it; a standby has nothing."""
        return self.gate.reign.pump.snapshot() if self.gate.reign is not None else Snapshot.empty()

    @property
    def works(self) -> bool:
        """Whether its loop goes on; a standby's does too."""
        return self._running is not None and not self._running.done()

    async def close(self) -> None:
        for task in (self._watching, self._running):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._lease is not None:
            await self._lease.leave()
        await self._port.stop()

    async def _until_retired(self) -> None:
        while not self._is_over():  # noqa: ASYNC110 - of the core, which sets no event
            await asyncio.sleep(RETIRE_LOOK_S)
        self.retired.set_result(f"shard {self._place.shard} is retired, and nothing is left in it")

    def _is_over(self) -> bool:
        """A standby stays while another one leads, which may hold requests."""
        snapshot, shard = self._membership.snapshot(), self._place.shard
        if snapshot.stale or shard not in snapshot.retired or snapshot.of(MemberKind.WORKER, shard):
            return False
        leader, reign = leader_of(snapshot, shard), self.gate.reign
        mine = leader is None or leader.candidate == self._place.member_id
        return mine and (reign is None or not reign.scheduler.live)

    async def _run(self) -> None:
        rest = Rest()
        while True:
            shard = self._place.shard
            leadership = await self._membership.campaign(election_of(shard), self._place.member_id)
            reign = Reign(
                shard,
                self._place.member_id,
                leadership.epoch,
                self._make(),
                self._membership,
                self._place.open_channel,
                self._backend,
                self._policy,
                self._observe,
                self._link,
                self._traces,
            )
            log.info("%s leads shard %s, epoch %d", self._place.member_id, shard, leadership.epoch)
            self.reigns += 1
            lost = asyncio.ensure_future(leadership.lost())
            try:
                self.gate.reign = reign
                await reign.start()
                await asyncio.wait({lost, reign.ended}, return_when=asyncio.FIRST_COMPLETED)
                why = reign.ended.result() if reign.ended.done() else lost.result()
                log.warning("the reign over shard %s, epoch %d, is over: %s", shard, leadership.epoch, why)
            finally:
                lost.cancel()
                self.gate.reign = None
                await reign.close()
                if leadership.state is not LeaseState.LOST:
                    await leadership.resign()
            if not lost.done() or lost.cancelled():
                await asyncio.sleep(rest.after(asyncio.get_running_loop().time() - reign.start_s))
