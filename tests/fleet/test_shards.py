"""Several shards in one event loop, over real gRPC: requests find theirs, workers go between them, one more
comes and one goes, and every request is answered once or refused with a status."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import pytest
from test_processes import CAPABILITIES, COST, LINK, PROFILES, SCALE, read, until

from engines.blocks import chain_hashes
from engines.simulated import SimulatedModel
from engines.types import EngineRequest
from service.core.reconcile import MoveReason
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Request, Role
from service.fleet.controller import ControllerSettings, RolesStay
from service.fleet.link import Caller
from service.fleet.memory import MemoryFleet
from service.fleet.place import Place
from service.fleet.processes import ControllerProcess, FrontEndProcess, SchedulerProcess, WorkerProcess
from service.fleet.remote_runtime import RemoteHandle, RemoteSettings
from service.fleet.remote_worker import RemoteWorker, WorkerUnavailable
from service.fleet.shard_choice import by_session
from service.fleet.shard_controller import ShardSettings
from service.fleet.shards import shard_capacities
from service.policies import make_scheduler
from service.runtime.worker import TimedRunner


@dataclass
class Fleet:
    """Members by name; the first letter of a worker or scheduler is its shard: a1 is of shard a."""

    store: MemoryFleet = field(default_factory=MemoryFleet)
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    schedulers: dict[str, SchedulerProcess] = field(default_factory=dict)
    front_ends: dict[str, FrontEndProcess] = field(default_factory=dict)
    controller: ControllerProcess | None = None
    memberships: list = field(default_factory=list)

    async def membership(self):
        made = self.store.membership()
        await made.open()
        self.memberships.append(made)
        return made

    def place(self, name: str) -> Place:
        return Place(name, name[0], "127.0.0.1:0", grpc.aio.insecure_channel)

    async def worker(self, name: str, drain_s: float = 30.0) -> WorkerProcess:
        spec = InstanceSpec(name, CAPABILITIES, PROFILES, COST.scaled(SCALE))
        runner = TimedRunner(SimulatedModel(CAPABILITIES, PROFILES, COST), SCALE)
        facts = {"model": "m", "backend": "simulated", "bundle_id": ""}
        made = WorkerProcess(
            self.place(name), await self.membership(), spec, runner, facts, LINK, drain_s=drain_s
        )
        await made.start()
        self.workers[name] = made
        return made

    async def scheduler(self, name: str, **knobs) -> SchedulerProcess:
        settings = SchedulerSettings(**knobs)
        made = SchedulerProcess(
            self.place(name),
            await self.membership(),
            lambda: make_scheduler("plaserve", settings),
            "plaserve",
            "simulated",
            link=LINK,
        )
        await made.start()
        self.schedulers[name] = made
        return made

    async def front_end(self, name: str, shards: Sequence[str]) -> FrontEndProcess:
        settings = RemoteSettings(failover_s=5.0, tokens_s=2.0)
        made = FrontEndProcess(self.place(name), await self.membership(), settings, shards=shards)
        await made.start("127.0.0.1:1")
        self.front_ends[name] = made
        return made

    async def control(self, shards: ShardSettings | None = None) -> None:
        settings = ControllerSettings(shards=shards or ShardSettings())
        self.controller = ControllerProcess(
            self.place("c"), await self.membership(), Quick, SchedulerSettings(), settings
        )
        await self.controller.start()

    @property
    def snapshot(self):
        return self.memberships[0].snapshot()

    def used(self) -> dict[str, set[str]]:
        """Workers in use by the active schedulers, by shard."""
        found: dict[str, set[str]] = {}
        for name, scheduler in self.schedulers.items():
            reign = scheduler.gate.reign
            if reign is not None:
                found.setdefault(name[0], set()).update(reign.instances)
        return {shard: names for shard, names in found.items() if names}

    async def want(self, worker: str, shard: str, reason: MoveReason = MoveReason.BALANCE) -> None:
        given = self.snapshot.assignments.get(worker)
        await self.memberships[0].assign(
            worker, Role.MIXED, expected=given.number if given else 0, reason=reason, by="me", shard=shard
        )


class Quick(RolesStay):
    period_s = 0.05


@asynccontextmanager
async def fleet(**workers: int) -> AsyncIterator[Fleet]:
    """fleet(a=2, b=1): two shards with so many workers, a scheduler each, one front end for all."""
    made = Fleet()
    try:
        for shard, count in workers.items():
            for n in range(count):
                await made.worker(f"{shard}{n}")
            await made.scheduler(f"{shard}-s0")
        front_end = await made.front_end("fe", ("*",))
        await until(lambda: sum(map(len, made.used().values())) == sum(workers.values()))
        await until(lambda: set(front_end.runtime.uplinks.shards) == {s for s, n in workers.items()})
        await until(lambda: len(front_end.runtime.uplinks.down) == sum(not n for n in workers.values()))
        yield made
    finally:
        for group in (made.front_ends, made.schedulers, made.workers):
            for process in group.values():
                await process.close()
        if made.controller is not None:
            await made.controller.close()


def submit(
    front_end: FrontEndProcess, name: str, tokens: int = 60, answer: int = 4, session: str = ""
) -> RemoteHandle:
    ids = tuple((sum(name.encode()) * 31 + position) % 40_000 for position in range(tokens))
    now_s = asyncio.get_running_loop().time()
    hashes = chain_hashes(ids, CAPABILITIES.block_tokens)
    request = Request(name, tokens, answer, now_s, hashes, session=session)
    return front_end.submit(request, EngineRequest(name, ids, answer))


def answered(ended) -> None:
    """Each whole: as many tokens as were asked for, and once."""
    for tokens, record in ended:
        assert record.outcome is Outcome.COMPLETED, record
        assert len(tokens) == record.output_tokens == record.request.max_new_tokens


def counts(made: Fleet) -> dict[str, int]:
    """Requests that each shard's present scheduler was given."""
    return {
        name[0]: s.gate.reign.pump.snapshot().submitted
        for name, s in made.schedulers.items()
        if s.gate.reign is not None
    }


