"""The policies that the lab runs: those of the registry, and `plaserve` without one of its mechanisms.

`plaserve-window:long_chunk_s_max=0.3` is `plaserve:long_chunk_s_max=0.3` without the ablation `window`
(`ablations`). Everything else is as the registry says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from service.core.settings import SchedulerSettings
from service.policies import registry
from service.policies.registry import POLICIES, PolicyKind
from service.sim.ablations import ABLATIONS

OURS = "plaserve"
MINUS = f"{OURS}-"


def is_ours(policy: str) -> bool:
    """`plaserve` with whatever knobs, whole or without a mechanism: no peer."""
    name = policy.partition(":")[0]
    return name == OURS or name.startswith(MINUS)


def is_known(policy: str) -> bool:
    name = policy.partition(":")[0]
    return name in POLICIES or (name.startswith(MINUS) and name.removeprefix(MINUS) in ABLATIONS)


def parse(spec: str, settings: SchedulerSettings) -> tuple[PolicyKind, SchedulerSettings, Any]:
    """As `registry.parse`; the knobs of an ablation go over those given. Raises ValueError as that does."""
    name, _, knobs = spec.partition(":")
    if not name.startswith(MINUS):
        return registry.parse(spec, settings)
    off = name.removeprefix(MINUS)
    if off not in ABLATIONS:
        raise ValueError(f"unknown policy {name!r}; {OURS} is tried without {', '.join(ABLATIONS)}")
    ablation = ABLATIONS[off]
    given = [knobs] if knobs else []
    pairs = ",".join([*given, *(f"{key}={value}" for key, value in ablation.knobs.items())])
    kind, settings, own = registry.parse(f"{OURS}:{pairs}" if pairs else OURS, settings)
    return replace(kind, make=lambda final, _: ablation.make(final), search={}), settings, own


make_scheduler = partial(registry.make_scheduler, parse=parse)
make_controller = partial(registry.make_controller, parse=parse)
