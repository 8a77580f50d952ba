"""The one table of policies, and how a name with knobs becomes a scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from service.core.length_aware import LengthAwarePolicy
from service.core.policy import PrefillPolicy
from service.core.pressure import PressureSettings, controller_for
from service.core.reconcile import Controller
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.policies import laps_artifact, laps_printed, laps_slides
from service.policies.chunked import ChunkedKnobs, ChunkedPolicy
from service.policies.edf_chunked import EdfChunkedPolicy, EdfKnobs
from service.policies.fcfs import FcfsPolicy
from service.policies.layered import LayeredKnobs, LayeredPolicy
from service.policies.preemptive import PreemptiveKnobs, PreemptivePolicy
from service.policies.routed import Routed
from service.policies.routers import (
    Balance,
    BalanceKnobs,
    Bucket,
    BucketKnobs,
    CacheAware,
    CacheAwareKnobs,
    Headroom,
    LoadBalancer,
    PredictedKnobs,
    PredictedLatency,
)
from service.policies.shortest_aging import ShortestAgingPolicy, ShortestKnobs
from service.policies.triton_dynamic import TritonDynamicPolicy, TritonKnobs


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """A policy and what a reader and the lab must know of it.

    make: with `SchedulerSettings`, and with the policy's own `knobs` where it has any.
    knobs: a frozen dataclass of the policy's own knobs with the published defaults; None: it has none.
    controller: who moves roles under it; None: roles stay as they are.
    search: knob -> values that the lab's search tries, the default first.
    what, source, differs: one row of the table in the docs.
    idle_s_max: how long, at its defaults, its window may leave an engine idle beside waiting requests.
    starves: at its defaults, sustained overload can keep a request waiting without bound, as in the original.
    """

    make: Callable[..., PrefillPolicy]
    what: str
    source: str
    differs: str
    knobs: type | None = None
    controller: Callable[..., Controller | None] | None = None
    search: Mapping[str, tuple[float | str, ...]] = field(default_factory=dict)
    idle_s_max: float = 0.0
    starves: bool = False


_BUDGETS = (2048, 512, 1024, 4096, 8192)
_CENTRAL = "one queue for all instances instead of one each: stronger"

POLICIES: dict[str, PolicyKind] = {
    "plaserve": PolicyKind(
        make=lambda settings, _: LengthAwarePolicy(settings),
        what="two lanes, AWD on the short one, passes built by predicted cost, long chunks between",
        source="this project; LAPS (arXiv 2601.11589) is where it starts",
        differs="",
        knobs=PressureSettings,
        controller=lambda settings, knobs: controller_for(settings.mode, settings, knobs),
        search={"long_chunk_s_max": (0.15, 0.05, 0.3)},
        idle_s_max=0.02,
    ),
    "fcfs": PolicyKind(
        make=FcfsPolicy,
        what="arrival order, passes filled to a token budget, the one that does not fit is cut",
        source="SGLang: fcfs order, --chunked-prefill-size",
        differs="one queue for all instances instead of one each behind a round robin: stronger",
        search={"budget_tokens": _BUDGETS},
    ),
    "chunked": PolicyKind(
        make=ChunkedPolicy,
        what="prompts in parts first, then arrival order, to a token budget; a cap on one prompt's share",
        source="vLLM V1 scheduler: max_num_batched_tokens, long_prefill_token_threshold; the caps of V0",
        differs=f"{_CENTRAL}; KV for the whole request is promised at its start, so nobody is preempted",
        knobs=ChunkedKnobs,
        search={"budget_tokens": _BUDGETS, "long_prefill_token_threshold": (0, 512, 256, 1024)},
    ),
    "router_lb": PolicyKind(
        make=lambda settings, knobs: Routed(LoadBalancer(knobs), lambda: FcfsPolicy(settings)),
        what="every arrival to the least loaded instance, `fcfs` there",
        source="SGLang router and SMG: power_of_two, round_robin, shortest queue; engines as `fcfs`",
        differs="loads are exact and cover all instances",
        knobs=BalanceKnobs,
        search={
            "budget_tokens": _BUDGETS,
            "balance": (
                Balance.LEAST_REQUESTS,
                Balance.LEAST_TOKENS,
                Balance.TWO_CHOICES,
                Balance.ROUND_ROBIN,
            ),
        },
    ),
    "cache_aware": PolicyKind(
        make=lambda settings, knobs: Routed(CacheAware(knobs), lambda: FcfsPolicy(settings)),
        what="longest match in the router's own prefix tree, unless loads are apart; `fcfs` there",
        source="SMG docs/configuration/routing.md and cache_aware.rs (SGLang router)",
        differs="the tree matches whole KV blocks; of equal matches the least loaded, theirs takes any",
        knobs=CacheAwareKnobs,
        search={"budget_tokens": _BUDGETS, "balance_abs_threshold": (64, 4, 16, 1)},
    ),
    "bucket": PolicyKind(
        make=lambda settings, knobs: Routed(Bucket(knobs), lambda: FcfsPolicy(settings)),
        what="an instance per range of prompt lengths, ranges moved to equal shares; `fcfs` there",
        source="SMG bucket.rs, sgl-project/sglang#11719",
        differs="lengths in tokens, 4 characters each; boundaries move at an arrival past the interval",
        knobs=BucketKnobs,
        search={"budget_tokens": _BUDGETS, "balance_rel_threshold": (1.5, 3.0, 1.0001, 10.0)},
    ),
    "predicted_latency": PolicyKind(
        make=lambda settings, knobs: Routed(PredictedLatency(settings, knobs), lambda: FcfsPolicy(settings)),
        what="the instance whose predicted TTFT meets the target, cached prompts counted; `fcfs` there",
        source="llm-d-router: latency-scorer, slo-headroom-tier-filter, prefix-cache-affinity-filter",
        differs="the cost model of the engine predicts, not a model learned on the way; so no exploration. "
        "Caches are known exactly. Time per output token is not weighed",
        knobs=PredictedKnobs,
        search={
            "budget_tokens": _BUDGETS,
            "headroom": (Headroom.LEAST, Headroom.MOST),
            "max_ttft_penalty_s": (5.0, 0.2, 1.0),
        },
    ),
    "triton_dynamic": PolicyKind(
        make=TritonDynamicPolicy,
        what="whole requests in arrival order, preferred batch sizes, a bounded delay",
        source="Triton server: dynamic_batch_scheduler.cc, docs/user_guide/batcher.md",
        differs="requests of any lengths share a batch if a profile takes it; a prompt longer than any "
        "profile runs in parts, alone",
        knobs=TritonKnobs,
        search={
            "max_batch_size": (0, 4, 8, 16, 2),
            "max_queue_delay_s": (0.0, 0.005, 0.001, 0.02),
            "preferred_batch_size": ("", "4+8"),
        },
    ),
    "shortest_aging": PolicyKind(
        make=ShortestAgingPolicy,
        what="lowest predicted time of prefill less weighted waiting, priced anew as the cache changes",
        source="PrefillOnly (arXiv 2505.07203), LMCache shortest prefill first",
        differs=f"{_CENTRAL}; attention is not kept whole: a prompt longer than any profile runs in parts. "
        "The default weight is ours",
        knobs=ShortestKnobs,
        search={"batch_tokens": (0, 512, 2048, 256, 1024), "ageing_weight": (0.05, 0.2, 0.01, 1.0)},
    ),
    "edf_chunked": PolicyKind(
        make=EdfChunkedPolicy,
        what="earliest deadline first in chunks; those that can't make it go last; chunks by decode's slack",
        source="QoServe / Niyama (arXiv 2503.22562) and its Sarathi scheduler",
        differs=f"{_CENTRAL}; the slack is that of the ITL bound",
        knobs=EdfKnobs,
        search={"budget_tokens": _BUDGETS, "length_weight": (0.0, 1.0, 4.0, 0.25)},
        starves=True,
    ),
    "preemptive": PolicyKind(
        make=PreemptivePolicy,
        what="earliest deadline among those with slack, suspends a pass between layers for one more urgent",
        source="FlowPrefill (arXiv 2602.16603), HSIEHCHIACHI/FlowPrefill: vllm/v1/engine/core.py",
        differs=f"{_CENTRAL}; stops between blocks of layers, not between operators; engines that can't stop "
        "get chunks; the load in its patience is that of the newcomers, by lane",
        knobs=PreemptiveKnobs,
        search={"batch_tokens": (2048, 512, 1024, 4096), "whole_tokens": (512, 256, 1024, 2048)},
    ),
    "layered": PolicyKind(
        make=LayeredPolicy,
        what="batches in arrival order go through the model a group of layers at a time, the next one waits",
        source="layered prefill (arXiv 2510.08055), scale-snu/layered-prefill: nanovllm/engine/scheduler.py",
        differs=f"{_CENTRAL}; decode steps by the common rule instead of one with each group; engines that "
        "can't stop between layers get chunks",
        knobs=LayeredKnobs,
        search={"batch_tokens": (8192, 2048, 1024, 4096), "stage_tokens": (512, 256, 1024)},
    ),
    "laps_artifact": PolicyKind(
        make=laps_artifact.make_policy,
        what="two queues by raw length, short strictly first behind a fixed window, two pools of servers",
        source="Jianshu-She/LAPS: docs/laps_scheduler.md, disaggregation/prefill.py, mini_lb.py",
        differs="within a pool the least loaded server, theirs takes any; a batch of shorts goes before the "
        "rest of a cut prompt, theirs goes after it",
        knobs=laps_artifact.ArtifactKnobs,
        controller=laps_artifact.make_controller,
        search={
            "chunk_tokens": (8192, 1024, 2048, 512, 4096),
            "window_s": (0.005, 0.0, 0.01),
            "short_batches_max": (0, 4),
        },
        idle_s_max=0.005,
        starves=True,
    ),
    "laps_printed": PolicyKind(
        make=laps_printed.make_policy,
        what="AWD and pressure control as printed; one class a pass, one long prompt at a time",
        source="LAPS (arXiv 2601.11589), algorithms 1 and 2",
        differs=f"{_CENTRAL}; unpublished values are ours; a class without instances is served by all",
        knobs=laps_printed.PrintedKnobs,
        controller=laps_printed.make_controller,
        search={"chunk_tokens": (2048, 1024, 512, 4096), "window_s_max": (0.008, 0.002, 0.02)},
        idle_s_max=0.008,
    ),
    "laps_slides": PolicyKind(
        make=laps_slides.make_policy,
        what="as `laps_printed`, but W and D follow the arrival rate, and pressures are subtracted",
        source="LAPS slides (MLSys 2026, 3787)",
        differs=f"{_CENTRAL}; unpublished values and the formula of D are ours; a batch takes all who wait",
        knobs=laps_slides.SlidesKnobs,
        controller=laps_slides.make_controller,
        search={
            "chunk_tokens": (2048, 1024, 512, 4096),
            "window_s_max": (0.008, 0.002, 0.02),
            "latency_first": (1, 0),
        },
        idle_s_max=0.008,
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


Parse = Callable[[str, SchedulerSettings], tuple[PolicyKind, SchedulerSettings, Any]]


def make_scheduler(spec: str, settings: SchedulerSettings, parse: Parse = parse) -> PrefillScheduler:
    """A scheduler with the policy that `spec` names (see `parse`)."""
    kind, settings, own = parse(spec, settings)
    policy = kind.make(settings, own) if kind.knobs else kind.make(settings)
    return PrefillScheduler(settings, policy)


def make_controller(spec: str, settings: SchedulerSettings, parse: Parse = parse) -> Controller | None:
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