def balanced(made: Fleet) -> None:
    for front_end in made.front_ends.values():
        now = front_end.runtime.snapshot()
        assert now.submitted == sum(now.outcomes.values()) + now.queued + now.running
        assert (
            all(u.load == 0 for u in front_end.runtime.uplinks._uplinks.values()) or now.queued + now.running
        )
    for scheduler in made.schedulers.values():
        if scheduler.gate.reign is not None:
            now = scheduler.gate.reign.pump.snapshot()
            assert now.submitted == sum(now.outcomes.values()) + now.queued + now.running


# --- requests ---


async def test_sessions_stay_in_their_shard_and_the_rest_is_spread() -> None:
    async with fleet(a=1, b=1) as made:
        front_end = made.front_ends["fe"]
        homes = {f"s{n}": by_session(f"\0s{n}", shard_capacities(made.snapshot))[0] for n in range(6)}
        assert set(homes.values()) == {"a", "b"}
        for name, home in homes.items():
            before = counts(made)
            answered(
                await asyncio.gather(*(read(submit(front_end, f"{name}{n}", session=name)) for n in range(3)))
            )
            after = counts(made)
            assert {shard: after[shard] - before[shard] for shard in after} == {home: 3, "ab".strip(home): 0}
        before = counts(made)
        answered(await asyncio.gather(*(read(submit(front_end, f"r{n}")) for n in range(20))))
        assert all(count - before[shard] >= 7 for shard, count in counts(made).items())
        balanced(made)


async def test_the_load_of_a_shard_is_its_prompts_without_a_token_and_its_requests() -> None:
    async with fleet(a=1) as made:
        front_end = made.front_ends["fe"]
        (uplink,) = front_end.runtime.uplinks._uplinks.values()
        handles = [submit(front_end, f"r{n}", 300, 300) for n in range(2)]
        assert uplink.load == 602
        await until(lambda: all(handle.record.output_tokens for handle in handles))
        assert uplink.load == 2
        for handle in handles:
            handle.cancel()
        await asyncio.gather(*map(read, handles))
        assert uplink.load == 0


async def test_a_full_shard_is_passed_over_and_when_all_are_full_that_is_said() -> None:
    made = Fleet()
    try:
        for shard in "ab":
            await made.worker(f"{shard}0")
            await made.scheduler(f"{shard}-s0", queue_requests_max=6, queue_short_share=0.0)
        front_end = await made.front_end("fe", ("a", "b"))
        await until(lambda: not front_end.runtime.uplinks.down and len(front_end.runtime.uplinks.shards) == 2)
        ended = await asyncio.gather(
            *(read(submit(front_end, f"r{n}", 300, session="one")) for n in range(40))
        )
        outcomes = Counter(record.outcome for _, record in ended)
        assert set(outcomes) == {Outcome.COMPLETED, Outcome.REJECTED_CAPACITY}
        assert all(count >= 6 for count in counts(made).values())
        assert outcomes[Outcome.COMPLETED] >= 12
        refused = [record for _, record in ended if record.outcome is Outcome.REJECTED_CAPACITY]
        assert all(record.retry_after_s for record in refused)
        # Each refused request has asked both; one that was taken by the second was refused by the first.
        turned_away = sum(
            s.gate.reign.scheduler.outcomes[Outcome.REJECTED_CAPACITY] for s in made.schedulers.values()
        )
        assert turned_away > 2 * len(refused)
        balanced(made)
    finally:
        for group in (made.front_ends, made.schedulers, made.workers):
            for process in group.values():
                await process.close()


