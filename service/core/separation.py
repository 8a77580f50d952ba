"""Will two pools beat one? A prediction from queueing theory.

n instances serve two streams. w is the busy time a second that a stream asks for (w < n is a load that can be
served), S the time of a short pass, L that of a whole long request, C <= L that of its longest pass.
C(k, w) is Erlang's probability that all of k instances are busy. Waits are those of Allen and Cunneen for
M/G/k: the exponential ones, times (1 + scv) / 2.

    pooled   shorts first: a short waits for the first pass to end, and for shorts before it,
                 W_s = C(n, w)  r / n  / (1 - w_s/n)          r = (w_s S' + w_l C') / w,  w = w_s + w_l
             a long one also for the longs before it, and shorts between its chunks stretch its own time where
             no other instance is idle,
                 W_l = C(n, w)  R / n  / ((1 - w_s/n) (1 - w/n))        R as r, with L' for C'
                 time = L (1 + C(n, w) w_s / (n - w_s))
             or, where that is better, both alike: W = C(n, w)  R / n  / (1 - w/n)
    split    k short and n - k long instances, each pool alone: W = C(k, w)  S' / k  / (1 - w/k)

with S', C', L' times (1 + scv) / 2. (Non-preemptive priority at the end of a pass; with one class it is
M/M/n.) A wait of mean W that happens with probability P exceeds t with probability P exp(-t P / W), so the
share of a lane that misses its target follows. The score of an arrangement is the misses of both lanes, and a
little of its waits over the targets, so that there is an order where nobody misses anything. Lower is better;
the best k is taken.

What it says: pooling shares idle instances, so it wins unless a pass of a long prompt blocks a short for
longer than that is worth. Chunks take that reason away. Separation pays for long passes that can't be cut, on
many instances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WAIT_WEIGHT = 0.1  # of waits beside misses in the score


@dataclass(frozen=True, slots=True)
class Stream:
    """One lane. work_s_per_s: busy seconds it asks for a second. request_s: mean of a request alone;
    pass_s: of the longest pass it is served in. scv: squared coefficient of variation of request_s."""

    work_s_per_s: float
    request_s: float
    pass_s: float
    target_s: float
    scv: float = 1.0


@dataclass(frozen=True, slots=True)
class Separation:
    """short_instances: of the best split; 0 where there is none. Scores as in the module text."""

    short_instances: int
    pooled_score: float
    split_score: float

    @property
    def gain(self) -> float:
        """By how much two pools are better; negative where one is."""
        return self.pooled_score - self.split_score


def all_busy(instances: int, work: float) -> float:
    """Erlang's C: the probability that an arrival finds `instances` busy at an offered load of `work`."""
    if work <= 0.0:
        return 0.0
    if work >= instances:
        return 1.0
    blocked = 1.0  # Erlang's B, from 0 instances up
    for count in range(1, instances + 1):
        blocked = work * blocked / (count + work * blocked)
    return blocked / (1.0 - work / instances * (1.0 - blocked))


def predict(instances: int, short: Stream, long: Stream, instances_min: int = 1) -> Separation:
    """The scores of one pool and of the best two of at least `instances_min` each. Two that give a lane up
    are no choice: one pool that can't serve all gives up as little, and demand above capacity is a guess."""
    pooled = _pooled_score(instances, short, long)
    best, best_score = 0, math.inf
    for count in range(instances_min, instances - instances_min + 1):
        if short.work_s_per_s >= count or long.work_s_per_s >= instances - count:
            continue
        score = _alone_score(count, short) + _alone_score(instances - count, long)
        if score < best_score:
            best, best_score = count, score
    return Separation(best, pooled, best_score)


def _pooled_score(instances: int, short: Stream, long: Stream) -> float:
    work = short.work_s_per_s + long.work_s_per_s
    if work <= 0.0:
        return 0.0
    of_shorts, load, busy = short.work_s_per_s / instances, work / instances, all_busy(instances, work)
    if of_shorts >= 1.0:
        return _lost(short) + _lost(long)
    ahead = short.work_s_per_s * _varied(short.request_s, short.scv)
    pass_s = (ahead + long.work_s_per_s * _varied(long.pass_s, _pass_scv(long))) / work
    request_s = (ahead + long.work_s_per_s * _varied(long.request_s, long.scv)) / work
    first_s = busy * pass_s / instances / (1.0 - of_shorts)
    first = _score(short, busy, first_s, short.request_s)
    if load >= 1.0:
        return first + _lost(long)
    alike_s = busy * request_s / instances / (1.0 - load)
    alike = sum(_score(lane, busy, alike_s, lane.request_s) for lane in (short, long))
    stretched_s = long.request_s * (1.0 + busy * of_shorts / (1.0 - of_shorts))
    return min(alike, first + _score(long, busy, alike_s / (1.0 - of_shorts), stretched_s))


def _alone_score(instances: int, stream: Stream) -> float:
    if stream.work_s_per_s <= 0.0:
        return 0.0
    load = stream.work_s_per_s / instances
    if load >= 1.0:
        return _lost(stream)
    busy = all_busy(instances, stream.work_s_per_s)
    wait_s = busy * _varied(stream.request_s, stream.scv) / instances / (1.0 - load)
    return _score(stream, busy, wait_s, stream.request_s)


def _score(stream: Stream, busy: float, wait_s: float, own_s: float) -> float:
    """Share that misses the target, and the wait over the target (the stretch of its own time counts)."""
    delay_s = wait_s + own_s - stream.request_s
    slack_s = stream.target_s - own_s
    if slack_s <= 0.0:
        missed = 1.0
    elif wait_s <= 0.0:
        missed = 0.0
    else:
        missed = busy * math.exp(-slack_s * busy / wait_s)
    return missed + WAIT_WEIGHT * min(1.0, delay_s / stream.target_s)


def _lost(stream: Stream) -> float:
    """A stream whose queue grows without end."""
    return 1.0 + WAIT_WEIGHT if stream.work_s_per_s > 0.0 else 0.0


def _varied(mean_s: float, scv: float) -> float:
    return mean_s * (1.0 + scv) / 2.0


def _pass_scv(stream: Stream) -> float:
    """Passes cut to one length do not vary."""
    return stream.scv if stream.pass_s >= stream.request_s else 0.0
