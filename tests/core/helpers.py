"""Small specs and requests for tests of the core."""

from __future__ import annotations

from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.types import Capabilities, Chunking, DecodeMode, Layout, Padding
from service.core.types import InstanceSpec, Request

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
    )
    return InstanceSpec(instance_id, capabilities, profiles, cost)


def request(request_id: str, prompt: int, at_s: float, **more: object) -> Request:
    fields = {"max_new_tokens": 4, **more}
    return Request(request_id, prompt, arrival_s=at_s, **fields)  # type: ignore[arg-type]
