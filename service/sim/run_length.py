"""How long the runs of a case are, and which requests they measure: the same for every policy.

The load of a case and seed is looked at once without a scheduler: how many requests of each lane, their
targets, their least work. From that follows a length at which the metric can be had. At the highest rate that
is looked at (`HEADROOM` times capacity) the window is as long as the metric asks for, and each lane that can
be scored within `limits.requests_max` has the requests it needs.

Where time scales with the rate, the window is a range of requests: the same ones are measured at every rate,
in a window that is longer at lower rates. Otherwise it is a length of time. A closed loop has no rate, and
the later turns of sessions depend on answers: there the load is that of a service in which everybody is
alone, and only its averages are used.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, pairwise

import numpy as np

from service.core.types import Lane
from service.sim.bounds import Floats, Jobs, least_total_work_s, long_run_capacity_per_s
from service.sim.case import Case
from service.sim.contents import cached_blocks
from service.sim.metric import MetricSettings, Window
from service.sim.sources import Targets, make_source
from service.sim.workload import Arrival, Source

HEADROOM = 1.1  # rates up to this times the long-run capacity are run; none beyond can be sustained
LEVEL = 0.95  # of the capacity meant here, the lowest level that is searched for
SAMPLE_MAX = 20_000  # requests looked at for averages
RAMP_SHARE = 0.95  # of the requests of sessions, those that come this soon after the first of theirs
LANE_SEEN_MIN = 20  # requests of a lane in the sample; a lane with fewer is not planned for


@dataclass(frozen=True, slots=True)
class Expected:
    """Requests in order of arrival, as far as they are known before a run.

    since_s: from the first request of the same session; 0 without sessions.
    """

    ids: tuple[str, ...]
    jobs: Jobs
    since_s: Floats

    def take(self, part: slice) -> Expected:
        return Expected(self.ids[part], self.jobs.take(part), self.since_s[part])


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run at `rate_per_s` (None: closed loop). Arrivals go on until `until_s`, where it ends at last.

    arrivals: requests of each lane in the window; where they are not known, more than there will be.
    scored: the lanes that will have enough, as far as is known.
    """

    rate_per_s: float | None
    window: Window
    until_s: float
    arrivals: Mapping[Lane, int]
    scored: tuple[Lane, ...]
    expected: Expected | None


