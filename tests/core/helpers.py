"""Small specs and requests for tests of the core."""

from __future__ import annotations

from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.simulated import SimulatedModel
from engines.types import Capabilities, Chunking, DecodeMode, Layout, Padding, PassKind
from service.core.policy import Instance
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Dispatch, InstanceSpec, Lane, Request
from service.policies import make_scheduler
from service.sim.kernel import SimResult, run

# About a 32B model on an H200: 20 ms to read the weights, 10k tokens/s saturated.
GPU_COST = CostModel(0.0, 0.0205, 1.5e-9, 9.7e-5, 0.0, 1.5e-7, origin="rounded for tests")
# About the embedded engine: a short flat part, then 0.5 ms a token.
CPU_COST = CostModel(0.004, 0.004, 1e-8, 5e-4, 0.0, 2e-5, origin="rounded for tests")

PACKED = Profiles(Layout.PACKED, Padding.NOTHING, (64, 128, 256, 512, 1024, 2048))
CLASSED = Profiles(
    Layout.PACKED,
    Padding.CLASS,
    (4, 16, 32, 64, 128, 256, 512, 1024, 2048),
    (0, 512, 2048, 4096),
    block_mask=True,
)
RECTANGULAR = Profiles(
    Layout.RECTANGULAR,
    Padding.CELL,
    (4096,),
    cells=tuple((length, b) for length in (8, 16, 32, 64, 128, 256, 512) for b in (1, 2, 4, 8)),
)


def spec(
    instance_id: str = "i0",
    *,
    cost: CostModel = GPU_COST,
    profiles: Profiles = PACKED,
    blocks: int = 512,
    context: int = 4096,
    requests_max: int = 16,
    layer_blocks: int = 1,
) -> InstanceSpec:
    capabilities = Capabilities(
        layout=profiles.layout,
        padding=profiles.padding,
        chunking=Chunking.EXTERNAL,
        merges_lanes=False,
        decode=DecodeMode.ALTERNATES,
        requests_max=requests_max,
        context_tokens_max=context,
        block_tokens=32,
        kv_blocks_total=blocks,
        layer_blocks_max=layer_blocks,
    )
    return InstanceSpec(instance_id, capabilities, profiles, cost)


def request(request_id: str, prompt: int, at_s: float, **more: object) -> Request:
    fields = {"max_new_tokens": 4, **more}
    return Request(request_id, prompt, arrival_s=at_s, **fields)  # type: ignore[arg-type]


def instance(knobs: SchedulerSettings | None = None, **of_spec: object) -> Instance:
    return Instance(spec(**of_spec), knobs or SchedulerSettings())  # type: ignore[arg-type]


def tracked(
    request_id: str,
    prompt: int = 100,
    *,
    seq: int = 0,
    lane: Lane = Lane.SHORT,
    at_s: float = 0.0,
    target_s: float = 1e9,
    service_s: float = 0.0,
    **of_request: object,
) -> Tracked:
    """The live record of a request as `classify` would make it; `target_s` is absolute."""
    asked = request(request_id, prompt, at_s, **of_request)
    return Tracked(asked, seq, lane, target_s, service_s, waiting_since_s=at_s)


def simulate(
    arrivals: list[Request],
    *,
    policy: str = "plaserve",
    on: InstanceSpec | None = None,
    knobs: SchedulerSettings | None = None,
    until_s: float = 1e6,
) -> tuple[SimResult, PrefillScheduler]:
    """Requests arrive at their `arrival_s` at one simulated instance."""
    target = on or spec()
    scheduler = make_scheduler(policy, knobs or SchedulerSettings())
    model = SimulatedModel(target.capabilities, target.profiles, target.cost)
    ordered = sorted(arrivals, key=lambda r: r.arrival_s)
    result = run(scheduler, [(target, model)], [(r.arrival_s, r) for r in ordered], until_s=until_s)
    model.check()
    return result, scheduler


def dispatches(result: SimResult, kind: PassKind = PassKind.PREFILL) -> list[tuple[float, Dispatch]]:
    """(time, command) of all passes of one kind, in order."""
    found = ((now_s, entry) for now_s, entry in result.log if isinstance(entry, Dispatch))
    return [(now_s, command) for now_s, command in found if command.pass_.kind is kind]


def ids_of(command: Dispatch) -> list[str]:
    return [item.request_id for item in command.pass_.items]
