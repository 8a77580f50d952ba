"""Workers in processes of their own: killed in a pass, and left behind by a scheduler."""

from __future__ import annotations

import asyncio

from link_rig import (
    Reader,
    a_pump,
    a_remote,
    a_token_link,
    a_worker_process,
    ended,
    submit,
    until,
)

from service.core.types import Outcome, Reason


async def test_a_worker_that_is_killed_in_a_pass_loses_no_request_and_answers_none_twice() -> None:
    """What had shown no token runs again on the other; what had ends as failed, the instance as reason."""
    reader = Reader()
    async with (
        a_worker_process("w0", time_scale=10.0) as doomed,
        a_worker_process("w1", time_scale=0.05) as other,
        a_remote(doomed.address) as first,
        a_remote(other.address) as second,
        a_token_link(other.address, reader),
        a_pump(first) as pump,
    ):
        await second.start()
        begun = [submit(pump, f"begun{index}", 30, 4000) for index in range(3)]
        await until(lambda: all(handle.record.output_tokens > 2 for handle in begun))
        fresh = [submit(pump, f"fresh{index}", 3000, 3) for index in range(8)]
        await until(lambda: any(handle.record.first_pass_start_s is not None for handle in fresh))
        await doomed.kill()
        pump.add(second)
        lost = [await ended(handle) for handle in begun]
        saved = [await ended(handle) for handle in fresh]
        assert {(r.outcome, r.reason) for r in lost} == {(Outcome.UNAVAILABLE, Reason.INSTANCE_LOST)}
        assert {r.detail[:4] for r in lost} == {"gone"}
        whole = [r for r in saved if r.outcome is Outcome.COMPLETED]
        assert whole
        for record in saved:  # a pass or two may have ended before the kill
            assert record in whole or (record.outcome is Outcome.UNAVAILABLE and record.output_tokens > 0)
        await reader.until(
            lambda: sum(map(len, reader.tokens.values())) == sum(r.output_tokens for r in whole)
        )
        assert list(pump.scheduler.instances) == ["w1"]
        assert pump.scheduler.submitted == sum(pump.scheduler.outcomes.values())
        assert not pump.broken.done()


async def test_a_fleet_whose_only_worker_dies_goes_on_with_the_next_one() -> None:
    async with a_worker_process("w0") as before, a_remote(before.address) as first, a_pump(first) as pump:
        assert (await ended(submit(pump, "a"))).outcome is Outcome.COMPLETED
        await before.kill()
        await until(lambda: not pump.scheduler.instances)
        refused = await ended(submit(pump, "b"))
        assert refused.reason is Reason.NO_INSTANCE
        pump.remove("w0")
        async with a_worker_process("w0") as after, a_remote(after.address, incarnation=2) as second:
            await second.start()
            pump.add(second)
            assert (await ended(submit(pump, "c"))).outcome is Outcome.COMPLETED
            pump.remove("w0")


async def test_a_scheduler_that_is_replaced_leaves_its_worker_to_the_next_one() -> None:
    async with (
        a_worker_process("w0", time_scale=0.5) as worker,
        a_remote(worker.address, epoch=1) as old,
        a_remote(worker.address, epoch=2, scheduler="s2") as new,
        a_pump(old) as before,
    ):
        orphan = submit(before, "orphan", 30, 4000)
        await until(lambda: orphan.record.output_tokens > 1)
        async with a_pump(new) as after:
            assert new.held == ("orphan",)
            assert (await ended(orphan)).outcome is Outcome.UNAVAILABLE
            assert await asyncio.wait_for(old.stale, 1.0) == 2
            assert (await ended(submit(after, "orphan", 30, 3))).output_tokens == 3  # the id is free again
            await until(lambda: new.stats().requests_live == 0)
