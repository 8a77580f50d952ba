"""The routers of gateways: load balancing, cache-aware, length buckets, predicted latency.

Each is built from its published source, named in the registry, and sees what that one sees. None of them
knows lanes. Loads are exact here, where a real gateway works with counts of its own or with reports that
are late.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from engines.cost_model import PassShape
from engines.types import Padding
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.policies.prefix_tree import PrefixTree
from service.policies.routed import Station

_MASK = (1 << 64) - 1


def least_loaded(stations: Sequence[Station]) -> Station:
    """Fewest live requests; ties by the order in which they came up."""
    return min(stations, key=lambda station: station.requests)


# --- router_lb --------------------------------------------------------------------------------------------


class Balance(StrEnum):
    LEAST_REQUESTS = "least_requests"
    LEAST_TOKENS = "least_tokens"  # prompt tokens still to be computed
    TWO_CHOICES = "two_choices"  # two at random, fewer tokens
    ROUND_ROBIN = "round_robin"  # plain data parallel


@dataclass(frozen=True, slots=True)
class BalanceKnobs:
    """balance: what is compared, and between how many."""

    balance: Balance = Balance.LEAST_REQUESTS


class LoadBalancer:
    def __init__(self, knobs: BalanceKnobs) -> None:
        self._balance = knobs.balance
        self._placed = count()

    def joined(self, station: Station) -> None:
        pass

    def left(self, station: Station) -> None:
        pass

    def choose(self, tracked: Tracked, stations: Sequence[Station], now_s: float) -> Station:
        number = next(self._placed)
        match self._balance:
            case Balance.ROUND_ROBIN:
                return stations[number % len(stations)]
            case Balance.LEAST_REQUESTS:
                return least_loaded(stations)
            case Balance.LEAST_TOKENS:
                candidates = stations
            case Balance.TWO_CHOICES:
                candidates = two_of(stations, number)
        return min(candidates, key=lambda station: station.tokens_ahead)


def two_of(stations: Sequence[Station], number: int) -> Sequence[Station]:
    """Two different ones, spread like a random pair but fixed by `number`: the same run, the same choices."""
    size = len(stations)
    if size < 3:
        return stations
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & _MASK  # splitmix64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    mixed ^= mixed >> 31
    first = mixed % size
    return stations[first], stations[(first + 1 + (mixed >> 32) % (size - 1)) % size]


# --- cache_aware ------------------------------------------------------------------------------------------


class Cold(StrEnum):
    """Where a request with too little of a cached prefix goes."""

    LEAST_LOADED = "least_loaded"  # SMG since 2026
    SMALLEST_TREE = "smallest_tree"  # SGLang router


@dataclass(frozen=True, slots=True)
class CacheAwareKnobs:
    """cache_threshold: share of the prompt that must match. balance_abs_threshold (requests) and
    balance_rel_threshold: loads further apart than both are evened out first. cold: see `Cold`.
    max_tree_size: tokens per instance; eviction_interval_s: how often the tree is cut back to it.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    cold: Cold = Cold.LEAST_LOADED
    max_tree_size: int = 67_108_864
    eviction_interval_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.cache_threshold <= 1.0:
            raise ValueError(f"cache_threshold must be from 0 to 1, got {self.cache_threshold}")
        _check_balance(self.balance_abs_threshold, self.balance_rel_threshold)


