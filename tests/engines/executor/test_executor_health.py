"""An executor that dies, hangs or leaks: each wait ends, what was lost is named, the engine goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from executor_rig import BLOCKS, Rig, answer_of, asked, over, rig, scripted, ticket
from hypothesis import given
from hypothesis import strategies as st

from engines.base import EngineError, PassError
from engines.executor.engine import ExecutorEngine
from engines.executor.health import Faults, LeakProbe, Progress, RestartBudget
from engines.executor.types import (
    Answer,
    BackendUnavailable,
    CacheGap,
    CacheStored,
    CancelMode,
    Ending,
    ExecutorRole,
    ExecutorSettings,
    Facts,
    Iteration,
    LinkLost,
    Report,
)
from engines.types import BlocksRemoved, Pass, PassItem, PassKind
from tests.executor_fakes.vices import Vices

FIRST = Answer("r", (1,))


def prefill_of(*items: tuple[str, int, int]) -> Pass:
    return Pass(1, PassKind.PREFILL, tuple(PassItem(*item) for item in items))


def serves(made: Rig, name: str = "after") -> None:
    made.engine.submit(asked(name, 20, 4, 7))
    made.prefill((name, 20, 0))
    made.decode_to_the_end(name)
    assert made.tokens(name) == answer_of(asked(name, 20, 4, 7))


# --- the executor is gone ---


def test_a_lost_executor_takes_all_with_it_and_comes_back() -> None:
    made = rig([Vices(hang=3), Vices()])
    made.engine.submit(asked("parts", 60, 2))
    made.engine.submit(asked("decodes", 9, 9, 1))
    made.engine.submit(asked("waits", 9, 2, 2))
    made.prefill(("parts", 32, 0), ("decodes", 9, 0))
    cached = {v for event in made.engine.kv_events() for v in event.block_hashes}
    assert cached
    made.run_ahead()
    made.engine.submit(asked("r", 20, 2, 3))
    with pytest.raises(PassError) as caught:
        made.prefill(("r", 20, 0))
    assert set(caught.value.request_ids) == {"parts", "decodes", "waits", "r"}
    assert made.incidents == {"no_progress": 1, "executor_lost": 1, "restarted": 1}
    removed = {v for e in made.engine.kv_events() if isinstance(e, BlocksRemoved) for v in e.block_hashes}
    assert removed == cached
    stats = made.engine.stats()
    assert (stats.requests_live, stats.kv_blocks_free) == (0, BLOCKS)
    assert made.link.starts == 2
    serves(made)


def test_silence_adds_up_over_passes_that_end_before_it_is_long_enough() -> None:
    """Else an executor that hangs would fail every pass and never be started again."""
    link, engine = scripted([], pass_timeout_s=8.0, progress_timeout_s=20.0)
    for name, at_s in (("a", 8.0), ("b", 16.0)):
        engine.submit(asked(name, 20, 4))
        with pytest.raises(PassError, match="took longer than"):
            engine.execute(prefill_of((name, 20, 0)))
        assert link.now_s == at_s
    link.now_s = 1000.0  # nobody waited meanwhile
    engine.submit(asked("c", 20, 4))
    with pytest.raises(PassError, match="no answer and no iteration"):
        engine.execute(prefill_of(("c", 20, 0)))
    assert (link.now_s, link.starts) == (1004.0, 2)
    engine.submit(asked("d", 20, 4))
    with pytest.raises(PassError, match="took longer than"):  # the new one has all its time
        engine.execute(prefill_of(("d", 20, 0)))


@pytest.mark.parametrize("timeouts", [{}, {"pass_timeout_s": 20.0, "progress_timeout_s": 30.0}])
def test_time_in_which_this_process_stood_still_is_nobodys_silence(timeouts: dict[str, float]) -> None:
    """Stopped for an hour in a wait: the executor has answered, or gets the rest of its time."""
    link, engine = scripted([[]], **timeouts)
    engine.submit(asked("r", 20, 1))
    script = [3_600.0, Answer("r", (1,), True, Ending.LENGTH)]

    def receive(timeout_s: float) -> list[Report]:
        if timeout_s == 0.0:
            return []
        first = script.pop(0)
        if isinstance(first, float):
            link.now_s += timeout_s + first
            return []
        link.now_s += timeout_s / 2
        return [replace(first, call_id=link.call_of("r"))]

    link.receive = receive  # type: ignore[method-assign]
    (item,) = engine.execute(prefill_of(("r", 20, 0))).items
    assert item.token == 1
    assert not engine.incidents


def test_a_hand_over_is_not_late_while_this_process_stood_still() -> None:
    link, engine = scripted([], ExecutorRole.GENERATION, handover_timeout_s=5.0)
    engine.adopt(asked("r", 20, 4), ticket())
    waits: list[float] = []

    def receive(timeout_s: float) -> list[Report]:
        if timeout_s:
            waits.append(timeout_s)
            link.now_s += timeout_s + (100.0 if len(waits) == 1 else 0.0)
        return []

    link.receive = receive  # type: ignore[method-assign]
    (item,) = engine.execute(Pass(1, PassKind.DECODE, (PassItem("r", 1, 20),))).items
    assert item.error is not None
    assert waits[0] == 5.0
    assert len(waits) > 1


BROKEN = "Encountered an error in forwardAsync function: CUDA error: an illegal memory access"


def fails(engine: ExecutorEngine, name: str) -> str:
    engine.submit(asked(name, 20, 4))
    (item,) = engine.execute(prefill_of((name, 20, 0))).items
    return item.error or ""


def test_an_executor_that_only_gives_errors_is_started_again() -> None:
    """After an error of its GPU it answers all there is with that error, and lives on."""
    names = "abcde"
    link, engine = scripted([[Answer(name, final=True, error=BROKEN)] for name in names])
    assert [fails(engine, name) for name in names[:-2]] == [BROKEN] * 3
    engine.submit(asked("d", 20, 4))
    with pytest.raises(PassError, match="illegal memory access") as caught:
        engine.execute(prefill_of(("d", 20, 0)))
    assert caught.value.request_ids == ("d",)
    assert link.history == ["start", "close", "start"]
    link.script.pop(0)
    assert fails(engine, "e") == BROKEN  # counted anew
    assert link.starts == 2


@pytest.mark.parametrize(
    ("passes", "broken"),
    [
        ("eee", True),
        ("e-e-e", True),  # what brings nothing says nothing
        ("eewee", False),
        ("ewe", False),
        ("rrrr", False),
        ("ffff", False),
        (("e", "we", "e", "e"), False),
        (("e", "re", "e"), True),
    ],
)
def test_errors_of_requests_and_errors_between_answers_are_no_reason_for_that(
    passes: Sequence[str], broken: bool
) -> None:
    said = {
        "e": Answer("a", final=True, error=BROKEN),
        "w": Answer("a", (1,)),
        "r": Answer("a", final=True, error="refused: prompt is too long"),
        "f": Answer("a", final=True, error="Encountered an error when fetching new request: beam width"),
    }
    faults, found = Faults(), None
    for each in passes:
        for letter in each.strip("-"):
            faults.heard(said[letter])
        found = faults.next_pass()
    assert (found is not None) is broken


@pytest.mark.parametrize("name", ["pass_timeout_s", "progress_timeout_s", "handover_timeout_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 1e10])
def test_a_deadline_that_is_none_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        ExecutorSettings(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("restarts_max", -1), ("leak_iterations", 0)])
def test_a_count_that_makes_no_sense_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        ExecutorSettings(**{name: value})


def test_an_executor_that_hangs_is_ended_before_it_is_started_again() -> None:
    link, engine = scripted([], progress_timeout_s=20.0)
    engine.submit(asked("r", 20, 4))
    with pytest.raises(PassError):
        engine.execute(prefill_of(("r", 20, 0)))
    assert link.history == ["start", "close", "start"]
    assert link.now_s == 20.0


def test_nothing_is_started_any_more_once_the_service_wants_to_end() -> None:
    """`interrupt` comes from another thread, here while the executor is started again."""
    link, engine = scripted([LinkLost("it died")], restarts_max=10)
    link.at_start = lambda: engine.interrupt("the service is stopping")
    link.start_fails = 10
    engine.submit(asked("r", 20, 4))
    with pytest.raises(EngineError, match="the service is stopping"):
        engine.execute(prefill_of(("r", 20, 0)))
    assert link.history == ["start", "start", "interrupt"]
    with pytest.raises(EngineError, match="the service is stopping"):
        engine.submit(asked("s", 20, 4))
    engine.close()


def test_an_executor_that_came_up_too_late_is_not_used() -> None:
    link, engine = scripted([LinkLost("it died")])
    link.at_start = lambda: engine.interrupt("the service is stopping")
    engine.submit(asked("r", 20, 4))
    with pytest.raises((PassError, EngineError)):
        engine.execute(prefill_of(("r", 20, 0)))
    with pytest.raises(EngineError, match="the service is stopping"):
        engine.execute(prefill_of(("r", 20, 0)))


def test_a_loss_noticed_in_a_cancel_is_raised_by_the_next_pass() -> None:
    link, engine = scripted([[FIRST]])
    for name in ("r", "s"):
        engine.submit(asked(name, 20, 4))
    engine.execute(prefill_of(("r", 20, 0)))
    link.refuses = True
    engine.cancel("r")
    link.refuses = False
    engine.submit(asked("t", 20, 4))
    assert engine.stats().requests_live == 2
    with pytest.raises(PassError) as caught:
        engine.execute(prefill_of(("s", 20, 0)))
    assert set(caught.value.request_ids) == {"s", "t"}
    assert link.starts == 2


def test_a_loss_is_raised_once_and_by_its_first_reason() -> None:
    link, engine = scripted([[FIRST, Answer("q", (1,))]])
    for family, name in enumerate("rqs"):
        engine.submit(asked(name, 20, 4, family))
    engine.execute(prefill_of(("r", 20, 0), ("q", 20, 0)))
    link.refuses = True
    engine.cancel("r")
    link.refuses = False
    engine.cancel("q")
    assert link.cancelled == []  # what is lost is not spoken to
    with pytest.raises(PassError, match="it is gone"):
        engine.execute(prefill_of(("s", 20, 0)))
    link.script.append([Answer("u", (1,), True, Ending.LENGTH)])
    engine.submit(asked("u", 20, 1))
    (item,) = engine.execute(prefill_of(("u", 20, 0))).items
    assert item.error is None
    assert link.starts == 2


def test_a_leak_is_not_made_smaller_by_an_excess_of_before() -> None:
    probe = LeakProbe(3)
    probe.saw(1, 0)
    probe.saw(0, 0)
    assert [probe.saw(5, 0) for _ in range(3)] == [False, False, True]
    assert probe.leaked_blocks == 5


def test_a_loss_noticed_in_a_hand_over_is_raised_by_the_next_pass() -> None:
    link, engine = scripted([], ExecutorRole.GENERATION)
    link.refuses = True
    engine.adopt(asked("r", 20, 4), ticket())
    with pytest.raises(PassError) as caught:
        engine.execute(Pass(1, PassKind.DECODE, (PassItem("r", 1, 20),)))
    assert caught.value.request_ids == ("r",)


def test_those_that_failed_alone_in_a_lost_pass_are_named_too() -> None:
    made = rig(Vices(hang=1))
    made.engine.submit(asked("big", 20, 150))
    made.prefill(("big", 20, 0))
    made.engine.submit(asked("victim", 20, 9, 1))
    made.engine.submit(asked("small", 9, 2, 2))
    with pytest.raises(PassError) as caught:
        made.prefill(("victim", 20, 0), ("small", 9, 0))
    assert set(caught.value.request_ids) == {"big", "victim", "small"}


def test_tickets_are_lost_with_the_executor() -> None:
    _, engine = scripted(
        [[Answer("r", (1,), True, Ending.NOT_FINISHED, ticket=ticket())], LinkLost("gone")],
        ExecutorRole.CONTEXT,
    )
    for name in ("r", "s"):
        engine.submit(asked(name, 20, 4))
    engine.execute(prefill_of(("r", 20, 0)))
    with pytest.raises(PassError) as caught:
        engine.execute(prefill_of(("s", 20, 0)))
    assert set(caught.value.request_ids) == {"r", "s"}
    with pytest.raises(KeyError):
        engine.take_ticket("r")
    assert engine.stats().kv_blocks_free == BLOCKS


def test_an_executor_that_does_not_come_up_is_tried_again_within_bounds() -> None:
    link, engine = scripted([LinkLost("gone")], restarts_max=3)
    link.start_fails = 2
    engine.submit(asked("r", 20))
    with pytest.raises(PassError):
        engine.execute(prefill_of(("r", 20, 0)))
    assert dict(engine.stats().incidents) == {"executor_lost": 3, "restarted": 1}
    link.script = [LinkLost("gone again")]
    engine.submit(asked("r", 20))
    with pytest.raises(EngineError, match="too often"):
        engine.execute(prefill_of(("r", 20, 0)))
    with pytest.raises(EngineError):
        engine.submit(asked("s", 20))
    assert link.starts == 4
    assert engine.stats().requests_live == 0


def test_a_backend_that_can_never_run_again_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    link, engine = scripted([LinkLost("gone")])

    def start() -> Any:
        raise BackendUnavailable("the library is gone", "install it")

    monkeypatch.setattr(link, "start", start)
    engine.submit(asked("r", 20))
    with pytest.raises(EngineError, match="install it"):
        engine.execute(prefill_of(("r", 20, 0)))


@given(st.lists(st.floats(0.0, 30.0), max_size=30), st.integers(0, 4), st.floats(1.0, 60.0))
def test_restarts_are_bounded_in_every_window(gaps: list[float], most: int, window_s: float) -> None:
    budget, now_s, allowed = (
        RestartBudget(ExecutorSettings(restarts_max=most, restart_window_s=window_s)),
        0.0,
        [],
    )
    for gap in gaps:
        now_s += gap
        if budget.take(now_s):
            allowed.append(now_s)
            assert len([t for t in allowed if now_s - t < window_s]) <= most
        else:
            assert len([t for t in allowed if now_s - t < window_s]) == most


# --- it is slow, or does nothing ---


def test_a_pass_that_takes_too_long_fails_and_its_calls_are_cancelled() -> None:
    busy = Iteration(1, 1, 8, 0)
    link, engine = scripted([[FIRST], *[[busy]] * 50], pass_timeout_s=60.0, progress_timeout_s=20.0)
    link_receive = link.receive

    def receive(timeout_s: float) -> Any:
        link.now_s += 2.0 * (timeout_s > 0.0)
        return link_receive(timeout_s)

    link.receive = receive  # type: ignore[method-assign]
    for name, family in (("r", 0), ("s", 1)):
        engine.submit(asked(name, 20, 9, family))
    engine.execute(prefill_of(("r", 20, 0)))
    with pytest.raises(PassError) as caught:
        engine.execute(prefill_of(("s", 20, 0)))
    assert caught.value.request_ids == ("s",)
    assert link.cancelled == ["s/2"]
    assert dict(engine.stats().incidents) == {"pass_timed_out": 1, "split": 1}
    link.script = [[Answer("r", (2,))]]
    assert engine.execute(Pass(2, PassKind.DECODE, (PassItem("r", 1, 20),))).items[0].token == 2


def test_what_a_pass_that_timed_out_had_done_already_stays() -> None:
    """A part that ended keeps its blocks; a decoding request with its token keeps that."""
    done = Answer("part", (1,), True, Ending.LENGTH)
    _, engine = scripted([[FIRST, Answer("d", (1,))], [done, Answer("r", (2,))]], pass_timeout_s=9.0)
    for name, tokens in (("r", 20), ("d", 20), ("part", 60), ("late", 20)):
        engine.submit(asked(name, tokens, 4, len(name)))
    engine.execute(prefill_of(("r", 20, 0), ("d", 20, 0)))
    with pytest.raises(PassError) as caught:
        engine.execute(prefill_of(("part", 32, 0), ("late", 20, 0)))
    assert caught.value.request_ids == ("late",)
    with pytest.raises(PassError) as caught:
        engine.execute(Pass(1, PassKind.DECODE, (PassItem("r", 1, 20), PassItem("d", 1, 20))))
    assert caught.value.request_ids == ("d",)
    assert engine.execute(Pass(1, PassKind.DECODE, (PassItem("r", 1, 20),))).items[0].token == 2
    assert engine.stats().requests_live == 2


def test_empty_iterations_are_no_progress() -> None:
    progress = Progress(0.0)
    progress.heard(Iteration(1, 0, 0, 0), 5.0)
    progress.heard(CacheStored(None, ()), 6.0)
    assert progress.since == 0.0
    progress.heard(Iteration(2, 0, 0, 1), 7.0)
    assert progress.since == 7.0
    progress.heard(FIRST, 8.0)
    assert progress.since == 8.0


def test_an_executor_that_is_idle_between_passes_does_not_hang() -> None:
    made = rig(progress_timeout_s=20.0)
    for index in range(3):
        made.link.now_s += 1000.0
        serves(made, f"r{index}")
    assert made.incidents == {}


# --- it leaks ---


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=60),
    st.integers(1, 5),
)
def test_a_leak_is_what_was_in_excess_all_through_a_row(reports: list[tuple[int, int]], row: int) -> None:
    probe, since = LeakProbe(row), 0
    for index, (used, explained) in enumerate(reports):
        before = min(probe.leaked_blocks, used)
        found = probe.saw(used, explained)
        assert 0 <= probe.leaked_blocks <= max(used, before)
        if found:
            last = reports[index + 1 - row : index + 1]
            assert index + 1 - row >= since
            assert all(u > e for u, e in last)
            assert probe.leaked_blocks - before <= min(u - e for u, e in last)
            since = index + 1
        else:
            assert probe.leaked_blocks == before


def test_a_leak_is_told_once_and_counts_as_taken() -> None:
    made = rig(Vices(leak_on_cancel=True), leak_iterations=5)
    made.engine.submit(asked("r", 40, 20))
    made.prefill(("r", 40, 0))
    made.engine.cancel("r")
    made.engine.submit(asked("long", 9, 30, 1))
    made.prefill(("long", 9, 0))
    made.decode_to_the_end("long")
    assert made.incidents["pool_leaked"] == 1
    made.engine.submit(asked("big", 40, 120, 2))  # 20 blocks of 24, 5 of them leaked
    assert "5 have leaked" in (made.prefill(("big", 40, 0)).items[0].error or "")
    serves(made)
    assert made.incidents["pool_leaked"] == 1
    assert made.link.starts == 1


def test_with_half_the_pool_leaked_it_starts_anew_when_nobody_loses_by_it() -> None:
    made = rig([Vices(leak_on_cancel=True), Vices()], leak_iterations=3)
    for index in range(2):
        made.engine.submit(asked(f"r{index}", 62, 20, index))
        made.prefill((f"r{index}", 62, 0))
        made.engine.cancel(f"r{index}")
    made.engine.submit(asked("live", 9, 30, 3))
    made.prefill(("live", 9, 0))
    made.engine.submit(asked("waits", 9, 2, 4))
    for _ in range(8):
        made.decode(("live", made.got["live"][-1].position))
    assert made.engine._leak.leaked_blocks > BLOCKS / 2
    assert made.link.starts == 1
    made.decode_to_the_end("live")
    made.run_ahead()
    start = made.link.start

    def slow_start() -> Facts:
        made.link.now_s += 1000.0
        return start()

    made.link.start = slow_start  # type: ignore[method-assign]
    result = made.prefill(("waits", 9, 0))
    assert result.elapsed_s < 1.0
    assert (made.link.starts, result.items[0].error) == (2, None)
    made.decode_to_the_end("waits")
    assert made.tokens("waits") == answer_of(asked("", 9, 2, 4))
    made.engine.submit(asked("big", 20, 160))
    assert made.prefill(("big", 20, 0)).items[0].error is None


def test_calls_that_nobody_hears_are_no_leak() -> None:
    made = rig(cancel=CancelMode.UNHEARD, leak_iterations=2)
    made.engine.submit(asked("left", 40, 60))
    made.prefill(("left", 40, 0))
    made.engine.cancel("left")
    made.run_ahead(20)
    serves(made)
    assert set(made.incidents) == {"unheard"}


# --- it says what can't be understood ---


def test_lost_events_empty_what_is_known_and_answers_heal_it() -> None:
    made = rig()
    made.engine.submit(asked("r", 40))
    made.prefill(("r", 40, 0))
    made.engine._take([CacheGap(2)])
    assert made.engine.stats().kv_blocks_cached == 0
    made.engine.submit(asked("s", 40))
    item = made.prefill(("s", 40, 0)).items[0]
    assert (item.reused, item.computed) == (32, 8)
    assert made.engine.stats().kv_blocks_cached == 5
    assert made.incidents == {"events_lost": 1}


def test_blocks_after_an_unknown_one_are_a_bad_report_except_after_a_gap() -> None:
    _, engine = scripted()
    stray = CacheStored(99, ((100, tuple(range(8))),))
    engine._take([stray])
    assert dict(engine.stats().incidents) == {"bad_report": 1}
    engine._take([CacheGap(1), stray])
    assert dict(engine.stats().incidents) == {"bad_report": 1, "events_lost": 1}


def test_each_incident_is_logged_with_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    made = rig(Vices(hang=1), restarts_max=1)
    made.engine.submit(asked("alpha", 20, 4))
    made.prefill(("alpha", 20, 0))
    with caplog.at_level(logging.WARNING), pytest.raises(PassError):
        made.decode(("alpha", 20))
    text = caplog.text
    assert all(name in text for name in ("no_progress", "executor_lost", "restarted", "alpha"))


def test_an_engine_started_twice_is_as_good_as_new() -> None:
    made = rig()
    again = over(made.link, made.link.clock)
    again.submit(asked("r", 20, 1))
    assert again.execute(prefill_of(("r", 20, 0))).items[0].finish
