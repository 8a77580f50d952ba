"""When an instance is given up: silence, refusals, and a pass that does not end.

A worker that answers is not yet one that works: the usual end of a GPU process is a forward pass that never
returns while everything around it answers. So it says how long its pass runs, and the core's rule
(`service/core/progress.py`) says what that means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from service.core.progress import HangRule


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Seconds, unless they are counts.

    heartbeat_s: how often a worker says how far it is. silence_s: without a word for so long a stream counts
    as broken. grace_s: after a break the worker may come back for so long with all it had. refusals_max: so
    many attempts in a row answered by "nobody listens on that port" end the grace: the process is gone.
    backoff_s_min, _max: between attempts, doubling, each times a random factor from 0.5 to 1.
    orphan_s: a worker without a scheduler for so long aborts what it holds; above grace_s, so that what a
    scheduler still hopes for is there. hang: when a pass that runs is not coming back.
    """

    heartbeat_s: float = 0.5
    silence_s: float = 2.0
    grace_s: float = 3.0
    refusals_max: int = 2
    backoff_s_min: float = 0.05
    backoff_s_max: float = 1.0
    orphan_s: float = 10.0
    settle_s: float = 30.0  # for a takeover: the pass of the scheduler before runs to its end
    hang: HangRule = field(default_factory=HangRule)

    def __post_init__(self) -> None:
        for name, low, high in (
            ("silence_s", "heartbeat_s", "silence_s"),
            ("orphan_s", "grace_s", "orphan_s"),
            ("backoff_s_max", "backoff_s_min", "backoff_s_max"),
        ):
            if not 0.0 < getattr(self, low) <= getattr(self, high):
                raise ValueError(f"{name}: must be at least {low}, and both above 0")
