"""All exhibits, in the order of the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from service.sim.exhibits.ablation import ablation
from service.sim.exhibits.boundary import boundary
from service.sim.exhibits.exhibit import Exhibit
from service.sim.exhibits.interference import interference
from service.sim.exhibits.kv_burst import kv_burst
from service.sim.exhibits.kv_pacing import kv_pacing
from service.sim.exhibits.pools import moving_pools, skewed_burst
from service.sim.exhibits.queueing import queueing
from service.sim.exhibits.violations import violations
from service.sim.exhibits.window import window

EXHIBITS: Mapping[str, Callable[[], Exhibit]] = {
    "interference": interference,
    "boundary": boundary,
    "window": window,
    "ablation": ablation,
    "violations": violations,
    "pools_moving": moving_pools,
    "skewed_burst": skewed_burst,
    "queueing": queueing,
    "kv_burst": kv_burst,
    "kv_pacing": kv_pacing,
}
