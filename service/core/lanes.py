"""Lane and target of a new request.

The lane is a property of the pair (request, instance): short when L, the tokens to compute there, is at most
max(L_m(H), lane floor) and fits one pass. At admission the best instance is the one with most of the prompt
cached; the queue of that lane is the request's from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from service.core.policy import Instance
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import Lane, Request


def classify(
    request: Request, instances: Sequence[Instance], settings: SchedulerSettings, seq: int
) -> Tracked:
    """The live record of `request`. Without a target of its own it gets that of its lane:
    `ttft_target_short_s`, or for the long lane max(that, factor x predicted time alone + offset)."""
    best, history = _most_cached(request, instances)
    new_tokens = request.prompt_tokens - history
    short = new_tokens <= best.short_tokens_max(history)
    lane = Lane.SHORT if short else Lane.LONG
    service_s = best.pricer.request_s(new_tokens, history)
    target_s = request.ttft_target_s
    if target_s is None:
        target_s = settings.ttft_target_short_s
        if lane is Lane.LONG:
            own_s = settings.ttft_target_long_factor * service_s + settings.ttft_target_long_offset_s
            target_s = max(target_s, own_s)
    return Tracked(
        request=request,
        seq=seq,
        lane=lane,
        target_s=math.inf if request.deadline_free else request.arrival_s + target_s,
        service_s=service_s,
        waiting_since_s=request.arrival_s,
    )


def _most_cached(request: Request, instances: Sequence[Instance]) -> tuple[Instance, int]:
    """The instance with most of the prompt cached, and how many tokens; the first of equals."""
    if not request.block_hashes:
        return instances[0], 0
    cached = [i.prefix.cached_tokens(request.block_hashes, request.prompt_tokens) for i in instances]
    most = max(cached)
    return instances[cached.index(most)], most