async def test_a_shard_that_loses_its_scheduler_hands_on_what_has_shown_no_token() -> None:
    async with fleet(a=1, b=1) as made:
        front_end = made.front_ends["fe"]
        reading = [asyncio.create_task(read(submit(front_end, f"r{n}", 500, 3))) for n in range(16)]
        await until(lambda: all(count >= 3 for count in counts(made).values()))
        await made.schedulers.pop("a-s0").close()
        ended = await asyncio.gather(*reading)
        outcomes = Counter(record.outcome for _, record in ended)
        assert set(outcomes) <= {Outcome.COMPLETED, Outcome.UNAVAILABLE}
        assert outcomes[Outcome.COMPLETED] >= 12
        answered([(tokens, record) for tokens, record in ended if record.outcome is Outcome.COMPLETED])
        answered([await read(submit(front_end, "after", session=f"s{n}")) for n in range(4)])
        balanced(made)


async def test_a_front_end_of_one_shard_leaves_the_others_alone() -> None:
    async with fleet(a=1, b=1) as made:
        only = await made.front_end("fb", ("b",))
        await until(lambda: not only.runtime.uplinks.down and bool(only.runtime.uplinks.shards))
        answered(await asyncio.gather(*(read(submit(only, f"r{n}")) for n in range(6))))
        assert counts(made) == {"a": 0, "b": 6}
        assert set(only._links) == {"b0"}


async def test_a_shard_of_another_model_is_not_used() -> None:
    async with fleet(a=1) as made:
        front_end = made.front_ends["fe"]
        made.workers["b0"] = other = WorkerProcess(
            made.place("b0"),
            await made.membership(),
            InstanceSpec("b0", CAPABILITIES, PROFILES, COST.scaled(SCALE)),
            TimedRunner(SimulatedModel(CAPABILITIES, PROFILES, COST), SCALE),
            {"model": "another", "bundle_id": ""},
            LINK,
        )
        await other.start()
        await made.scheduler("b-s0")
        await until(lambda: "b" in front_end.runtime.uplinks.shards and not front_end.runtime.uplinks.down)
        answered(await asyncio.gather(*(read(submit(front_end, f"r{n}", session=f"s{n}")) for n in range(8))))
        assert counts(made) == {"a": 8, "b": 0}


# --- workers ---


async def test_a_worker_goes_to_another_shard_under_load_and_nothing_is_lost() -> None:
    async with fleet(a=2, b=1) as made:
        front_end = made.front_ends["fe"]
        reading = [asyncio.create_task(read(submit(front_end, f"r{n}", 300, 20))) for n in range(24)]
        await until(lambda: bool(made.workers["a1"].servicer.engine.held))
        await made.want("a1", "b")
        for n in range(24):
            reading.append(asyncio.create_task(read(submit(front_end, f"later{n}", 80, 4))))
            await asyncio.sleep(0.01)
        answered(await asyncio.gather(*reading))
        await until(lambda: made.used() == {"a": {"a0"}, "b": {"b0", "a1"}})
        assert made.snapshot.members["a1"].shard == "b"
        before = counts(made)["b"]
        answered(await asyncio.gather(*(read(submit(front_end, f"x{n}", session="s")) for n in range(6))))
        balanced(made)
        assert before <= counts(made)["b"]
        await made.want("a1", "a")  # and back: the shard that it was in before obeys its old epoch
        await until(lambda: made.used() == {"a": {"a0", "a1"}, "b": {"b0"}})
        answered(await asyncio.gather(*(read(submit(front_end, f"y{n}")) for n in range(6))))


