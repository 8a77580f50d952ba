"""What front end and scheduler say of requests, between protos and the types of runtime and core.

Times cross as durations: an arrival as the age of the request, a deadline as what is left of it. Each side
puts them on its own clock.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from google.protobuf.duration_pb2 import Duration
from pydantic import TypeAdapter, ValidationError

from engines.types import Capabilities, EngineRequest, FinishReason, Sampling
from protos.plaserve.v1 import inference_pb2, scheduler_pb2
from service.core.types import Lane, Outcome, Reason, Request
from service.runtime.contract import RequestRecord

_LANES = {Lane.SHORT: inference_pb2.LANE_SHORT, Lane.LONG: inference_pb2.LANE_LONG}
_LANE_OF = {number: lane for lane, number in _LANES.items()}
_FINISHES = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_FINISH_OF = {number: finish for finish, number in _FINISHES.items()}


class BadMessage(ValueError):  # noqa: N818 - what happened
    """The other side sent what this one can't understand; the message names the field."""


def submit_of(
    wire_id: str, request: Request, engine_request: EngineRequest, now_s: float
) -> scheduler_pb2.SubmitRequest:
    """`wire_id`: what the request is called between the two."""
    sampling = engine_request.sampling
    made = scheduler_pb2.SubmitRequest(
        request_id=wire_id,
        token_ids=engine_request.token_ids,
        block_hashes=request.block_hashes,
        max_new_tokens=request.max_new_tokens,
        sampling=inference_pb2.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
        ),
        retain=engine_request.retain,
        age=_duration(max(0.0, now_s - request.arrival_s)),
        deadline_free=request.deadline_free,
        priority=request.priority,
        tenant=request.tenant,
        session=request.session,
    )
    if request.ttft_target_s is not None:
        made.ttft_target.CopyFrom(_duration(request.ttft_target_s))
    if request.deadline_s is not None:
        made.time_left.CopyFrom(_duration(max(0.0, request.deadline_s - now_s)))
    return made


def requests_of(submit: scheduler_pb2.SubmitRequest, now_s: float) -> tuple[Request, EngineRequest]:
    """Raises BadMessage."""
    if not submit.request_id:
        raise BadMessage("request_id: is empty")
    if not submit.token_ids:
        raise BadMessage(f"token_ids: {submit.request_id} has none")
    if submit.max_new_tokens < 1:
        raise BadMessage(f"max_new_tokens: {submit.request_id} asks for none")
    sampling = submit.sampling
    engine_request = EngineRequest(
        submit.request_id,
        tuple(submit.token_ids),
        submit.max_new_tokens,
        Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            top_k=sampling.top_k,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
        ),
        retain=submit.retain,
    )
    request = Request(
        request_id=submit.request_id,
        prompt_tokens=len(submit.token_ids),
        max_new_tokens=submit.max_new_tokens,
        arrival_s=now_s - _seconds(submit.age),
        block_hashes=tuple(submit.block_hashes),
        ttft_target_s=_seconds(submit.ttft_target) if submit.HasField("ttft_target") else None,
        deadline_s=now_s + _seconds(submit.time_left) if submit.HasField("time_left") else None,
        deadline_free=submit.deadline_free,
        priority=submit.priority,
        tenant=submit.tenant,
        session=submit.session,
    )
    return request, engine_request


def accepted_of(record: RequestRecord) -> scheduler_pb2.RequestAccepted:
    made = scheduler_pb2.RequestAccepted(request_id=record.request.request_id)
    if record.lane is not None:
        made.lane = _LANES[record.lane]
    if record.ttft_target_s is not None:
        made.ttft_target.CopyFrom(_duration(record.ttft_target_s))
    return made


def note_accepted(record: RequestRecord, accepted: scheduler_pb2.RequestAccepted) -> None:
    record.lane = _LANE_OF.get(accepted.lane)
    record.ttft_target_s = _seconds(accepted.ttft_target) if accepted.HasField("ttft_target") else None


def ended_of(record: RequestRecord) -> scheduler_pb2.RequestEnded:
    assert record.outcome is not None
    made = scheduler_pb2.RequestEnded(
        request_id=record.request.request_id,
        outcome=record.outcome.value,
        reason=record.reason.value if record.reason is not None else "",
        detail=record.detail,
        finish_reason=_FINISHES[record.finish] if record.finish is not None else None,
        output_token_count=record.output_tokens,
        new_token_count=record.new_tokens,
        history_token_count=record.history_tokens,
        pass_ids=record.pass_ids,
        dispatch_reason=record.first_dispatch_reason.value if record.first_dispatch_reason else "",
        first_pass=_duration(record.first_pass_s),
    )
    if record.retry_after_s is not None:
        made.retry_after.CopyFrom(_duration(record.retry_after_s))
    arrival_s = record.request.arrival_s
    if record.first_pass_start_s is not None:
        made.first_pass_start.CopyFrom(_duration(record.first_pass_start_s - arrival_s))
    if record.prefill_end_s is not None:
        made.prefill_end.CopyFrom(_duration(record.prefill_end_s - arrival_s))
    return made


def note_ended(record: RequestRecord, ended: scheduler_pb2.RequestEnded) -> Outcome:
    """Put what the scheduler measured on this side's clock; returns the outcome. Raises BadMessage."""
    arrival_s = record.request.arrival_s
    try:
        outcome = Outcome(ended.outcome)
        record.reason = Reason(ended.reason) if ended.reason else None
        record.first_dispatch_reason = Reason(ended.dispatch_reason) if ended.dispatch_reason else None
    except ValueError as error:
        raise BadMessage(
            f"outcome, reason or dispatch_reason: {error}; are both sides of one release?"
        ) from None
    record.detail = ended.detail
    record.finish = _FINISH_OF.get(ended.finish_reason)
    record.new_tokens, record.history_tokens = ended.new_token_count, ended.history_token_count
    record.pass_ids = list(ended.pass_ids)
    record.first_pass_s = _seconds(ended.first_pass)
    if ended.HasField("retry_after"):
        record.retry_after_s = _seconds(ended.retry_after)
    if ended.HasField("first_pass_start"):
        record.first_pass_start_s = arrival_s + _seconds(ended.first_pass_start)
    if ended.HasField("prefill_end"):
        record.prefill_end_s = arrival_s + _seconds(ended.prefill_end)
    return outcome


def capabilities_json(capabilities: Capabilities) -> str:
    return json.dumps(asdict(capabilities), sort_keys=True)


def capabilities_of(text: str) -> Capabilities:
    """Raises BadMessage."""
    try:
        return TypeAdapter(Capabilities).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadMessage(f"capabilities_json: {where}: {first['msg']}") from None


def _duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9
