"""Workers go between shards, one more shard comes and one goes, over real gRPC: every request is answered
once or refused with a status."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest
from shard_rig import Fleet, answered, balanced, counts, fleet, submit
from test_processes import LINK, read, until

from service.core.reconcile import MoveReason
from service.core.types import Outcome
from service.fleet.link import Caller
from service.fleet.remote_worker import RemoteWorker, WorkerUnavailable
from service.fleet.shard_choice import by_session
from service.fleet.shard_controller import ShardSettings
from service.fleet.shard_move import ShardMover

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


async def test_a_move_that_is_taken_back_while_it_leaves_ends_and_the_worker_comes_back(monkeypatch) -> None:
    leaving, go = asyncio.Event(), asyncio.Event()

    async def read_out(mover: ShardMover) -> None:
        leaving.set()
        await go.wait()

    monkeypatch.setattr(ShardMover, "_read_out", read_out)
    async with fleet(a=2, b=1) as made:
        await made.want("a1", "b")
        await asyncio.wait_for(leaving.wait(), 20)
        await made.want("a1", "a")
        mine = made.workers["a1"]._membership
        await until(lambda: mine.snapshot().assignments["a1"].shard == "a")
        await asyncio.sleep(0)  # it has looked, and waits
        go.set()
        await until(lambda: made.used() == {"a": {"a0", "a1"}, "b": {"b0"}})
        assert made.snapshot.members["a1"].shard == "a"
        answered(await asyncio.gather(*(read(submit(made.front_ends["fe"], f"r{n}")) for n in range(4))))


async def test_a_worker_that_stops_while_it_leaves_does_not_wait_for_that(monkeypatch) -> None:
    leaving = asyncio.Event()

    async def read_out(mover: ShardMover) -> None:
        leaving.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(ShardMover, "_read_out", read_out)
    async with fleet(a=2, b=1) as made:
        await made.want("a1", "b")
        await asyncio.wait_for(leaving.wait(), 20)
        await made.want("a1", "a")
        mine = made.workers["a1"]._membership
        await until(lambda: mine.snapshot().assignments["a1"].shard == "a")
        await asyncio.wait_for(made.workers.pop("a1").close(), 20)
        await until(lambda: made.used() == {"a": {"a0"}, "b": {"b0"}})


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
