"""Who may join the queue: bounds by count and tokens, sizes that can never fit, deadlines already past.

Refusing early is part of the contract: past these bounds waiting would only turn into time-outs. Bounds by
age and late targets are the scheduler's, since they need the passing of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Reason, Reject, Request


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What waits now, and how fast it is being served (for the retry hint)."""

    requests: int
    tokens: int
    tokens_per_s: float


class Admission:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings

    def refusal(
        self, request: Request, load: QueueLoad, instances: Iterable[InstanceSpec], now_s: float
    ) -> Reject | None:
        """The reason to refuse `request`, or None."""
        specs = list(instances)
        if request.deadline_s is not None and request.deadline_s <= now_s:
            detail = "the deadline has passed before the request was queued"
            return Reject(request.request_id, Outcome.DEADLINE_EXCEEDED, Reason.DEADLINE_PASSED, detail)
        if not specs:
            detail = "no instance is up"
            retry_s = self._settings.retry_after_s
            return Reject(request.request_id, Outcome.ENGINE_FAILED, Reason.NO_INSTANCE, detail, retry_s)
        too_large = [misfit(request, spec) for spec in specs]
        if all(too_large):
            return Reject(
                request.request_id, Outcome.REJECTED_TOO_LARGE, Reason.NEVER_FITS, str(too_large[0])
            )
        return self._over_bound(request, load)

    def _over_bound(self, request: Request, load: QueueLoad) -> Reject | None:
        bounds = self._settings
        if load.requests + 1 > bounds.queue_requests_max:
            reason = Reason.QUEUE_COUNT
            detail = f"{load.requests} requests wait; the bound is {bounds.queue_requests_max}"
        elif load.tokens + request.prompt_tokens > bounds.queue_tokens_max:
            reason = Reason.QUEUE_TOKENS
            detail = f"{load.tokens} prompt tokens wait; the bound is {bounds.queue_tokens_max}"
        else:
            return None
        retry_s = max(bounds.retry_after_s, 0.5 * load.tokens / load.tokens_per_s)
        return Reject(request.request_id, Outcome.REJECTED_CAPACITY, reason, detail, retry_s)


def misfit(request: Request, spec: InstanceSpec) -> str | None:
    """Why the request can never run on the instance; None if it can."""
    limits = spec.capabilities
    tokens = request.prompt_tokens + request.max_new_tokens
    if tokens > limits.context_tokens_max:
        return (
            f"prompt and max_tokens need {tokens} tokens of context; "
            f"{spec.instance_id} has {limits.context_tokens_max}"
        )
    blocks = -(-tokens // limits.block_tokens)
    if blocks > limits.kv_blocks_total:
        return f"the request needs {blocks} KV blocks; {spec.instance_id} has {limits.kv_blocks_total}"
    history_max = spec.profiles.history_max
    if history_max is not None and tokens - 1 > history_max:
        return (
            f"prompt and max_tokens need {tokens - 1} tokens of history; "
            f"{spec.instance_id} takes {history_max}"
        )
    return None