async def test_a_scheduler_of_another_shard_is_refused_and_does_not_stand_down() -> None:
    """Its epoch is lower than that of the worker's shard, which says nothing."""
    async with fleet(a=1, b=1) as made:
        reigns = [made.schedulers[name].gate.reign for name in ("a-s0", "b-s0")]
        assert reigns[0].epoch < reigns[1].epoch == made.workers["b0"].servicer.epoch
        caller = Caller("a-s0", reigns[0].epoch, 1000, 1, shard="a")
        remote = RemoteWorker(made.workers["b0"].address, caller, grpc.aio.insecure_channel, LINK)
        with pytest.raises(WorkerUnavailable, match="of shard b"):
            await remote.start()
        assert not remote.stale.done()
        await remote.close()
        assert made.used() == {"a": {"a0"}, "b": {"b0"}}


async def test_a_move_that_is_taken_back_while_it_drains_is_called_off_at_once() -> None:
    async with fleet(a=1, b=1) as made:
        front_end = made.front_ends["fe"]
        long = [asyncio.create_task(read(submit(front_end, f"long{n}", 60, 400))) for n in range(4)]
        await until(lambda: bool(made.workers["a0"].servicer.engine.held))
        await made.want("a0", "b")
        reign = made.schedulers["a-s0"].gate.reign
        await until(lambda: not reign.scheduler.instances["a0"].takes_new)
        await made.want("a0", "a")
        await until(lambda: reign.scheduler.instances["a0"].takes_new)
        assert reign.instances == ("a0",)
        assert reign._takeovers == 1  # it was never given up
        answered(await asyncio.gather(*long))
        assert made.used() == {"a": {"a0"}, "b": {"b0"}}


async def test_a_move_to_a_shard_without_a_scheduler_waits_and_serves_on() -> None:
    async with fleet(a=1, b=1) as made:
        await made.schedulers.pop("b-s0").close()
        await until(lambda: "shard-b" not in made.snapshot.leaders)
        await made.want("a0", "b")
        front_end = made.front_ends["fe"]
        answered(await asyncio.gather(*(read(submit(front_end, f"r{n}")) for n in range(6))))
        assert made.used() == {"a": {"a0"}}
        await made.scheduler("b-s1")
        await until(lambda: made.used() == {"b": {"a0", "b0"}})


async def test_a_drain_that_takes_too_long_gives_the_move_up_and_cuts_off_only_for_a_retired_shard() -> None:
    made = Fleet()
    try:
        for name in ("a0", "b0"):
            await made.worker(name, drain_s=0.2)
            await made.scheduler(f"{name[0]}-s0")
        front_end = await made.front_end("fe", ("a",))
        await until(lambda: not front_end.runtime.uplinks.down and bool(front_end.runtime.uplinks.shards))
        everywhere = await made.front_end("f2", ("*",))
        await until(
            lambda: not everywhere.runtime.uplinks.down and len(everywhere.runtime.uplinks.shards) == 2
        )
        in_a = next(s for s in map(str, range(99)) if by_session(f"\0{s}", {"a": 1.0, "b": 1.0})[0] == "a")
        long = asyncio.create_task(read(submit(front_end, "long", 60, 1500)))
        other = asyncio.create_task(read(submit(everywhere, "other", 60, 500, session=in_a)))
        await until(lambda: len(made.workers["a0"].servicer.engine.held) == 2)
        reign = made.schedulers["a-s0"].gate.reign
        await made.want("a0", "b")
        await until(lambda: not reign.scheduler.instances["a0"].takes_new)
        await until(lambda: reign.scheduler.instances["a0"].takes_new)
        assert made.snapshot.members["a0"].shard == "a"
        assert not long.done()
        answered([await read(submit(front_end, "beside"))])
        await made.want("a0", "a")
        await made.memberships[0].retire("a", True, by="me")
        await made.want("a0", "b", MoveReason.RETIRED)
        tokens, record = await long
        assert (record.outcome, len(tokens) > 0) == (Outcome.UNAVAILABLE, True)  # it knows no other shard
        answered([await other])  # it goes on in the other one
        await until(lambda: made.used() == {"b": {"a0", "b0"}})
        assert made.workers["a0"].servicer.engine.held == ()
    finally:
        for group in (made.front_ends, made.schedulers, made.workers):
            for process in group.values():
                await process.close()


async def test_a_worker_that_was_moved_comes_back_to_where_it_is_wanted() -> None:
    async with fleet(a=1, b=1) as made:
        await made.want("a0", "b")
        await until(lambda: made.used() == {"b": {"a0", "b0"}})
        await made.workers.pop("a0").close()
        await until(lambda: made.used() == {"b": {"b0"}})
        again = await made.worker("a0")
        assert again._lease.member.shard == "b"  # from the first on
        await until(lambda: made.used() == {"b": {"a0", "b0"}})


# --- shards come and go ---


