"""Who may join the queue: bounds by count and tokens, sizes that can never fit, deadlines already past.

Refusing early is part of the contract: past these bounds waiting would only turn into time-outs. Bounds by
age and late targets are the scheduler's, since they need the passing of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engines.types import DecodeMode
from service.core.settings import SchedulerSettings
from service.core.types import InstanceSpec, Outcome, Reason, Reject, Request


class QueueLoad(NamedTuple):
    """What waits now, in all and in the long lane, and how fast it is being served (for the retry hint)."""

    requests: int
    tokens: int
    tokens_per_s: float
    long_requests: int = 0
    long_tokens: int = 0


class Admission:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._settings = settings

    def refusal(
        self, request: Request, load: QueueLoad, instances: Iterable[InstanceSpec], now_s: float
    ) -> Reject | None:
        """The reason to refuse `request`, or None. Instances that are alike may be given once."""
        if request.deadline_s is not None and request.deadline_s <= now_s:
            detail = "the deadline has passed before the request was queued"
            return Reject(request.request_id, Outcome.DEADLINE_EXCEEDED, Reason.DEADLINE_PASSED, detail)
        too_large = ""
        for spec in instances:
            why = misfit(request, spec)
            if why is None:
                return self._over_bound(request, load, load.requests, load.tokens, 1.0)
            too_large = too_large or why
        if too_large:
            return Reject(request.request_id, Outcome.REJECTED_TOO_LARGE, Reason.NEVER_FITS, too_large)
        retry_s = self._settings.retry_after_s
        detail = "no instance is up"
        return Reject(request.request_id, Outcome.UNAVAILABLE, Reason.NO_INSTANCE, detail, retry_s)

    def long_refusal(self, request: Request, load: QueueLoad) -> Reject | None:
        """As `refusal`, for a request of the long lane: part of the queue is kept for short ones, so that a
        backlog of long prompts never gets a short one refused."""
        share = 1.0 - self._settings.queue_short_share
        return self._over_bound(request, load, load.long_requests, load.long_tokens, share)

    def _over_bound(
        self, request: Request, load: QueueLoad, requests: int, tokens: int, share: float
    ) -> Reject | None:
        """Whether `request` would pass `share` of a bound, where `requests` and `tokens` wait already."""
        requests_max = share * self._settings.queue_requests_max
        tokens_max = share * self._settings.queue_tokens_max
        if requests + 1 > requests_max:
            reason = Reason.QUEUE_COUNT
            detail = f"{requests} requests wait; the bound is {requests_max:.0f}"
        elif tokens + request.prompt_tokens > tokens_max:
            reason = Reason.QUEUE_TOKENS
            detail = f"{tokens} prompt tokens wait; the bound is {tokens_max:.0f}"
        else:
            return None
        retry_s = max(self._settings.retry_after_s, 0.5 * load.tokens / load.tokens_per_s)
        return Reject(request.request_id, Outcome.REJECTED_CAPACITY, reason, detail, retry_s)


def request_tokens_max(spec: InstanceSpec) -> int:
    """Largest prompt and answer together that can run on the instance: `misfit` refuses what is larger."""
    limits, history_max = spec.capabilities, spec.profiles.history_max
    tokens = min(limits.context_tokens_max, limits.kv_blocks_total * limits.block_tokens)
    return tokens if history_max is None else min(tokens, history_max + 1)


def misfit(request: Request, spec: InstanceSpec) -> str | None:
    """Why the request can never run on the instance; None if it can."""
    limits = spec.capabilities
    if request.max_new_tokens > 1 and limits.decode is DecodeMode.NONE:
        return f"{spec.instance_id} does not decode: ask it for one token, and another for the rest"
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