class Load:
    """What arrives in a case with one seed; see the module text.

    Raises ValueError where `limits.requests_max` does not allow a window that the metric accepts.
    """

    def __init__(self, case: Case, metric: MetricSettings, seed: int) -> None:
        self.case, self.metric, self.seed = case, metric, seed
        self.real_ratio = 1.0  # requests that arrive, over those asked for; of the last that was looked at
        self._targets = case.targets()
        self._setting = case.setting()
        self._look_at(self._draw(1.0, min(SAMPLE_MAX, case.limits.requests_max)), 1.0)
        if case.has_set_times and case.open:  # now that a rate is known: the mix over the window itself
            self._look_at(self._in_window(self.capacity_per_s, self._set_window()), self.capacity_per_s)
        self._last: tuple[float, Expected] | None = None
        self.scored: tuple[Lane, ...] = ()
        self._first = self._count = 0
        self._choose_lanes()
        if case.scales:
            self._choose_range()

    def _look_at(self, drawn: Expected, rate_per_s: float) -> None:
        """Averages of what arrives at a rate."""
        jobs = drawn.jobs
        shares = {lane: float(jobs.of(lane).mean()) for lane in Lane if jobs.of(lane).sum() >= LANE_SEEN_MIN}
        if not shares:
            raise ValueError(f"case {self.case.name}: {len(jobs)} requests are too few to plan runs from")
        self._drawn = drawn
        self._shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
        self._target_s = {lane: float(jobs.target_s[jobs.of(lane)].mean()) for lane in shares}
        self.capacity_per_s = self._capacity_of(jobs, rate_per_s)
        self._ramp_s = float(np.quantile(drawn.since_s, RAMP_SHARE))

    @property
    def rate_max_per_s(self) -> float:
        return HEADROOM * self.capacity_per_s

    def _capacity_of(self, jobs: Jobs, rate_per_s: float) -> float:
        """In the long run, as a rate that is asked for: these arrived when `rate_per_s` was, more or less."""
        if not self.case.closed:
            self.real_ratio = (len(jobs) - 1) / (rate_per_s * max(1e-9, float(np.ptp(jobs.arrival_s))))
        work_s = least_total_work_s(jobs, self._setting, fastest_factor(self.case))
        capacity = long_run_capacity_per_s(jobs, work_s, self.engines_mean(), LEVEL, self._shares)
        return capacity / self.real_ratio

    @property
    def rate_min_per_s(self) -> float:
        """Below it a window of set length holds too few requests; 0 where the window follows the rate."""
        window_s = self.case.limits.window_s
        if window_s is None or self.case.closed:
            return 0.0
        wanted = 1.1 * self.metric.lane_requests_min / self.real_ratio
        return max(wanted / self._shares[lane] for lane in self.scored) / window_s

    # --- one run ---

    def source(self, plan: RunPlan) -> Source:
        """A fresh one."""
        return make_source(
            self.case.workload,
            rate_per_s=plan.rate_per_s,
            seed=self.seed,
            targets=self._targets,
            seconds=plan.until_s,
        )

    def plan(self, rate_per_s: float | None) -> RunPlan:
        """The run at a rate; None in a closed loop."""
        if self.case.scales and rate_per_s is not None:
            return self._plan_of_range(rate_per_s)
        window_s = self._window_s(rate_per_s)
        start_s = self._start_s(window_s)
        window = Window(start_s, start_s + window_s)
        return self._planned(rate_per_s, window, self._expected(rate_per_s, window))

    def jobs(self, rate_per_s: float) -> Jobs:
        """The measured requests at a rate; those of a service without delay where arrivals depend on it."""
        expected = self.plan(rate_per_s).expected
        return self._drawn.jobs if expected is None else expected.jobs

    def _plan_of_range(self, rate_per_s: float) -> RunPlan:
        first, end = self._first, self._first + self._count
        times_s = self._drawn.jobs.arrival_s / rate_per_s
        start_s = (times_s[first - 1] + times_s[first]) / 2.0 if first else 0.0
        window = Window(float(start_s), float((times_s[end - 1] + times_s[end]) / 2.0))
        measured = self._drawn.take(slice(first, end))
        jobs = replace(measured.jobs, arrival_s=times_s[first:end])
        return self._planned(rate_per_s, window, replace(measured, jobs=jobs))

    def _planned(self, rate_per_s: float | None, window: Window, expected: Expected | None) -> RunPlan:
        cooldown_s = self.metric.cooldown_targets * max(self._target_s.values())
        if expected is None:
            most = 1.25 * (rate_per_s or 0.0) * window.seconds + 20.0
            arrivals = {lane: math.ceil(share * most) for lane, share in self._shares.items()}
            return RunPlan(rate_per_s, window, window.end_s + cooldown_s, arrivals, self.scored, None)
        jobs = expected.jobs
        cooldown_s = max(cooldown_s, float(jobs.target_s.max(initial=0.0)))
        arrivals = {lane: int(jobs.of(lane).sum()) for lane in Lane if jobs.of(lane).any()}
        scored = tuple(lane for lane, n in arrivals.items() if n >= self.metric.lane_requests_min)
        return RunPlan(rate_per_s, window, window.end_s + cooldown_s, arrivals, scored, expected)

    def _expected(self, rate_per_s: float | None, window: Window) -> Expected | None:
        """Drawn at the rate itself, because time does not scale with it."""
        if rate_per_s is None or not self.case.open:
            return None
        if self._last is None or self._last[0] != rate_per_s:
            self._last = (rate_per_s, self._in_window(rate_per_s, window))
        return self._last[1]

    def _in_window(self, rate_per_s: float, window: Window) -> Expected:
        drawn = self._draw(rate_per_s, None, window.end_s)
        first, end = np.searchsorted(drawn.jobs.arrival_s, [window.start_s, window.end_s]).tolist()
        return drawn.take(slice(first, end))

    def _set_window(self) -> Window:
        """Where the case says how long it is."""
        window_s = self.case.limits.window_s or self.metric.window_s_min
        start_s = self._start_s(window_s)
        return Window(start_s, start_s + window_s)

    # --- its length ---

    def _choose_lanes(self) -> None:
        """Those for which a run can hold enough requests; and whether it can then be long enough."""
        name, limits = f"case {self.case.name}", self.case.limits
        if self.case.closed:
            self.scored = tuple(self._shares)
            return
        needed = {lane: 1.1 * self.metric.lane_requests_min / share for lane, share in self._shares.items()}
        room = limits.requests_max / (1.0 + self.metric.warmup_ratio) - 2.0
        if limits.window_s is not None:  # half of it, so that there are rates to search
            room = min(room, 0.5 * limits.window_s * self.rate_max_per_s * self.real_ratio)
        self.scored = tuple(lane for lane, requests in needed.items() if requests <= room)
        if self.case.rates_per_s:  # nothing is searched; what can't be scored is shown all the same
            self.scored = self.scored or tuple(self._shares)
            return
        if not self.scored and limits.window_s is not None:
            raise ValueError(
                f"{name}: limits.window_s is {limits.window_s:g}, too short for lane_requests_min "
                f"({self.metric.lane_requests_min}) at {self.capacity_per_s:.4g} requests/s"
            )
        if not self.scored:
            raise ValueError(self._too_few(min(needed.values()), "lane_requests_min"))
        window_s = self._window_s_min()
        if limits.window_s is not None and limits.window_s < window_s:
            raise ValueError(
                f"{name}: limits.window_s is {limits.window_s:g}, the metric asks for {window_s:.4g}"
            )
        window_s = limits.window_s or window_s
        if (window_s + self._start_s(window_s)) * self.rate_max_per_s > limits.requests_max - 2:
            raise ValueError(
                self._too_few(window_s * self.rate_max_per_s, "window_s_min, window_targets_min")
            )

    def _start_s(self, window_s: float) -> float:
        """Warm-up. Sessions begin at the rate asked for, but their requests reach it only when as many
        sessions are live as there will be."""
        return max(self.metric.warmup_ratio * window_s, self._ramp_s)

    def _window_s_min(self) -> float:
        return max(self.metric.window_s_min_for(self._target_s[lane]) for lane in self.scored)

    def _choose_range(self) -> None:
        """The shortest range of requests that will do, by its own capacity; a lane that misses its number
        after all, by chance, is not scored."""
        wanted, window_s = self.metric.lane_requests_min, self._window_s_min()
        most = int(self.case.limits.requests_max / (1.0 + self.metric.warmup_ratio)) - 2
        size = math.ceil(max(wanted / self._shares[lane] for lane in self.scored))
        while True:
            first = math.ceil(self.metric.warmup_ratio * size)
            if first + size >= len(self._drawn.ids):
                self._drawn = self._draw(1.0, min(self.case.limits.requests_max, 2 * (first + size + 1)))
            jobs = self._drawn.jobs.take(slice(first, first + size))
            self.capacity_per_s = self._capacity_of(jobs, 1.0)
            enough = all(int(jobs.of(lane).sum()) >= wanted for lane in self.scored)
            long_enough = float(np.ptp(jobs.arrival_s)) >= window_s * self.rate_max_per_s
            larger = math.ceil(1.02 * size) + 1
            if (enough and long_enough) or larger > most:
                self._first, self._count = first, size
                return
            size = larger

    def _window_s(self, rate_per_s: float | None) -> float:
        if self.case.limits.window_s is not None:
            return self.case.limits.window_s
        window_s = self._window_s_min()
        if rate_per_s is None:
            return window_s
        wanted = 1.1 * self.metric.lane_requests_min / self.real_ratio
        per_lane = (wanted / self._shares[lane] for lane in self.scored)
        return max(window_s, *(requests / rate_per_s for requests in per_lane))

    def _too_few(self, requests: float, settings: str) -> str:
        needed = math.ceil(1.1 * requests * (1.0 + self.metric.warmup_ratio))
        return (
            f"case {self.case.name}: limits.requests_max is {self.case.limits.requests_max}, too few for the "
            f"metric at {self.rate_max_per_s:.4g} requests/s; raise it to {needed}, or state less for a "
            f"quick suite ({settings})"
        )

    # --- what arrives ---

    def _draw(self, rate_per_s: float, requests: int | None, seconds: float | None = None) -> Expected:
        source = make_source(
            self.case.workload,
            rate_per_s=None if self.case.closed else rate_per_s,
            seed=self.seed,
            targets=self._targets,
            requests_max=requests,
            seconds=seconds,
        )
        return _expected_of(_undelayed(source, self._targets), self._setting[0].block_tokens)

    def engines_mean(self) -> float:
        """Engines there are over the window, on average; over all time where the window has no set length."""
        window_s = self.case.limits.window_s
        if window_s is None:
            return float(self.case.instances)
        edges = self.metric.warmup_ratio * window_s + np.array([0.0, window_s])
        return float(engine_seconds(self.case)(edges)[0]) / window_s