async def test_a_shard_that_comes_gets_its_workers_and_one_that_is_retired_ends_under_load() -> None:
    """The controller of the product; nothing fails, whoever moves meanwhile."""
    async with fleet(a=3, b=3) as made:
        await made.control()
        front_end = made.front_ends["fe"]
        ended, stop = [], asyncio.Event()

        async def load(number: int) -> None:
            for turn in range(10_000):
                if stop.is_set():
                    return
                session = f"s{number}" if number % 2 else ""
                ended.append(await read(submit(front_end, f"r{number}-{turn}", 40 + 40 * number, 4, session)))

        clients = [asyncio.create_task(load(number)) for number in range(8)]
        await until(lambda: len(ended) > 20, 60)
        await made.scheduler("c-s0")
        await until(lambda: {s: len(n) for s, n in made.used().items()} == {"a": 2, "b": 2, "c": 2}, 60)
        await until(lambda: counts(made)["c"] > 10, 60)
        await made.memberships[0].retire("b", True, by="me")
        await until(lambda: {s: len(n) for s, n in made.used().items()} == {"a": 3, "c": 3}, 60)
        await asyncio.wait_for(made.schedulers["b-s0"].retired, 60)
        await made.schedulers.pop("b-s0").close()
        await until(lambda: set(front_end.runtime.uplinks.shards) == {"a", "c"}, 60)
        before = len(ended)
        await until(lambda: len(ended) > before + 20, 60)
        stop.set()
        await asyncio.gather(*clients)
        answered(ended)
        reasons = [move.reason for move in reversed(made.snapshot.moves)]
        assert reasons == [MoveReason.BALANCE] * 2 + [MoveReason.RETIRED] * 2
        balanced(made)


async def test_a_scheduler_of_a_retired_shard_sends_new_requests_away() -> None:
    """Also where the front end has not heard of it yet."""
    async with fleet(a=1, b=1) as made:
        front_end = made.front_ends["fe"]
        made.schedulers["b-s0"].gate.reign.servicer.retired = True
        answered(await asyncio.gather(*(read(submit(front_end, f"r{n}", session=f"s{n}")) for n in range(8))))
        assert counts(made) == {"a": 8, "b": 0}
        balanced(made)


async def test_a_front_end_of_retired_shards_only_says_so_at_once_and_ends_what_it_has() -> None:
    async with fleet(a=1, b=1) as made:
        only = await made.front_end("fb", ("b",))
        await until(lambda: not only.runtime.uplinks.down and bool(only.runtime.uplinks.shards))
        before = asyncio.create_task(read(submit(only, "before", 300, 60)))
        await until(lambda: bool(made.workers["b0"].servicer.engine.held))
        await made.memberships[0].retire("b", True, by="me")
        await until(lambda: only.runtime.uplinks.retired)
        assert (await read(submit(only, "late")))[1].outcome is Outcome.REJECTED_DRAINING
        made.schedulers["b-s0"].gate.reign.servicer.retired = False  # would take what is sent
        count = counts(made)["b"]
        await until(lambda: "b" in made.memberships[-2].snapshot().retired)
        answered(await asyncio.gather(*(read(submit(made.front_ends["fe"], f"x{n}")) for n in range(12))))
        assert counts(made)["b"] == count
        answered([await before])
        answered([await read(submit(made.front_ends["fe"], "elsewhere"))])
        await made.memberships[0].retire("b", False, by="me")
        await until(lambda: not only.runtime.uplinks.retired)
        answered([await read(submit(only, "again"))])


async def test_a_move_that_nobody_carries_out_is_taken_back_and_its_worker_rests() -> None:
    async with fleet(a=4, b=0) as made:
        for worker in made.workers.values():
            (mover,) = [task for task in worker._tasks if task.get_name() == "shard"]
            mover.cancel()
        await made.control(ShardSettings(overdue_s=0.2, rest_s=1000.0))
        await until(lambda: sum(m.reason is MoveReason.OVERDUE for m in made.snapshot.moves) == 4)
        moves = list(reversed(made.snapshot.moves))
        assert [m.reason for m in moves] == [MoveReason.BALANCE, MoveReason.OVERDUE] * 4
        assert {m.worker_id for m in moves} == set(made.workers)  # each once, and then no more
        assert (moves[1].worker_id, moves[1].from_shard, moves[1].to_shard) == (moves[0].worker_id, "b", "a")
        assert moves[0].facts == {"capacity_from": 4.0, "capacity_to": 0.0}
        await asyncio.sleep(0.5)
        assert len(made.snapshot.moves) == 8
