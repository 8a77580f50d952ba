"""An answer goes on elsewhere after its worker gave up its engine (`role_move`).

The rest of it is asked for as a new request: its prompt is that of the first with what was answered so far,
so another worker computes the KV anew (what its cache has of it aside) and goes on with the next token. The
client sees one answer, without a gap in it or a token twice, after a pause.

A greedy answer is the same as it would have been, as far as engines agree. A sampled one goes on with another
seed, since the random numbers of the first are used up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines.blocks import chain_hashes
from engines.types import EngineRequest
from protos.plaserve.v1 import scheduler_pb2 as pb
from service.core.types import Outcome, Reason, Request
from service.fleet.remote_worker import MOVED
from service.runtime.contract import RequestRecord

TIMES_MAX = 3  # of one answer
_SEEDS = 2**63


def goes_on(ended: pb.RequestEnded, record: RequestRecord, times: int, base: int) -> bool:
    """Whether an answer that a scheduler ended goes on. times: how often it has; base: tokens before this
    part of it."""
    lost = (ended.outcome, ended.reason) == (Outcome.UNAVAILABLE.value, Reason.INSTANCE_LOST.value)
    moved = lost and ended.detail.startswith(MOVED)
    limit = record.request.max_new_tokens
    some = 0 < base + ended.output_token_count < limit
    left = record.output_tokens < limit  # it may have more than was said
    return moved and some and left and times < TIMES_MAX


def rest_of(
    request: Request, engine_request: EngineRequest, tokens: Sequence[int], block_tokens: int, now_s: float
) -> tuple[Request, EngineRequest]:
    """What is left to ask for, after `tokens` of the answer. Its age begins anew: it is not late."""
    ids = (*engine_request.token_ids, *tokens)
    left = request.max_new_tokens - len(tokens)
    sampling = engine_request.sampling
    if sampling.temperature:
        sampling = replace(sampling, seed=(sampling.seed + len(tokens)) % _SEEDS)
    hashes = chain_hashes(ids, block_tokens) if request.block_hashes else ()
    return (
        replace(
            request, prompt_tokens=len(ids), max_new_tokens=left, arrival_s=now_s, block_hashes=tuple(hashes)
        ),
        replace(engine_request, token_ids=ids, max_new_tokens=left, sampling=sampling),
    )


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a record says of its prompt after the first part of an answer, to be kept over the other parts."""

    new_tokens: int
    history_tokens: int
    first_pass_s: float
    first_pass_start_s: float | None
    prefill_end_s: float | None
    reason: Reason | None
    pass_ids: tuple[int, ...]

    @classmethod
    def of(cls, record: RequestRecord) -> Prefilled:
        return cls(
            record.new_tokens,
            record.history_tokens,
            record.first_pass_s,
            record.first_pass_start_s,
            record.prefill_end_s,
            record.first_dispatch_reason,
            tuple(record.pass_ids),
        )

    def put(self, record: RequestRecord) -> None:
        record.new_tokens, record.history_tokens = self.new_tokens, self.history_tokens
        record.first_pass_s, record.first_pass_start_s = self.first_pass_s, self.first_pass_start_s
        record.prefill_end_s, record.first_dispatch_reason = self.prefill_end_s, self.reason
        record.pass_ids = [*self.pass_ids, *record.pass_ids]