def _undelayed(source: Source, targets: Targets) -> Iterator[Arrival]:
    """The arrivals at a service in which everybody is alone, in order."""
    order = count()
    due: list[tuple[float, int, Arrival]] = []
    planned = source.next_arrival()
    while planned is not None or due:
        if planned is not None and (not due or planned.request.arrival_s <= due[0][0]):
            arrival, planned = planned, source.next_arrival()
        else:
            _, _, arrival = heapq.heappop(due)
        yield arrival
        request = arrival.request
        end_s = request.arrival_s + targets.cost_request_s(request.prompt_tokens, 0)
        for later in source.ended(request, end_s):
            heapq.heappush(due, (later.request.arrival_s, next(order), later))


def _expected_of(arrivals: Iterator[Arrival], block_tokens: int) -> Expected:
    """With what an unlimited prefix cache, filled by all earlier arrivals, could hold of each."""
    seen: set[int] = set()
    begun_s: dict[str, float] = {}
    ids: list[str] = []
    since_s: list[float] = []
    rows: list[tuple[float, float, bool, int, int, int]] = []
    for arrival in arrivals:
        request = arrival.request
        history = (
            cached_blocks(request.block_hashes, seen, request.prompt_tokens, block_tokens) * block_tokens
        )
        seen.update(request.block_hashes)
        assert request.ttft_target_s is not None  # sources set it
        ids.append(request.request_id)
        began_s = (
            begun_s.setdefault(request.session, request.arrival_s) if request.session else request.arrival_s
        )
        since_s.append(request.arrival_s - began_s)
        short, new_tokens = arrival.lane is Lane.SHORT, request.prompt_tokens - history
        rows.append(
            (request.arrival_s, request.ttft_target_s, short, new_tokens, history, request.max_new_tokens)
        )
    table = np.array(rows, dtype=float).reshape(len(rows), 6)
    arrival_s, target_s, is_short, new, past, output = table.T
    jobs = Jobs(arrival_s, target_s, is_short.astype(bool), new, past, output)
    return Expected(tuple(ids), jobs, np.array(since_s))


