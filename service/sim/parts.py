"""The parts of a workload: a name becomes a length set or a trace, and that becomes content.

A name is looked up among the length sets, then the known traces, and is the path of a trace file otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from zlib import crc32

import numpy as np

from service.sim.arrivals import Floats
from service.sim.contents import Content, LengthContent, TraceContent
from service.sim.conversations import (
    ConversationContent,
    DrawnConversations,
    RecordedConversations,
    TurnSettings,
    sessions_of,
)
from service.sim.lengths import LENGTH_SETS, LengthSet
from service.sim.traces import KNOWN_TRACES, read_trace
from service.sim.workload import Trace
from service.sim.workload_spec import SESSION_SETS, Arrivals, Start, WorkloadSpec


class Streams:
    """Random streams by name, all from one seed."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self._seed = seed

    def __call__(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, crc32(name.encode())])


@dataclass(frozen=True, slots=True)
class Part:
    """One of a trace (its usable rows) and length sets (of the first and of later turns).

    turns_mean: turns a session, 1 without sessions. left_out_ratio: rows that were too long.
    """

    name: str
    trace: Trace | None = None
    lengths: tuple[LengthSet, LengthSet] | None = None
    turns_mean: float = 1.0
    left_out_ratio: float = 0.0

    @property
    def times_s(self) -> Floats:
        """When the rows arrived. Raises ValueError where that was not recorded."""
        rows = () if self.trace is None else self.trace.rows
        if len(rows) < 2 or rows[-1].arrival_s <= rows[0].arrival_s:
            raise ValueError(f"parts: {self.name} has no recorded arrival times; use poisson or gamma")
        return np.array([row.arrival_s for row in rows])

    @property
    def rate_per_s(self) -> float:
        """The mean rate at which it was recorded."""
        times_s = self.times_s
        return float((len(times_s) - 1) / (times_s[-1] - times_s[0]))

    def block_tokens(self, spec: WorkloadSpec) -> int:
        """What its hashes stand for; 0: it has none."""
        own = 0 if self.trace is None else self.trace.block_tokens
        return own or (spec.block_tokens if spec.arrivals is Arrivals.SESSIONS else 0)

    def start(self, spec: WorkloadSpec, rng: np.random.Generator) -> int:
        """The row (or the session, counted round) at which it is entered."""
        if self.trace is None or spec.start is Start.FIRST:
            return 0
        return int(rng.integers(len(self.trace.rows)))

    def content(self, spec: WorkloadSpec, rng: np.random.Generator, start: int = 0) -> Content:
        output = spec.output_tokens
        if self.trace is not None:
            rows, size = self.trace.rows, self.trace.block_tokens
            return TraceContent(rows, size, rng, start=start, output_tokens=output)
        assert self.lengths is not None
        return LengthContent(self.lengths[0], rng, spec.prompt_tokens_max, output or 1)

    def conversations(
        self, spec: WorkloadSpec, rng: np.random.Generator, start: int = 0
    ) -> ConversationContent:
        settings = TurnSettings(
            turns_mean=spec.turns_mean,
            think_s_mean=spec.think_s_mean,
            think_s_max=spec.think_s_max,
            block_tokens=spec.block_tokens,
            prompt_tokens_max=spec.prompt_tokens_max,
            output_tokens=spec.output_tokens,
        )
        if self.trace is not None:
            return RecordedConversations(self.trace.rows, self.trace.block_tokens, settings, rng, start)
        assert self.lengths is not None
        return DrawnConversations(*self.lengths, settings, rng)


def load_parts(spec: WorkloadSpec, trace: Trace | None = None) -> tuple[Part, ...]:
    """The parts of `spec`; `trace` takes the place of the one of its name.

    Raises ValueError, MissingTrace.
    """
    if trace is not None and trace.name not in {name for name, _ in spec.parts}:
        raise ValueError(f"trace: {trace.name} is none of the parts {[name for name, _ in spec.parts]}")
    return tuple(_load(spec, name, trace) for name, _ in spec.parts)


def _load(spec: WorkloadSpec, name: str, given: Trace | None) -> Part:
    if given is not None and given.name == name:
        return _trace_part(spec, name, given)
    if name in LENGTH_SETS or name in SESSION_SETS:
        return _length_part(spec, name)
    if name in KNOWN_TRACES or Path(name).is_file():
        return _trace_part(spec, name, _read(name))
    known = ", ".join([*LENGTH_SETS, *SESSION_SETS, *KNOWN_TRACES])
    raise ValueError(f"parts: {name!r} is neither a trace file nor one of {known}")


@lru_cache(maxsize=4)
def _read(name: str) -> Trace:
    return read_trace(name)


def _length_part(spec: WorkloadSpec, name: str) -> Part:
    sessions = spec.arrivals is Arrivals.SESSIONS
    if spec.arrivals is Arrivals.RECORDED:
        raise ValueError(f"arrivals recorded: {name} is a length set; use poisson or gamma with a rate")
    if spec.output_tokens is None:
        raise ValueError(f"output_tokens: {name} has no answer lengths; give a number")
    if name in SESSION_SETS and not sessions:
        raise ValueError(f"parts: {name} is made of sessions; use arrivals sessions")
    first, later = SESSION_SETS.get(name, (name, name))
    turns_mean = spec.turns_mean if sessions else 1.0
    return Part(name, lengths=(LENGTH_SETS[first], LENGTH_SETS[later]), turns_mean=turns_mean)


def _trace_part(spec: WorkloadSpec, name: str, trace: Trace) -> Part:
    rows = trace.rows
    if spec.arrivals is Arrivals.SESSIONS:
        sessions = sessions_of(rows, spec.prompt_tokens_max)
        kept = [row for turns in sessions for row in turns]
        turns_mean = len(kept) / len(sessions)
    else:
        if any(row.session for row in rows) and rows[-1].arrival_s == 0.0:
            raise ValueError(f"parts: {name} is made of sessions; use arrivals sessions")
        kept, turns_mean = [row for row in rows if row.prompt_tokens <= spec.prompt_tokens_max], 1.0
    if not kept:
        raise ValueError(f"prompt_tokens_max: no row of {name} has at most {spec.prompt_tokens_max} tokens")
    left_out_ratio = 1.0 - len(kept) / len(rows)
    return Part(name, replace(trace, rows=tuple(kept)), None, turns_mean, left_out_ratio)
