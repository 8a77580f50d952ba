"""Pressures as operators and metrics are told them: about as the controller sees them, which forecasts too
and knows how much of a backlog shares passes.

Of a shard that was looked at once there is none yet: rates and utilisation need two looks.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.core.pressure import PressureSettings, instance_pressure, pool_pressure
from service.core.reconcile import FleetView, InstanceLoad
from service.core.settings import SchedulerSettings
from service.core.types import Role


class Pressures:
    def __init__(self, scheduler: SchedulerSettings, knobs: PressureSettings | None = None) -> None:
        self._scheduler = scheduler
        self._knobs = knobs or PressureSettings()
        self._long_s: dict[str, float] = {}  # shard -> predicted seconds of a mean long, when last some came

    def of(self, views: Mapping[str, FleetView]) -> dict[str, float]:
        """By instance, of the shards that are known. views: by shard."""
        return {
            load.instance_id: self._of(load, shard, view)
            for shard, view in views.items()
            for load in view.instances
            if not view.first_look
        }

    def pools(self, views: Mapping[str, FleetView]) -> dict[tuple[str, Role], float]:
        """By shard and role, of the pools that have instances and are known."""
        pressures = self.of(views)
        found: dict[tuple[str, Role], list[float]] = {}
        for shard, view in views.items():
            for load in view.instances:
                if load.instance_id in pressures:
                    found.setdefault((shard, load.role), []).append(pressures[load.instance_id])
        return {pool: pool_pressure(values) for pool, values in found.items()}

    def _of(self, load: InstanceLoad, shard: str, view: FleetView) -> float:
        """By the target of a mean request of the lane that the instance prefers."""
        settings = self._scheduler
        target_s = settings.ttft_target_short_s
        if view.long_requests_per_s > 0.0:
            self._long_s[shard] = view.long_work_s_per_s / view.long_requests_per_s
        if load.role is Role.LP:
            long_s = self._long_s.get(shard, 0.0)
            long_target_s = settings.ttft_target_long_factor * long_s + settings.ttft_target_long_offset_s
            target_s = max(target_s, long_target_s)
        return instance_pressure(load, target_s, self._knobs)