# --- the engines there are ---


def fastest_factor(case: Case) -> float:
    """The lowest factor on pass times that any instance ever has."""
    cold = case.cold_factor if case.cold_passes else 1.0
    return min(1.0, cold, *(speed.factor for speed in case.speeds))


def engine_seconds(case: Case) -> Callable[[Floats], Floats]:
    """Edges (seconds) -> engine seconds between each two, of instances that are up, each by its speed.

    Cold starts are left out unless they are fast: more engine time only raises a bound.
    """
    pieces: list[tuple[float, float, float]] = []  # from, to, speed
    quick = max(1.0, 1.0 / case.cold_factor) if case.cold_passes else 1.0
    for instance in case.sim_instances():
        for up_s, down_s in instance.lives:
            steps = [up_s, *(from_s for from_s, _ in instance.speed if up_s < from_s < down_s), down_s]
            for from_s, to_s in pairwise(steps):
                pieces.append((from_s, to_s, quick / instance.factor(case.cold_passes, from_s)))

    def between(edges_s: Floats) -> Floats:
        done_s = np.zeros(len(edges_s))
        for from_s, to_s, speed in pieces:
            done_s += speed * (np.clip(edges_s, from_s, to_s) - from_s)
        gained: Floats = np.diff(done_s)
        return gained

    return between
