"""Role moves of this worker as metrics: told of every phase and end."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from service.telemetry import names


class RoleMoveMetrics:
    """phases, ends: every value that their labels may take."""

    def __init__(self, registry: CollectorRegistry, phases: tuple[str, ...], ends: tuple[str, ...]) -> None:
        phase, time, moves = names.ROLE_MOVE_PHASE, names.ROLE_MOVE_TIME, names.ROLE_MOVES
        self._phase = Gauge(phase.name, phase.meaning, phase.labels, registry=registry)
        self._time = Counter(time.name, time.meaning, time.labels, registry=registry)
        self._moves = Counter(moves.name, moves.meaning, moves.labels, registry=registry)
        self._phases, self._ends = phases, ends
        for each in phases:
            self._phase.labels(each).set(0)
            self._time.labels(each)
        for end in ends:
            self._moves.labels(end)

    def heard(self, at: str, seconds: Mapping[str, float]) -> None:
        """at: a phase, or an end. seconds: of the phases of this move that are over."""
        for phase in self._phases:
            self._phase.labels(phase).set(float(phase == at))
        if at in self._ends:
            self._moves.labels(at).inc()
            for phase, took_s in seconds.items():
                self._time.labels(phase).inc(took_s)
