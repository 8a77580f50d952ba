"""Scheduler knobs: meaning, unit and the reason of each default. One frozen group, given at construction.

Defaults hold for both a GPU and the embedded CPU engine unless said; the surface (`service/settings.py`)
reads them from a file or the environment and passes only this group on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import StrEnum


class LatePolicy(StrEnum):
    """What happens to a request whose TTFT target is out of reach."""

    SERVE_LAST = "serve_last"  # after those that can still make it, shortest first
    REFUSE = "refuse"


class Grouping(StrEnum):
    """How waiting short requests are split into passes."""

    AUTO = "auto"  # by predicted total completion time
    MEMORY_FIRST = "memory_first"  # several passes, least padding (LAPS slides)
    LATENCY_FIRST = "latency_first"  # one pass, padded to the longest (LAPS slides)


class Mode(StrEnum):
    """Whether several instances are one pool or two."""

    TEMPORAL = "temporal"  # one: every instance serves both lanes
    SPATIAL = "spatial"  # one for each lane, moved between by pressure
    AUTO = "auto"  # two only while that is predicted to win


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    mode: Mode = Mode.AUTO

    # lanes and targets
    lane_floor_tokens: int = 256  # short: L up to max(L_m(H), this); the embedded engine's L_m is below it
    ttft_target_short_s: float = 0.4  # the SLO of the LAPS experiments
    ttft_target_long_factor: float = 3.0  # long target = max(short target, factor x isolated + offset)
    ttft_target_long_offset_s: float = 0.2
    late_policy: LatePolicy = LatePolicy.SERVE_LAST

    # adaptive wait-depth
    window_s_min: float = 0.0
    window_s_max: float = 0.008  # LAPS finds its optimum at 6-8 ms
    sigma_s: float = 0.005  # slack at which a request may wait no longer
    rate_memory_s: float = 1.0  # arrival rates are over about the last so many seconds
    head_wait_s_max: float = 0.020  # T_max: the head never waits longer for depth
    safety_s: float = 0.002  # subtracted from every slack: dispatch and hand-back time

    # passes
    grouping: Grouping = Grouping.AUTO
    group_requests_max: int = 24  # requests that one grouping decision looks at
    long_chunk_s_max: float = 0.15  # a pass with long tokens blocks arriving shorts at most this long
    spill_chunk_s_max: float = 0.05  # the same for long tokens on an instance that prefers shorts
    partial_requests_max: int = 32  # long requests that hold KV between chunks, per instance
    age_bound_s: float = 5.0  # a request without progress this long leads a pass, oldest first
    aged_share: float = 0.05  # of engine time, for those who lead for their age while others wait
    budget_tokens: int = 2048  # token-budget policies (fcfs): tokens of one pass, SGLang's order of size

    # tenants
    tenant_weights: tuple[tuple[str, float], ...] = ()  # (tenant, weight of its share); 1 for all others
    tenant_burst_s: float = 0.5  # of all instances: how far ahead of its share; 0: tenants are one

    # decode beside prefill
    itl_bound_s: float = 0.25  # a decode step starts before the oldest last token is older than this
    decode_share_min: float = 0.1  # of engine time, while requests decode

    # staging and bounds
    stage_lead_s: float = 0.0  # stage the next pass this long before the running one ends; 0: never
    queue_requests_max: int = 1024
    queue_tokens_max: int = 524_288
    queue_short_share: float = 0.25  # of both bounds, kept for the short lane
    queue_age_s_max: float = 60.0  # a request that has not started by then is refused
    no_instance_s_max: float = 2.0  # with no instance up, live requests are given up after this
    retry_after_s: float = 1.0  # told to refused clients when no better estimate is at hand

    # the cost model
    cost_correction_max: float = 3.0  # measured passes correct it by this factor either way; 1: never

    # slow and silent instances
    outlier_ratio: float = 4.0  # slower than its peers by this: gets no new work; 0: never
    outlier_passes_min: int = 8  # judged by so many passes at least, and by twice as many at most
    outlier_share_max: float = 0.34  # of the instances of a kind, that may be without new work at a time
    outlier_eject_s: float = 10.0  # until it is tried with one pass; doubles with every trial that fails
    hang_ratio: float = 30.0  # a pass this many times as long as predicted is not coming back; 0: never
    hang_s_min: float = 10.0  # and not before so many seconds

    def __post_init__(self) -> None:
        positive = {"ttft_target_short_s", "group_requests_max", "long_chunk_s_max", "age_bound_s"}
        positive |= {"spill_chunk_s_max", "rate_memory_s"}
        positive |= {"budget_tokens", "itl_bound_s", "queue_requests_max", "queue_tokens_max"}
        positive |= {"aged_share", "queue_age_s_max", "partial_requests_max"}
        positive |= {"outlier_passes_min", "outlier_eject_s", "hang_s_min"}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, StrEnum | tuple):
                continue
            if math.isnan(value) or value < 0 or (item.name in positive and value == 0):
                bound = "greater than 0" if item.name in positive else "at least 0"
                raise ValueError(f"{item.name} must be {bound}, got {value}")
        if self.window_s_min > self.window_s_max:
            raise ValueError(
                f"window_s_min ({self.window_s_min}) must not exceed window_s_max ({self.window_s_max})"
            )
        for name in ("decode_share_min", "queue_short_share", "outlier_share_max"):
            if getattr(self, name) >= 1.0:
                raise ValueError(f"{name} must be below 1, got {getattr(self, name)}")
        if self.aged_share > 1.0:
            raise ValueError(f"aged_share must be at most 1, got {self.aged_share}")
        if self.cost_correction_max < 1.0:
            raise ValueError(f"cost_correction_max must be at least 1, got {self.cost_correction_max}")
        for name in ("outlier_ratio", "hang_ratio"):
            if 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be 0 or above 1, got {getattr(self, name)}")
        if math.isinf(self.tenant_burst_s):
            raise ValueError("tenant_burst_s must be finite; 0 takes all tenants for one")
        self._check_weights()

    def _check_weights(self) -> None:
        """Makes them plain pairs, however they came."""
        try:
            pairs = tuple((str(name), float(weight)) for name, weight in self.tenant_weights)
        except (TypeError, ValueError):
            given = self.tenant_weights
            raise ValueError(f"tenant_weights must be pairs of tenant and weight, got {given}") from None
        object.__setattr__(self, "tenant_weights", pairs)
        if len(dict(pairs)) < len(pairs):
            raise ValueError("tenant_weights names a tenant twice; give each one weight")
        for name, weight in pairs:
            if not (0.0 < weight < math.inf):
                raise ValueError(f"tenant_weights: the weight of {name!r} must be above 0, got {weight}")
