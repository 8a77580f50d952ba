"""An active scheduler: one leadership of one shard, from its election to its end.

It holds the scheduling core and a link to every worker of the shard, as membership shows them. A worker that
joins is taken over, one whose link is down leaves the core at once and is tried again while membership still
has it; one that leaves membership is given up. Roles are labels: what a worker reports is what the core is
told. A worker that obeys a newer epoch ends the reign: somebody else leads.

Front ends are served once the first worker has said what it can do, since that is what they check requests
against; until then this process says that it is a standby.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.core.scheduler import PrefillScheduler
from service.core.types import InstanceSpec, Role, RoleChanged
from service.fleet.health import LinkSettings
from service.fleet.link import Caller
from service.fleet.load import LoadReport
from service.fleet.membership import FleetSnapshot, Member, MemberKind, Membership
from service.fleet.remote_worker import OpenChannel, RemoteWorker, WorkerUnavailable
from service.fleet.scheduler_service import SchedulerIdentity, SchedulerServicer
from service.fleet.shards import in_words, served_by
from service.fleet.trace_link import TraceLink
from service.runtime.contract import Observer
from service.runtime.pump import Pump

log = logging.getLogger(__name__)

RETRY_S = 0.5  # after a worker could not be taken over, or was lost


Observe = Callable[[str, str, tuple[int, ...]], Sequence[Observer]]  # of a model, a backend and its T-classes


def front_end_of(wire_id: str) -> str:
    """Front ends put their name before every wire id."""
    return wire_id.partition("/")[0]


@dataclass(slots=True)
class _Held:
    """A worker that is, or is to be, in use."""

    member: Member
    worker: RemoteWorker | None = None
    task: asyncio.Task[None] | None = None
    role: Role = Role.MIXED


@dataclass(slots=True)
class Reign:
    """See the module text. ended: set to why it can't go on."""

    shard: str
    scheduler_id: str
    epoch: int
    scheduler: PrefillScheduler
    membership: Membership
    open_channel: OpenChannel
    backend: str
    policy: str
    observe: Observe = lambda model, backend, t_classes: ()
    settings: LinkSettings | None = None
    traces: TraceLink | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    servicer: SchedulerServicer | None = None
    start_s: float = field(init=False)  # on the event loop's clock
    ended: asyncio.Future[str] = field(init=False)
    pump: Pump = field(init=False)
    _held: dict[str, _Held] = field(default_factory=dict)
    _takeovers: int = 0  # of all workers: one that comes back must not see a number again
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _watching: asyncio.Task[None] | None = None
    _retired: bool = False
    _heard: list[Observer] = field(default_factory=list)  # the servicer and others, once there is a worker

    def __post_init__(self) -> None:
        self.start_s = asyncio.get_running_loop().time()
        self.ended = asyncio.get_running_loop().create_future()
        self.pump = Pump(self.scheduler, [], self._heard, needs_instance=False)

    async def start(self) -> None:
        await self.pump.start()
        self.pump.broken.add_done_callback(lambda broken: self._end(f"the core failed: {broken.result()}"))
        self._watching = asyncio.create_task(self._watch(), name=f"workers of {self.shard}")
        self._watching.add_done_callback(self._watch_failed)

    async def close(self) -> None:
        """End it: every request is answered, every link closed. Workers wait for the next scheduler."""
        self._end("closed")
        if self.servicer is not None:
            self.servicer.step_down()
        tasks = [task for task in (self._watching, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pump.close()

    @property
    def instances(self) -> tuple[str, ...]:
        """Those in use now."""
        return tuple(name for name, held in self._held.items() if held.worker is not None)

    # --- workers ---

    async def _watch(self) -> None:
        async for snapshot in self.membership.watch():
            self._reconcile(snapshot)
        self._end("membership was closed")

    def _reconcile(self, snapshot: FleetSnapshot) -> None:
        """Hold exactly the workers that are there. A stale snapshot takes nobody away."""
        self._retired = self.shard in snapshot.retired
        if self.servicer is not None:
            self.servicer.retired = self._retired
        members = {member.member_id: member for member in snapshot.of(MemberKind.WORKER, self.shard)}
        for name, member in members.items():
            held = self._held.get(name)
            if held is None:
                held = self._held[name] = _Held(member)
                self._begin(name, held)
            moved = held.member.address != member.address or held.member.incarnation != member.incarnation
            held.member = member
            if moved and held.worker is not None:
                held.worker.lost("it joined again as another process")
            self._follow_role(held)
        for name in list(self._held) if not snapshot.stale else ():
            if name not in members:
                self._give_up(name)

    def _begin(self, name: str, held: _Held) -> None:
        held.task = asyncio.create_task(self._use(name, held), name=f"worker {name}")
        self._tasks.add(held.task)
        held.task.add_done_callback(self._tasks.discard)

    async def _use(self, name: str, held: _Held) -> None:
        """Take the worker over, use it until it is down, and again, while it is a member. That it is lost is
        said once, until it is back: what is dead is tried in vain until its lease is over."""
        said = False
        while True:
            self._takeovers = incarnation = self._takeovers + 1
            caller = Caller(self.scheduler_id, self.epoch, incarnation, attempt=0, shard=self.shard)
            worker = RemoteWorker(
                held.member.address,
                caller,
                self.open_channel,
                self.settings,
                front_end_of=front_end_of,
                trace_of=self.traces.carrier if self.traces is not None else None,
            )
            worker.stale.add_done_callback(self._is_stale)
            try:
                spec = await worker.start()
                self._add(name, held, worker, spec)
                log.info("worker %s is in use, take-over %d", name, incarnation)
                said = False
                lost = f"is down: {await asyncio.shield(worker.down)}"
            except WorkerUnavailable as error:
                lost = f"can't be used: {error}"
            except ValueError as error:
                lost = f"is refused: {error}"
            finally:
                if held.worker is worker:
                    held.worker = None
                    self.pump.remove(name, "its link is down")
                await worker.close()
            log.log(logging.DEBUG if said else logging.WARNING, "worker %s %s", name, lost)
            said = True
            await asyncio.sleep(RETRY_S)

    def _add(self, name: str, held: _Held, worker: RemoteWorker, spec: InstanceSpec) -> None:
        """Raises ValueError for a worker that says it is another one, or that serves something else."""
        if spec.instance_id != name:
            raise ValueError(f"{held.member.address} calls itself {spec.instance_id}, membership says {name}")
        if self.servicer is None:
            self._open_to_front_ends(held.member, spec)
        self._check_served(held.member)
        held.role = spec.role
        self.pump.add(worker)
        held.worker = worker
        self._follow_role(held)

    def _check_served(self, member: Member) -> None:
        """Front ends were told one model and bundle for the whole reign. It ends where all workers have
        others by now. Raises ValueError."""
        assert self.servicer is not None, "front ends were told"
        identity, theirs = self.servicer.identity, served_by(member)
        mine = identity.model, identity.bundle_id
        if theirs == mine:
            return
        if all(served_by(held.member) != mine for held in self._held.values()):
            self._end(f"its workers serve {in_words(theirs)} now, this reign {in_words(mine)}")
        raise ValueError(f"it serves {in_words(theirs)}, shard {self.shard} serves {in_words(mine)}")

    def _follow_role(self, held: _Held) -> None:
        report = held.member.report
        if held.worker is not None and report is not None and report.role is not held.role:
            held.role = report.role
            self.pump.send(RoleChanged(held.member.member_id, report.role))

    def _give_up(self, name: str) -> None:
        held = self._held.pop(name)
        if held.worker is not None:
            held.worker.lost("it left the fleet")
        if held.task is not None:
            held.task.cancel()

    # --- front ends ---

    def _open_to_front_ends(self, member: Member, spec: InstanceSpec) -> None:
        model, bundle_id = served_by(member)
        identity = SchedulerIdentity(
            self.scheduler_id,
            self.epoch,
            model,
            str(member.facts.get("backend", self.backend)),
            self.policy,
            bundle_id,
            spec.capabilities,
        )
        self._heard.extend(self.observe(identity.model, identity.backend, spec.profiles.t_classes))
        load = LoadReport(self.scheduler, self.epoch, asyncio.get_running_loop().time)
        called = self.traces.called if self.traces is not None else None
        self.servicer = SchedulerServicer(self.pump, identity, relay=False, load=load, called=called)
        self.servicer.retired = self._retired
        self._heard.append(self.servicer)
        self.ready.set()

    # --- its end ---

    def _is_stale(self, stale: asyncio.Future[int]) -> None:
        if not stale.cancelled():
            self._end(f"a worker obeys epoch {stale.result()}, this one is {self.epoch}")

    def _watch_failed(self, watching: asyncio.Task[None]) -> None:
        error = None if watching.cancelled() else watching.exception()
        if error is not None:
            log.error("the workers of shard %s can't be followed", self.shard, exc_info=error)
            self._end(f"its workers can't be followed: {type(error).__name__}: {error}")

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)


Starter = Callable[[int], Reign]  # epoch -> the reign with it