class CacheAware:
    def __init__(self, knobs: CacheAwareKnobs) -> None:
        self._knobs = knobs
        self._tree = PrefixTree()
        self._evict_s = math.inf

    def joined(self, station: Station) -> None:
        self._tree.join(station.instance.instance_id)

    def left(self, station: Station) -> None:
        self._tree.leave(station.instance.instance_id)

    def choose(self, tracked: Tracked, stations: Sequence[Station], now_s: float) -> Station:
        self._evict(stations, now_s)
        loads = [station.requests for station in stations]
        hashes = tracked.request.block_hashes
        if _apart(loads, self._knobs.balance_abs_threshold, self._knobs.balance_rel_threshold):
            chosen = stations[loads.index(min(loads))]
        else:
            chosen = self._matching(tracked, stations, loads) or self._cold(stations, loads)
        if hashes:
            self._tree.insert(chosen.instance.instance_id, hashes)
        return chosen

    def _matching(
        self, tracked: Tracked, stations: Sequence[Station], loads: Sequence[int]
    ) -> Station | None:
        """The least loaded of those that match longest, where that is long enough."""
        blocks, owners = self._tree.match(tracked.request.block_hashes)
        block_tokens = stations[0].instance.spec.capabilities.block_tokens
        if blocks * block_tokens <= self._knobs.cache_threshold * tracked.request.prompt_tokens:
            return None
        matching = [i for i, s in enumerate(stations) if s.instance.instance_id in owners]
        return stations[min(matching, key=lambda i: loads[i])] if matching else None

    def _cold(self, stations: Sequence[Station], loads: Sequence[int]) -> Station:
        if self._knobs.cold is Cold.SMALLEST_TREE:
            return min(stations, key=lambda s: self._tree.size(s.instance.instance_id))
        return stations[loads.index(min(loads))]

    def _evict(self, stations: Sequence[Station], now_s: float) -> None:
        if math.isinf(self._evict_s):
            self._evict_s = now_s + self._knobs.eviction_interval_s
        if now_s >= self._evict_s:
            self._evict_s = now_s + self._knobs.eviction_interval_s
            block_tokens = stations[0].instance.spec.capabilities.block_tokens
            self._tree.evict(self._knobs.max_tree_size // block_tokens)


# --- bucket -----------------------------------------------------------------------------------------------

CHARS_PER_TOKEN = 4  # their lengths are characters of text
FIRST_LENGTH_MAX = 4096 // CHARS_PER_TOKEN  # the first boundaries split this range evenly


@dataclass(frozen=True, slots=True)
class BucketKnobs:
    """balance_abs_threshold (tokens given out in the last interval) and balance_rel_threshold: instances
    further apart than both are evened out first. bucket_adjust_interval_s: between moves of boundaries, and
    how long what was given out is remembered."""

    balance_abs_threshold: int = 64 // CHARS_PER_TOKEN
    balance_rel_threshold: float = 1.5
    bucket_adjust_interval_s: float = 5.0

    def __post_init__(self) -> None:
        _check_balance(self.balance_abs_threshold, self.balance_rel_threshold)
        if not self.bucket_adjust_interval_s > 0.0:
            raise ValueError(
                f"bucket_adjust_interval_s must be greater than 0, got {self.bucket_adjust_interval_s}"
            )


class Bucket:
    """Station k takes prompts up to the k-th boundary; boundaries follow the lengths of the last interval."""

    def __init__(self, knobs: BucketKnobs) -> None:
        self._knobs = knobs
        self._stations: list[Station] = []
        self._uppers: list[int] = []  # longest prompt of each station but the last
        self._given: dict[str, int] = {}  # instance -> tokens given out in the last interval
        self._recent: deque[tuple[float, int, str]] = deque()  # (when, tokens, instance)
        self._share_tokens = 0  # per station, when the boundaries were last moved
        self._adjust_s = math.inf

    def joined(self, station: Station) -> None:
        self._stations.append(station)
        self._start_anew()

    def left(self, station: Station) -> None:
        self._stations.remove(station)
        self._start_anew()

    def choose(self, tracked: Tracked, stations: Sequence[Station], now_s: float) -> Station:
        if math.isinf(self._adjust_s):
            self._adjust_s = now_s + self._knobs.bucket_adjust_interval_s
        if now_s >= self._adjust_s:
            self._adjust()
            self._adjust_s = now_s + self._knobs.bucket_adjust_interval_s
        tokens = tracked.request.prompt_tokens
        given = [self._given[station.instance.instance_id] for station in stations]
        chosen = self._stations[bisect_left(self._uppers, tokens)]
        apart = _apart(given, self._knobs.balance_abs_threshold, self._knobs.balance_rel_threshold)
        if apart or chosen not in stations:
            chosen = stations[given.index(min(given))]
        self._give(chosen.instance.instance_id, tokens, now_s)
        return chosen

    def _give(self, instance_id: str, tokens: int, now_s: float) -> None:
        while self._recent and self._recent[0][0] < now_s - self._knobs.bucket_adjust_interval_s:
            _, old, where = self._recent.popleft()
            if where in self._given:
                self._given[where] = max(0, self._given[where] - old)
        self._recent.append((now_s, tokens, instance_id))
        self._given[instance_id] += tokens

    def _start_anew(self) -> None:
        size = len(self._stations)
        self._uppers = [k * FIRST_LENGTH_MAX // size for k in range(1, size)]
        self._given = {station.instance.instance_id: 0 for station in self._stations}

    def _adjust(self) -> None:
        """Boundaries at equal shares of the tokens, unless the load is within twice or half of the last."""
        lengths = sorted(tokens for _, tokens, _ in self._recent)
        if not lengths or not self._stations:
            return
        share = sum(lengths) // len(self._stations)
        if self._share_tokens and self._share_tokens <= 2 * share <= 4 * self._share_tokens:
            return
        self._share_tokens = share
        uppers: list[int] = []
        tokens = 0
        for length in lengths:
            tokens += length
            while len(uppers) < len(self._stations) - 1 and tokens >= share * (len(uppers) + 1):
                uppers.append(length)
        self._uppers = uppers


# --- predicted_latency ------------------------------------------------------------------------------------


class Headroom(StrEnum):
    """Which of the instances that are predicted to meet the target is taken."""

    LEAST = "least"  # the fullest: keeps others free
    MOST = "most"  # the fastest


@dataclass(frozen=True, slots=True)
class PredictedKnobs:
    """headroom: see `Headroom`. affinity_threshold: share of the prompt cached from which an instance is
    preferred, unless that is predicted to cost more than max_ttft_penalty_s."""

    headroom: Headroom = Headroom.LEAST
    affinity_threshold: float = 0.8
    max_ttft_penalty_s: float = 5.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.affinity_threshold <= 1.0:
            raise ValueError(f"affinity_threshold must be from 0 to 1, got {self.affinity_threshold}")
        if not self.max_ttft_penalty_s >= 0.0:
            raise ValueError(f"max_ttft_penalty_s must be at least 0, got {self.max_ttft_penalty_s}")


class PredictedLatency:
    """Predicted TTFT per instance: what runs there, then all queued tokens and the request's own in passes of
    the token budget, then a decode step after each pass where requests decode (one per ITL bound at most)."""

    def __init__(self, settings: SchedulerSettings, knobs: PredictedKnobs) -> None:
        self._settings = settings
        self._knobs = knobs

    def joined(self, station: Station) -> None:
        pass

    def left(self, station: Station) -> None:
        pass

    def choose(self, tracked: Tracked, stations: Sequence[Station], now_s: float) -> Station:
        if len(stations) == 1:
            return stations[0]
        if tracked.request.block_hashes:
            items = [station.instance.item_of(tracked) for station in stations]
        else:
            items = [(tracked.request.prompt_tokens, 0)] * len(stations)
        idle_s: dict[tuple[int, int, tuple[int, int]], float] = {}  # idle ones of a kind predict the same
        ttfts = []
        for station, item in zip(stations, items, strict=True):
            instance = station.instance
            busy = instance.running is not None or instance.decode.running
            if busy or station.waiting or station.cut_tokens:
                ttfts.append(self._ttft_s(station, item, now_s))
                continue
            kind = id(instance.pricer.cost), id(instance.spec.profiles), item
            if kind not in idle_s:
                idle_s[kind] = self._ttft_s(station, item, now_s)
            ttfts.append(idle_s[kind])
        places = self._gated(tracked, items, ttfts)
        if self._knobs.headroom is Headroom.LEAST and math.isfinite(tracked.target_s):
            making_it = [i for i in places if now_s + ttfts[i] <= tracked.target_s]
            if making_it:
                return stations[max(making_it, key=lambda i: (ttfts[i], -i))]
        return stations[min(places, key=lambda i: ttfts[i])]

    def _gated(
        self, tracked: Tracked, items: Sequence[tuple[int, int]], ttfts: Sequence[float]
    ) -> Sequence[int]:
        """Those with most of the prompt cached, while that costs little; else all."""
        everywhere = range(len(items))
        if not tracked.request.block_hashes:
            return everywhere
        least = self._knobs.affinity_threshold * tracked.request.prompt_tokens
        sticky = [i for i in everywhere if items[i][1] > 0 and items[i][1] >= least]
        others = [ttfts[i] for i in everywhere if i not in sticky]
        if not sticky:
            return everywhere
        if others and min(ttfts[i] for i in sticky) - min(others) > self._knobs.max_ttft_penalty_s:
            return everywhere
        return sticky

    def _ttft_s(self, station: Station, item: tuple[int, int], now_s: float) -> float:
        instance, profiles = station.instance, station.instance.spec.profiles
        new, history = item
        tokens = station.tokens + station.cut_tokens + new
        attention = station.attention + station.cut_attention + new * (new + 2.0 * history)
        pass_tokens_max = min(self._settings.budget_tokens, profiles.tokens_max)
        passes = -(-tokens // pass_tokens_max)
        total_s = 0.0
        if instance.running is not None:
            end_s = instance.running.end_s
            total_s = max(0.0, end_s - now_s) if math.isfinite(end_s) else instance.running.predicted_s
            if instance.staged is not None:
                total_s += instance.staged.predicted_s
            attention *= passes * pass_tokens_max / tokens
            tokens = passes * pass_tokens_max  # those that come later fill its last pass
        shape = PassShape(
            -(-tokens // passes), attention / passes, (station.history + history) // passes, requests=1
        )
        pass_s = math.inf
        if profiles.padding is not Padding.NOTHING:
            pass_s = instance.pricer.pass_s([(shape.tokens, shape.history)])
        if math.isinf(pass_s):
            pass_s = instance.pricer.cost.pass_s(shape)
        total_s += passes * pass_s
        if instance.decode.running:
            steps = min(passes, 1 + int(total_s / self._settings.itl_bound_s))
            total_s += steps * instance.pricer.pass_s([(1, 0)])
        return total_s


def _apart(loads: Sequence[int], abs_threshold: int, rel_threshold: float) -> bool:
    low, high = min(loads), max(loads)
    return high - low > abs_threshold and high > rel_threshold * low


def _check_balance(abs_threshold: int, rel_threshold: float) -> None:
    if abs_threshold < 0:
        raise ValueError(f"balance_abs_threshold must be at least 0, got {abs_threshold}")
    if rel_threshold < 1.0:
        raise ValueError(f"balance_rel_threshold must be at least 1, got {rel_threshold}")
