"""What a suite's summary says of the claim that ours is the best in every case: tables with verdicts.

All follows from plain data (`results.summary`). `docs/metric.md` defines each verdict. A verdict is "yes" or
"no", "bound" where no policy could meet it, and empty where there is nothing to compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from service.sim.exhibits.exhibit import Cell, Table
from service.sim.figures import attainment_min
from service.sim.lab_policies import OURS, is_ours
from service.sim.results import t_interval

BASE = "fcfs"
COMPARED = (BASE, "laps_printed", "laps_slides", "laps_artifact")
BEST = "best peer"
RATIO_WANTED, BOUND_WANTED, REGRET_WANTED = 1.3, 0.9, 0.5
SHORT_WANTED, LONG_ALLOWED = 0.7, 1.1
ITL_BINS, TOKENS_NOISE = 1.02, 0.99  # a gap is known to 2 %; decode tokens/s depend on where a run ends
DRAWS = 10_000
YES, NO, BOUND = "yes", "no", "bound"

Summary = Mapping[str, Any]
CaseData = Mapping[str, Any]
Points = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Goodput:
    """Of one policy in one case at one level. ratio: to the bound."""

    policy: str
    per_s: float
    ratio: float


def goodputs(case: CaseData, level: str) -> list[Goodput]:
    """Of all policies that could be scored; empty where the case was not searched."""
    if level not in case["bounds"]:
        return []
    bound = case["bounds"][level]["per_s"]
    found = []
    for policy, figures in case["policies"].items():
        interval = figures["goodput"][level]["per_s"]
        if interval is not None:
            found.append(Goodput(policy, interval["value"], interval["value"] / bound))
    return found


def best_peer(case: CaseData, level: str) -> Goodput | None:
    peers = [g for g in goodputs(case, level) if not is_ours(g.policy)]
    return max(peers, key=lambda g: g.per_s, default=None)


# --- goodput ---


@dataclass(frozen=True, slots=True)
class Against:
    """Ours against the best peer in one case. ratio, low, high: None where a seed has no goodput on either
    side, or no end."""

    ours: Goodput
    peer: Goodput
    ratio: float | None
    low: float | None
    high: float | None

    @property
    def no_worse(self) -> str:
        """Whether the interval of the ratio reaches 1."""
        if self.ratio is None:
            return YES if self.ours.per_s >= self.peer.per_s else NO
        return YES if self.high is None or self.high >= 1.0 else NO

    @property
    def far_better(self) -> str:
        near = self.ours.ratio >= BOUND_WANTED
        return YES if near or self.ours.per_s >= max(RATIO_WANTED * self.peer.per_s, 1e-9) else NO

    @property
    def regret_ratio(self) -> float | None:
        """Of ours over that of the peer."""
        regret = 1.0 - self.peer.ratio
        return (1.0 - self.ours.ratio) / regret if regret > 0.0 else None


def against_best(case: CaseData, level: str) -> Against | None:
    """None where ours or every peer could not be scored, or none has any goodput."""
    ours = next((g for g in goodputs(case, level) if g.policy == OURS), None)
    peer = best_peer(case, level)
    if ours is None or peer is None or not (ours.per_s or peer.per_s):
        return None
    over = case["policies"][peer.policy].get("ours_over", {}).get(level)
    if over is None:
        return Against(ours, peer, None, None, None)
    return Against(ours, peer, over["value"], over["low"], over["high"])


def means_table(summary: Summary, level: str) -> Table:
    """Geometric means over the cases of ours over some peers and over the best one of each case.

    The interval is, where every case has the same two seeds or more, the t-interval over seeds of the mean
    logarithm; else a bootstrap over cases, which says how far the mean hangs on the choice of cases and
    nothing of other seeds. Cases in which either has no goodput are left out, and counted.
    """
    rows: list[tuple[Cell, ...]] = []
    for name in (*COMPARED, BEST):
        logs, left_out = [], 0
        for case in summary["cases"].values():
            found = _logs(case, name, level)
            logs += [found] if found else []
            left_out += found is not None and not found
        if logs or left_out:
            rows.append((name, *_mean_of(logs), len(logs), left_out))
    return Table(("over", "geometric mean", "95 % interval", "of", "cases", "left out"), tuple(rows))


def _logs(case: CaseData, name: str, level: str) -> list[float] | None:
    """Logarithms of ours over `name`, by seed; empty: one has no goodput; None: one is not there."""
    scored = {g.policy for g in goodputs(case, level)}
    best = best_peer(case, level)
    peer = (best.policy if best is not None else "") if name == BEST else name
    if OURS not in scored or peer not in scored:
        return None
    ours, theirs = (case["policies"][p]["goodput"][level].get("by_seed", ()) for p in (OURS, peer))
    pairs = list(zip(ours, theirs, strict=True))
    return [math.log(a / b) for a, b in pairs] if all(a and b for a, b in pairs) else []


def _mean_of(logs: Sequence[Sequence[float]]) -> tuple[Cell, Cell, Cell]:
    """(geometric mean, interval, what it is over)."""
    if not logs:
        return None, None, None
    seeds = {len(each) for each in logs}
    if len(seeds) == 1 and seeds != {1}:
        mean, low, high = t_interval([sum(column) / len(logs) for column in zip(*logs, strict=True)])
        return math.exp(mean), interval_text(math.exp(low), math.exp(high)), f"{seeds.pop()} seeds"
    values = np.array([sum(each) / len(each) for each in logs])
    if len(values) < 2:
        return math.exp(values[0]), None, None
    drawn = np.random.default_rng(0).choice(values, (DRAWS, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return math.exp(values.mean()), interval_text(math.exp(low), math.exp(high)), "cases, bootstrap"


def interval_text(low: float | None, high: float | None) -> str | None:
    if low is None:
        return None
    return f"[{low:.3g}, {'' if high is None else format(high, '.3g')}]"


# --- at a share of the best peer's goodput ---


@dataclass(frozen=True, slots=True)
class AtPeerRate:
    """One case at the rate of `peer_points`; seconds, means over seeds.

    peer: of those that attain `level` in each lane on every seed there the one with the lowest mean in the
        short lane; None: no peer does. bound_s: no policy has a lower mean in the short lane.
    *_long_s: P99 of the long lane; inf: more than 1 % without an answer; None: there is no long lane.
    """

    rate_per_s: float
    attains: bool
    short_s: float | None
    peer: str | None
    peer_short_s: float | None
    bound_s: float | None
    long_s: float | None
    base_long_s: float | None

    @property
    def short_ratio(self) -> float | None:
        return _over(self.short_s, self.peer_short_s)

    @property
    def short(self) -> str:
        if not self.attains:
            return NO
        if self.short_s is None or self.peer_short_s is None:
            return YES if self.peer is None else ""
        if self.short_s <= SHORT_WANTED * self.peer_short_s:
            return YES
        forbidden = self.bound_s is not None and self.bound_s > SHORT_WANTED * self.peer_short_s
        return BOUND if forbidden else NO

    @property
    def long(self) -> str:
        if self.long_s is None or self.base_long_s is None:
            return ""
        if math.isinf(self.base_long_s):
            return YES if math.isfinite(self.long_s) else ""
        return YES if self.long_s <= LONG_ALLOWED * self.base_long_s else NO


def at_peer_rate(case: CaseData, level: str) -> AtPeerRate | None:
    """None where ours was not run at such a rate."""
    runs: dict[str, Points] = {p: figures.get("peer_points", ()) for p, figures in case["policies"].items()}
    ours = runs.get(OURS, ())
    if not ours:
        return None
    shorts = {p: _mean(points, "short", "ttft_s_mean") for p, points in runs.items()}
    able = [p for p, points in runs.items() if not is_ours(p) and points and attains(points, float(level))]
    peer = min((p for p in able if shorts[p] is not None), key=lambda p: shorts[p] or 0.0, default=None)
    return AtPeerRate(
        rate_per_s=sum(point["rate_per_s"] for point in ours) / len(ours),
        attains=attains(ours, float(level)),
        short_s=shorts[OURS],
        peer=peer,
        peer_short_s=None if peer is None else shorts[peer],
        bound_s=case.get("short_alone_s"),
        long_s=_worst(ours),
        base_long_s=_worst(runs.get(BASE, ())),
    )


def attains(points: Points, level: float) -> bool:
    """Both lanes meet their targets in every run, as far as the metric asks for."""
    return all(
        lane["attainment"] >= attainment_min(level, lane["arrived"], lane["scored"])
        for point in points
        for lane in point["lanes"].values()
    )


def _worst(points: Points) -> float | None:
    """Mean over seeds of the P99 of the long lane."""
    found = [p["lanes"]["long"]["ttft_s_p99"] for p in points if "long" in p["lanes"]]
    if not found:
        return None
    return math.inf if None in found else sum(found) / len(found)


def _mean(points: Points, lane: str, key: str) -> float | None:
    found = [point["lanes"][lane][key] for point in points if lane in point["lanes"]]
    return sum(found) / len(found) if found and None not in found else None


def _over(one: float | None, other: float | None) -> float | None:
    if one is None or not other or math.isinf(other):
        return None
    return one / other


def peer_rate_table(summary: Summary, level: str) -> Table:
    """A row a case. Times in ms."""
    rows: list[tuple[Cell, ...]] = []
    for name, case in summary["cases"].items():
        found = at_peer_rate(case, level)
        if found is not None:
            short = (found.short_s, found.peer_short_s, found.short_ratio, found.bound_s)
            rows.append(
                (
                    name,
                    found.rate_per_s,
                    _ms(short[0]),
                    "none attains it" if found.peer is None else found.peer,
                    _ms(short[1]),
                    short[2],
                    _ms(short[3]),
                    found.short,
                    _ms(found.long_s),
                    _ms(found.base_long_s),
                    _over(found.long_s, found.base_long_s),
                    found.long,
                )
            )
    columns = ("case", "requests/s", "short mean ms", "best peer", "its mean ms", "ratio", "bound ms")
    wanted = (f"<= {SHORT_WANTED:g}", "long p99 ms", f"{BASE} long p99 ms", "long ratio")
    return Table((*columns, *wanted, f"<= {LONG_ALLOWED:g}"), tuple(rows))


@dataclass(frozen=True, slots=True)
class Decode:
    """tokens_per_s, itl_s_p99: mean over seeds, of decode; None: nothing decoded."""

    policy: str
    tokens_per_s: float
    itl_s_p99: float | None

    def no_worse_than(self, other: Decode) -> bool:
        mine, theirs = (math.inf if d.itl_s_p99 is None else d.itl_s_p99 for d in (self, other))
        return self.tokens_per_s >= TOKENS_NOISE * other.tokens_per_s and mine <= ITL_BINS * theirs


def decode_of(case: CaseData, policy: str) -> Decode | None:
    """At the rate of `peer_points`; None where it was not run there, or nothing decodes."""
    points = case["policies"].get(policy, {}).get("peer_points", ())
    if not points or not any(point["decode_tokens_per_s"] for point in points):
        return None
    gaps = [point["itl_s_p99"] for point in points]
    tokens = sum(point["decode_tokens_per_s"] for point in points) / len(points)
    return Decode(policy, tokens, None if None in gaps else sum(gaps) / len(gaps))


def decode_table(summary: Summary, level: str) -> Table:
    """Cases that decode: ours, the best peer (by goodput) and the base at the rate of `peer_points`."""
    rows: list[tuple[Cell, ...]] = []
    for name, case in summary["cases"].items():
        ours, best = decode_of(case, OURS), best_peer(case, level)
        for policy in dict.fromkeys(["" if best is None else best.policy, BASE]):
            other = decode_of(case, policy)
            if ours is not None and other is not None:
                verdict = YES if ours.no_worse_than(other) else NO
                gaps = (_ms(ours.itl_s_p99), _ms(other.itl_s_p99))
                rows.append((name, policy, ours.tokens_per_s, other.tokens_per_s, *gaps, verdict))
    columns = ("case", "against", f"{OURS} tokens/s", "its tokens/s", f"{OURS} ITL p99 ms", "its ITL p99 ms")
    return Table((*columns, "no worse"), tuple(rows))


def _ms(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value * 1e3


# --- all of it ---


def verdict_table(summary: Summary, level: str) -> Table:
    """What is asked of ours, and in how many cases it holds."""
    return Table(("asked for", "holds in", "of", "figure"), tuple(_verdicts(summary, level)))


def _verdicts(summary: Summary, level: str) -> Iterator[tuple[Cell, ...]]:
    cases = list(summary["cases"].values())
    found = [a for case in cases if (a := against_best(case, level)) is not None]
    yield _counted("goodput no worse than the best peer, within the interval", [a.no_worse for a in found])
    asked = f"goodput {RATIO_WANTED:g} x the best peer's, or {BOUND_WANTED:.0%} of the bound"
    yield _counted(asked, [a.far_better for a in found])
    ratios = [a.regret_ratio for a in found if a.regret_ratio is not None]
    if ratios:
        middle = median(ratios)
        told = f"median {middle:.2f}: {YES if middle <= REGRET_WANTED else NO}"
        below = sum(ratio <= REGRET_WANTED for ratio in ratios)
        yield f"regret at most {REGRET_WANTED:g} x the best peer's, median", below, len(ratios), told
    common = [c for case in cases if (c := at_peer_rate(case, level)) is not None]
    if common:
        asked = f"mean short TTFT at most {SHORT_WANTED:g} x the best peer's that attains both lanes"
        yield _counted(asked, [c.short for c in common], f"forbidden by the bound in {_bound(common)}")
        yield _counted(f"long P99 at most {LONG_ALLOWED:g} x that of {BASE}", [c.long for c in common])
    decoded = decode_table(summary, level).rows
    if decoded:
        yield _counted("decode tokens/s and ITL P99 no worse", [str(row[-1]) for row in decoded])


def _counted(asked: str, verdicts: Sequence[str], figure: str | None = None) -> tuple[Cell, ...]:
    judged = [verdict for verdict in verdicts if verdict]
    return asked, judged.count(YES), len(judged), figure


def _bound(common: Sequence[AtPeerRate]) -> int:
    return sum(each.short == BOUND for each in common)
