"""A worker changes its engine with its role: under load, called off, cut off, failed, and in every order with
other things that happen to it. Over real gRPC, with membership in memory."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from role_rig import LP, SP, TOKENS_MAX, RoleFleet, role_fleet
from test_processes import books, read, submit, until

from engines.simulated_settings import Behaviour, Fault
from service.core.reconcile import MoveReason, RoleMove
from service.core.types import Outcome, Reason, Role
from service.fleet.membership import DRAINING
from service.fleet.role_facts import (
    ENGINES,
    FAILURES,
    MOVE,
    NEXT,
    MoveEnd,
    MovePhase,
    engines_of,
    move_of,
    moves_of,
)
from service.fleet.role_move import MoveSettings

DONE = ["draining", "unloading", "loading", "verifying", "done"]
FE = "fe0"


def held(made: RoleFleet, name: str) -> tuple[str, ...]:
    return made.workers[name].servicer.engine.held


def core(made: RoleFleet, name: str):  # type: ignore[no-untyped-def]
    return made.active.gate.reign.scheduler.instances[name]


async def test_a_move_under_load_loses_nothing_and_serves_with_the_other_engine() -> None:
    """Progress in order, every request answered once and whole, and the new capabilities are planned with."""
    async with role_fleet(workers=3) as made:
        front_end, shelf = made.front_ends[FE], made.shelves["w1"]
        sizes = [(60, 30), (900, 6), (3000, 4)]
        reading = []

        async def load(round_: str) -> None:
            for n in range(12):
                tokens, answer = sizes[n % 3]
                reading.append(asyncio.create_task(read(submit(front_end, f"{round_}{n}", tokens, answer))))
                await asyncio.sleep(0.01)

        await load("a")
        await until(lambda: bool(held(made, "w1")))
        given = await made.order("w1", Role.LP)
        await load("b")
        await made.until_end("w1", MoveEnd.DONE)
        await made.until_used("w1", LP)
        await load("c")
        ended = await asyncio.gather(*reading)
        assert Counter(record.outcome for _, record in ended) == {Outcome.COMPLETED: 36}
        assert all(len(tokens) == record.request.max_new_tokens for tokens, record in ended)
        books(made)
        assert made.at("w1") == DONE
        assert shelf.loads == [SP, LP]
        assert shelf.closed == [SP]
        instance = core(made, "w1")
        assert (instance.role, instance.spec.role) == (Role.LP, Role.LP)
        member = made.workers["w1"]._membership.snapshot().members["w1"]
        assert (member.report.role, member.report.number) == (Role.LP, given.number)
        await until(lambda: MOVE not in made.facts("w1"))
        told = engines_of(made.facts("w1"))
        assert told is not None
        assert (told.loaded, told.loads(Role.SP), told.loads(Role.LP)) == (LP, True, False)
        assert told.move_s >= 0.05  # what loading took
        (move,) = moves_of(made.facts("w1"))
        assert (move.at, move.number, move.cut_off) == (MoveEnd.DONE, given.number, 0)
        assert set(move.seconds) == set(MovePhase) - {MovePhase.RESTORING}


async def test_what_the_old_engine_had_cached_is_forgotten_everywhere() -> None:
    async with role_fleet(workers=1) as made:
        front_end = made.front_ends[FE]
        first, _ = await read(submit(front_end, "same", 900, 4))
        await until(lambda: len(core(made, "w0").prefix) > 0)
        await made.order("w0", Role.LP)
        await made.until_used("w0", LP)
        assert len(core(made, "w0").prefix) == 0
        assert made.workers["w0"].servicer.engine.cached() is None
        again, record = await read(submit(front_end, "same", 900, 4))
        assert record.outcome is Outcome.COMPLETED
        assert again == first  # the same model
        await until(lambda: len(core(made, "w0").prefix) > 0)


async def test_a_role_that_the_loaded_engine_serves_is_a_label() -> None:
    async with role_fleet(workers=1) as made:
        await made.order("w0", Role.SP)
        await until(lambda: made.reported("w0") is Role.SP)
        await until(lambda: core(made, "w0").role is Role.SP)
        assert (made.at("w0"), made.shelves["w0"].loads) == ([], [SP])


async def test_a_move_is_called_off_while_it_drains() -> None:
    """Back at once: no reload, nothing lost, new work again."""
    async with role_fleet(workers=1) as made:
        front_end = made.front_ends[FE]
        long = asyncio.create_task(read(submit(front_end, "long", 60, 60)))
        await until(lambda: bool(held(made, "w0")))
        await made.order("w0", Role.LP)
        await until(lambda: core(made, "w0").state == "draining")
        waiting = asyncio.create_task(read(submit(front_end, "new", 60, 3)))
        await asyncio.sleep(0.1)
        assert held(made, "w0") == held(made, "w0")[:1]  # the new one stays outside
        await made.order("w0", Role.MIXED)
        await made.until_end("w0", MoveEnd.CALLED_OFF)
        assert (await waiting)[1].outcome is Outcome.COMPLETED
        assert core(made, "w0").state == "up"
        assert not long.done() or long.result()[1].outcome is Outcome.COMPLETED
        tokens, record = await long
        assert (record.outcome, len(tokens)) == (Outcome.COMPLETED, 60)
        assert made.shelves["w0"].loads == [SP]
        assert made.at("w0") == ["draining", "called_off"]
        books(made)


async def test_what_the_bound_of_a_drain_cuts_off_goes_on_elsewhere() -> None:
    """What has shown no token runs again; an answer that has begun goes on with its next token."""
    async with role_fleet(workers=2, times=MoveSettings(0.3, 20.0)) as made:
        front_end = made.front_ends[FE]
        handles = [submit(front_end, f"r{n}", 60, 250) for n in range(6)]
        handles += [submit(front_end, f"big{n}", 40_000, 2) for n in range(4)]
        reading = [asyncio.create_task(read(handle)) for handle in handles]
        await until(lambda: any("big" in name for name in held(made, "w0")) and len(held(made, "w0")) > 1)
        await made.order("w0", Role.LP)
        move = await made.until_end("w0", MoveEnd.DONE)
        assert move.cut_off > 0
        ended = await asyncio.gather(*reading)
        books(made)
        assert Counter(record.outcome for _, record in ended) == {Outcome.COMPLETED: 10}
        for handle, (tokens, record) in zip(handles, ended, strict=True):
            assert len(tokens) == record.request.max_new_tokens == record.output_tokens
            if handle.went_on:  # its prompt is counted once, and not the answer that was computed anew
                assert record.new_tokens + record.history_tokens == record.request.prompt_tokens
            assert (record.reason, record.detail) == (None, "")
            assert len(set(record.pass_ids)) == len(record.pass_ids)
        went_on = sum(handle.went_on for handle in handles)
        assert went_on > 0
        core_ended = made.active.gate.reign.scheduler.outcomes
        assert core_ended == {Outcome.COMPLETED: 10, Outcome.UNAVAILABLE: went_on}
        await until(lambda: not held(made, "w0") and not held(made, "w1"))


async def test_an_answer_that_can_go_nowhere_ends_with_what_it_has() -> None:
    """The only worker loads: nobody takes the rest."""
    async with role_fleet(workers=1, times=MoveSettings(0.2, 20.0)) as made:
        handle = submit(made.front_ends[FE], "long", 60, 2000)
        reading = asyncio.create_task(read(handle))
        await until(lambda: handle.record.output_tokens > 2)
        made.shelves["w0"].gate.clear()
        await made.order("w0", Role.LP)
        tokens, record = await reading
        assert (record.outcome, record.reason) == (Outcome.UNAVAILABLE, Reason.NO_INSTANCE)
        assert 2 < len(tokens) == record.output_tokens < 2000
        books(made)


async def test_an_answer_that_went_on_can_be_cancelled() -> None:
    async with role_fleet(workers=2, times=MoveSettings(0.2, 20.0)) as made:
        handle = submit(made.front_ends[FE], "long", 60, 4000)
        reading = asyncio.create_task(read(handle))
        await until(lambda: handle.record.output_tokens > 2)
        await made.order("w0" if held(made, "w0") else "w1", Role.LP)
        await until(lambda: handle.went_on == 1)
        assert handle.timer is None  # nothing ends it but what becomes of its rest
        before = handle.record.output_tokens
        await until(lambda: handle.record.output_tokens > before + 2)
        handle.cancel()
        tokens, record = await reading
        assert (record.outcome, len(tokens)) == (Outcome.CANCELLED, record.output_tokens)
        await until(lambda: not held(made, "w0") and not held(made, "w1"))
        books(made)


def broken(made: RoleFleet, how: str) -> str:
    """Break the LP engine of w0; what the reason must say."""
    shelf = made.shelves["w0"]
    if how == "load":
        shelf.fails.add(LP)
        return "no device memory"
    if how == "odd":
        shelf.odd.add(LP)
        return "block_tokens is 16"
    shelf.behaviours[LP] = Behaviour(faults={1: Fault()})
    return "as planned"


@pytest.mark.parametrize("how", ["load", "odd", "warm"])
async def test_an_engine_that_does_not_do_is_told_and_the_old_one_serves(how: str) -> None:
    async with role_fleet(workers=2) as made:
        front_end, why = made.front_ends[FE], broken(made, how)
        reading = [asyncio.create_task(read(submit(front_end, f"r{n}", 300, 20))) for n in range(8)]
        given = await made.order("w0", Role.LP)
        move = await made.until_end("w0", MoveEnd.FAILED)
        assert why in move.error
        assert made.at("w0")[-2:] == ["restoring", "failed"]
        await made.until_used("w0", SP)
        await until(lambda: made.facts("w0").get(FAILURES) == 1 and MOVE not in made.facts("w0"))
        member = made.workers["w0"]._membership.snapshot().members["w0"]
        assert (member.report.role, member.report.number) == (Role.MIXED, given.number)
        loads = made.shelves["w0"].loads
        assert loads == [SP, LP, SP]
        assert made.shelves["w0"].closed == ([SP] if how == "load" else [SP, LP])
        await asyncio.sleep(0.3)
        assert loads == [SP, LP, SP]  # nobody has wanted it anew
        ended = await asyncio.gather(*reading, read(submit(front_end, "after")))
        assert {record.outcome for _, record in ended} == {Outcome.COMPLETED}
        books(made)


async def test_the_controller_takes_a_failed_move_back_and_rests() -> None:
    async with role_fleet(workers=2, controller=True) as made:
        made.shelves["w0"].fails.add(LP)
        made.wants.moves = (RoleMove("w0", Role.LP, MoveReason.PRESSURE, 0.1, 0.9),)
        await made.until_end("w0", MoveEnd.FAILED)
        membership = made.workers["w0"]._membership
        await until(lambda: membership.snapshot().assignments["w0"].reason is MoveReason.FAILED)
        assert membership.snapshot().assignments["w0"].role is Role.MIXED
        await asyncio.sleep(0.5)  # ten periods, in each of which it is wanted again
        assert made.shelves["w0"].loads == [SP, LP, SP]
        assert len(membership.snapshot().moves) == 2
        made.wants.moves = (RoleMove("w1", Role.LP, MoveReason.PRESSURE, 0.1, 0.9),)
        await made.until_end("w1", MoveEnd.DONE)  # another one is not kept from it


async def test_without_any_engine_the_process_ends() -> None:
    async with role_fleet(workers=1) as made:
        made.shelves["w0"].fails |= {LP, SP}
        await made.order("w0", Role.LP)
        why = await asyncio.wait_for(made.workers["w0"].failed, 20)
        assert why.count("no device memory") == 2
        assert made.at("w0")[-1] == "failed"


async def test_an_engine_that_can_not_be_closed_ends_the_process() -> None:
    """It must not stay in the fleet, take its old role again and refuse everything."""
    async with role_fleet(workers=1) as made:
        made.shelves["w0"].stuck.add(SP)
        await made.order("w0", Role.LP)
        assert "device error" in await asyncio.wait_for(made.workers["w0"].failed, 20)
        assert made.at("w0")[-1] == "failed"
        assert made.shelves["w0"].loads == [SP]
        made.shelves["w0"].stuck.clear()


async def test_loading_that_takes_too_long_ends_the_process() -> None:
    async with role_fleet(workers=1, times=MoveSettings(5.0, 0.3)) as made:
        made.shelves["w0"].gate.clear()
        await made.order("w0", Role.LP)
        assert "took more than" in await asyncio.wait_for(made.workers["w0"].failed, 20)
        made.shelves["w0"].gate.set()
        await until(lambda: made.shelves["w0"].closed == [SP, LP])  # it came after all, and is closed


@pytest.mark.parametrize("phase", [MovePhase.DRAINING, MovePhase.LOADING])
async def test_the_next_scheduler_finds_a_worker_in_its_move(phase: MovePhase) -> None:
    async with role_fleet(workers=2) as made:
        front_end, shelf = made.front_ends[FE], made.shelves["w0"]
        reading = [asyncio.create_task(read(submit(front_end, f"r{n}", 60, 80))) for n in range(4)]
        await until(lambda: bool(held(made, "w0")))
        shelf.gate.clear()
        await made.order("w0", Role.LP)
        await made.until_phase("w0", phase)
        await made.scheduler("sched1")
        old = made.schedulers.pop("sched0")
        await old.close()
        await until(lambda: "w1" in made.used())
        await made.until_phase("w0", MovePhase.LOADING)
        await until(lambda: "w0" not in made.used())
        shelf.gate.set()
        await made.until_used("w0", LP)
        await asyncio.gather(*reading)
        assert (await read(submit(front_end, "after")))[1].outcome is Outcome.COMPLETED
        books(made)
        assert made.at("w0") == DONE


async def test_a_role_that_is_wanted_back_while_it_loads_is_taken_next() -> None:
    async with role_fleet(workers=1) as made:
        shelf = made.shelves["w0"]
        shelf.gate.clear()
        await made.order("w0", Role.LP)
        await made.until_phase("w0", MovePhase.LOADING)
        await made.order("w0", Role.SP)
        shelf.gate.set()
        await made.until_end("w0", MoveEnd.DONE, 2)
        await until(lambda: made.reported("w0") is Role.SP)
        assert shelf.loads == [SP, LP, SP]
        await made.until_used("w0", SP)


async def test_heartbeats_and_leases_go_on_while_it_loads() -> None:
    async with role_fleet(workers=1) as made:
        shelf = made.shelves["w0"]
        shelf.gate.clear()
        await made.order("w0", Role.LP)
        await made.until_phase("w0", MovePhase.LOADING)
        await until(lambda: getattr(move_of(made.facts("w0")), "at", None) is MovePhase.LOADING)
        move = move_of(made.facts("w0"))
        assert (move.at, move.from_role, move.to_role) == (MovePhase.LOADING, Role.MIXED, Role.LP)
        assert made.workers["w0"].servicer.engine.works
        assert made.workers["w0"]._lease.state == "live"
        shelf.gate.set()
        await made.until_used("w0", LP)


async def test_a_drain_of_the_worker_ends_its_move() -> None:
    async with role_fleet(workers=2) as made:
        reading = asyncio.create_task(read(submit(made.front_ends[FE], "long", 60, 60)))
        await until(lambda: bool(held(made, "w0") or held(made, "w1")))
        name = "w0" if held(made, "w0") else "w1"
        await made.order(name, Role.LP)
        await made.until_phase(name, MovePhase.DRAINING)
        draining = asyncio.create_task(made.workers[name].drain(20.0))
        await made.until_end(name, MoveEnd.CALLED_OFF)
        assert await draining == 0
        assert (await reading)[1].outcome is Outcome.COMPLETED
        assert core(made, name).state == "draining"
        assert made.at(name) == ["draining", "called_off"]
        assert made.shelves[name].loads == [SP]
        await until(lambda: DRAINING in made.facts(name))
        assert ENGINES in made.facts(name)  # one fact does not take another away


def test_every_phase_leads_to_an_end() -> None:
    """The table of transitions has no dead end and no way round."""
    for phase in MovePhase:
        assert NEXT[phase] & set(MoveEnd)
    order = list(MovePhase)
    assert all(order.index(after) > order.index(p) for p in NEXT for after in NEXT[p] & set(MovePhase))
    assert TOKENS_MAX[SP] < TOKENS_MAX[LP]
