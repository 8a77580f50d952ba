"""Requests find their shard: sessions theirs, the rest the less loaded, others where it takes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter

from shard_rig import Fleet, answered, balanced, counts, fleet, submit
from test_processes import CAPABILITIES, COST, LINK, PROFILES, SCALE, read, until

from engines.simulated import SimulatedModel
from service.core.types import InstanceSpec, Outcome
from service.fleet.processes import WorkerProcess
from service.fleet.shard_choice import by_session
from service.fleet.shards import shard_capacities
from service.runtime.worker import TimedRunner


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


async def of_model(made: Fleet, name: str, model: str) -> WorkerProcess:
    worker = WorkerProcess(
        made.place(name),
        await made.membership(),
        InstanceSpec(name, CAPABILITIES, PROFILES, COST.scaled(SCALE)),
        TimedRunner(SimulatedModel(CAPABILITIES, PROFILES, COST), SCALE),
        {"model": model, "bundle_id": ""},
        LINK,
    )
    await worker.start()
    return worker


async def test_a_shard_of_another_model_is_not_used() -> None:
    async with fleet(a=1) as made:
        front_end = made.front_ends["fe"]
        made.workers["b0"] = await of_model(made, "b0", "another")
        await made.scheduler("b-s0")
        await until(lambda: "b" in front_end.runtime.uplinks.shards and not front_end.runtime.uplinks.down)
        answered(await asyncio.gather(*(read(submit(front_end, f"r{n}", session=f"s{n}")) for n in range(8))))
        assert counts(made) == {"a": 8, "b": 0}


async def test_a_worker_of_another_model_is_not_used_beside_the_others(caplog) -> None:
    """It would answer for their model; once they are all gone the shard serves the other one."""
    async with fleet(a=1) as made:
        made.workers["a1"] = await of_model(made, "a1", "another")
        await until(lambda: "shard a serves m (bundle none)" in caplog.text)
        answered(await asyncio.gather(*(read(submit(made.front_ends["fe"], f"r{n}")) for n in range(6))))
        assert made.used() == {"a": {"a0"}}
        assert made.schedulers["a-s0"].reigns == 1
        await made.workers.pop("a0").close()
        await until(lambda: made.used() == {"a": {"a1"}})
        assert made.schedulers["a-s0"].gate.reign.servicer.identity.model == "another"
        assert made.schedulers["a-s0"].reigns == 2
