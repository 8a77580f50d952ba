"""The one table of policies, and how a name with knobs becomes a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from service.core.length_aware import LengthAwarePolicy
from service.core.policy import PrefillPolicy
from service.core.reconcile import Controller
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.policies.fcfs import FcfsPolicy


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy and what a reader and the lab must know of it.

    make: with `SchedulerSettings`, and with the policy's own `knobs` where it has any.
    knobs: a frozen dataclass of the policy's own knobs with the published defaults; None: it has none.
    controller: who moves roles under it; None: roles stay as they are.
    search: knob -> values that the lab's search tries, the default first.
    what, source, differs: one row of the table in the docs.
    starves: at its defaults, sustained overload can keep a request waiting without bound, as in the original.
    """

    make: Callable[..., PrefillPolicy]
    what: str
    source: str
    differs: str
    knobs: type | None = None
    controller: Callable[..., Controller] | None = None
    search: Mapping[str, tuple[float | str, ...]] = field(default_factory=dict)
    starves: bool = False


POLICIES: dict[str, PolicyKind] = {
    "plaserve": PolicyKind(
        make=LengthAwarePolicy,
        what="two lanes, AWD on the short one, passes built by predicted cost, long chunks between",
        source="this project; LAPS (arXiv 2601.11589) is where it starts",
        differs="",
        search={"long_chunk_s_max": (0.15, 0.05, 0.3)},
    ),
    "fcfs": PolicyKind(
        make=FcfsPolicy,
        what="arrival order, passes filled to a token budget, the one that does not fit is cut",
        source="SGLang: fcfs order, --chunked-prefill-size",
        differs="one queue for all instances instead of one each behind a round robin: stronger",
        search={"budget_tokens": (2048, 512, 1024, 4096, 8192)},
    ),
}


def parse(spec: str, settings: SchedulerSettings) -> tuple[PolicyKind, SchedulerSettings, Any]:
    """`name:knob=value,...` -> the kind, the settings with their knobs replaced, the policy's own knobs.

    Raises ValueError naming the policies or knobs that exist, or the value that is not a number.
    """
    name, _, tail = spec.partition(":")
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}")
    kind = POLICIES[name]
    of_settings = {f.name: f for f in fields(SchedulerSettings)}
    of_policy = {f.name: f for f in fields(kind.knobs)} if kind.knobs else {}
    settings_changes: dict[str, Any] = {}
    knob_changes: dict[str, Any] = {}
    for pair in filter(None, tail.split(",")):
        key, _, text = pair.partition("=")
        if key in of_policy:
            knob_changes[key] = _value(name, key, text, of_policy[key].default)
        elif key in of_settings:
            settings_changes[key] = _value(name, key, text, of_settings[key].default)
        else:
            known = ", ".join([*of_policy, *of_settings])
            raise ValueError(f"policy {name}: unknown knob {key!r}; it has {known}")
    own = kind.knobs(**knob_changes) if kind.knobs else None
    return kind, replace(settings, **settings_changes), own


def make_scheduler(spec: str, settings: SchedulerSettings) -> PrefillScheduler:
    """A scheduler with the policy that `spec` names (see `parse`)."""
    kind, settings, own = parse(spec, settings)
    policy = kind.make(settings, own) if kind.knobs else kind.make(settings)
    return PrefillScheduler(settings, policy)


def make_controller(spec: str, settings: SchedulerSettings) -> Controller | None:
    """The controller that belongs to the policy, a fresh one; None where roles stay as they are."""
    kind, settings, own = parse(spec, settings)
    if kind.controller is None:
        return None
    return kind.controller(settings, own) if kind.knobs else kind.controller(settings)


def _value(policy: str, key: str, text: str, default: Any) -> Any:
    """`text` as the type of the knob's default."""
    try:
        return type(default)(float(text)) if isinstance(default, int | float) else type(default)(text)
    except ValueError as error:
        raise ValueError(f"policy {policy}: {key}={text!r} is no {type(default).__name__}") from error
