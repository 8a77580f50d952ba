"""Proto to core: what a client asked for, checked field by field, and what happened, back as a proto.

A field at fault is named by its path in the proto together with what to send instead. Checks that need the
token ids come in `intake`; everything here is cheap and runs on the event loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from uuid import uuid4

from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2

from engines.types import FinishReason, Sampling
from protos.plaserve.v1 import inference_pb2 as pb
from service.core.types import Lane
from service.rpc.errors import InvalidField, RequestError
from service.rpc.text import Message
from service.runtime.contract import RequestRecord
from service.settings import LimitSettings

TEMPERATURE_MAX = 10.0
TOP_K_MAX = 1_000_000  # above any vocabulary: such a value is a mistake, not a wish
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Wishes:
    """A checked request without its tokens. Exactly one of text, token_ids, messages is not None."""

    request_id: str
    text: str | None
    token_ids: tuple[int, ...] | None
    messages: tuple[Message, ...] | None
    max_new_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    ttft_target_s: float | None
    deadline_free: bool
    priority: int
    tenant: str
    session: str


def wishes_of(
    request: pb.GenerateRequest | pb.PrefillRequest, served_model: str, limits: LimitSettings
) -> Wishes:
    """Check everything that needs no tokenizer. Raises RequestError."""
    if request.model not in ("", served_model):
        message = f"model: {request.model[:80]!r} is not served here; use {served_model!r} or leave it empty"
        raise RequestError(code_pb2.NOT_FOUND, message, "UNKNOWN_MODEL", "model")
    text, token_ids, messages = _prompt(request.prompt, limits)
    scheduling = request.scheduling
    _check_name("request_id", request.request_id, limits)
    _check_name("scheduling.tenant", scheduling.tenant, limits)
    _check_name("scheduling.session", scheduling.session, limits)
    if abs(scheduling.priority) > limits.priority_max:
        raise InvalidField(
            "scheduling.priority", f"must be from {-limits.priority_max} to {limits.priority_max}"
        )
    if isinstance(request, pb.PrefillRequest):
        max_new_tokens = 1
    else:
        max_new_tokens = request.max_tokens or limits.max_tokens_default
        if max_new_tokens > limits.max_tokens_max:
            raise InvalidField("max_tokens", f"is {max_new_tokens}; send at most {limits.max_tokens_max}")
    return Wishes(
        request_id=request.request_id or uuid4().hex,
        text=text,
        token_ids=token_ids,
        messages=messages,
        max_new_tokens=max_new_tokens,
        sampling=_sampling(request.sampling),
        stops=_stops(request.sampling, limits),
        ttft_target_s=_ttft_target_s(scheduling, limits),
        deadline_free=scheduling.deadline_free,
        priority=scheduling.priority,
        tenant=scheduling.tenant,
        session=scheduling.session,
    )


def _prompt(
    prompt: pb.Prompt, limits: LimitSettings
) -> tuple[str | None, tuple[int, ...] | None, tuple[Message, ...] | None]:
    match prompt.WhichOneof("kind"):
        case "text":
            if not prompt.text:
                raise InvalidField("prompt.text", "is empty; send some text")
            _check_bytes("prompt.text", len(prompt.text.encode()), limits)
            return prompt.text, None, None
        case "tokens":
            if not prompt.tokens.ids:
                raise InvalidField("prompt.tokens.ids", "is empty; send at least one token id")
            _check_count("prompt.tokens.ids", len(prompt.tokens.ids), limits.prompt_tokens_max)
            return None, tuple(prompt.tokens.ids), None
        case "chat":
            return None, None, _messages(prompt.chat, limits)
        case _:
            raise InvalidField("prompt", "is missing; set one of text, tokens, chat")


def _messages(chat: pb.Chat, limits: LimitSettings) -> tuple[Message, ...]:
    if not chat.messages:
        raise InvalidField("prompt.chat.messages", "is empty; send at least one message")
    _check_count("prompt.chat.messages", len(chat.messages), limits.chat_messages_max)
    _check_bytes("prompt.chat.messages", sum(len(m.content.encode()) for m in chat.messages), limits)
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidField(f"prompt.chat.messages[{index}].role", f"must be one of {', '.join(ROLES)}")
    if not any(message.content for message in chat.messages):
        raise InvalidField("prompt.chat.messages", "have no content; send some text")
    return tuple({"role": m.role, "content": m.content} for m in chat.messages)


def _check_count(field: str, count: int, count_max: int) -> None:
    if count > count_max:
        raise InvalidField(field, f"has {count} entries; send at most {count_max}")


def _check_bytes(field: str, size: int, limits: LimitSettings) -> None:
    if size > limits.text_bytes_max:
        raise InvalidField(field, f"has {size} bytes; send at most {limits.text_bytes_max}")


def _check_name(field: str, value: str, limits: LimitSettings) -> None:
    if len(value) > limits.name_chars_max:
        raise InvalidField(field, f"has {len(value)} characters; send at most {limits.name_chars_max}")
    if not value.isprintable():
        raise InvalidField(field, "must have printable characters only")


def _sampling(sampling: pb.Sampling) -> Sampling:
    temperature = sampling.temperature
    if not (math.isfinite(temperature) and 0.0 <= temperature <= TEMPERATURE_MAX):
        raise InvalidField(
            "sampling.temperature", f"must be from 0 to {TEMPERATURE_MAX:g}, not {temperature:g}"
        )
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0.0 < top_p <= 1.0:
        raise InvalidField("sampling.top_p", f"must be above 0 and at most 1, not {top_p:g}")
    if sampling.top_k > TOP_K_MAX:
        raise InvalidField(
            "sampling.top_k", f"is {sampling.top_k}; send at most {TOP_K_MAX}, or 0 for no limit"
        )
    return Sampling(temperature, top_p, sampling.top_k, sampling.seed, sampling.ignore_eos)


def _stops(sampling: pb.Sampling, limits: LimitSettings) -> tuple[str, ...]:
    if len(sampling.stop) > limits.stop_count_max:
        raise InvalidField(
            "sampling.stop", f"has {len(sampling.stop)} texts; send at most {limits.stop_count_max}"
        )
    for index, stop in enumerate(sampling.stop):
        if not 0 < len(stop) <= limits.stop_chars_max:
            raise InvalidField(
                f"sampling.stop[{index}]", f"must have 1 to {limits.stop_chars_max} characters"
            )
    return tuple(sampling.stop)


def _ttft_target_s(scheduling: pb.Scheduling, limits: LimitSettings) -> float | None:
    field = "scheduling.ttft_slo"
    if not scheduling.HasField("ttft_slo"):
        return None
    if scheduling.deadline_free:
        raise InvalidField(field, "contradicts deadline_free; send one of them")
    target_s = scheduling.ttft_slo.seconds + scheduling.ttft_slo.nanos / 1e9
    if not 0.0 < target_s <= limits.ttft_slo_s_max:
        raise InvalidField(
            field, f"must be above 0 and at most {limits.ttft_slo_s_max:g} s, not {target_s:g} s"
        )
    return target_s


# --- back ---

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    None: pb.FINISH_REASON_STOP,  # a stop text: the engine was told to stop
}
_LANE = {Lane.SHORT: pb.LANE_SHORT, Lane.LONG: pb.LANE_LONG, None: pb.LANE_UNSPECIFIED}


def duration_of(seconds: float | None) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(max(0.0, seconds or 0.0) * 1e9))
    return duration


def summary_of(record: RequestRecord) -> pb.Summary:
    arrival_s, start_s = record.request.arrival_s, record.first_pass_start_s
    queue_s = None if start_s is None else start_s - arrival_s
    prefill_s = None if start_s is None or record.prefill_end_s is None else record.prefill_end_s - start_s
    ttft_s = None if record.first_token_s is None else record.first_token_s - arrival_s
    return pb.Summary(
        request_id=record.request.request_id,
        finish_reason=_FINISH[record.finish],
        prompt_token_count=record.request.prompt_tokens,
        new_token_count=record.new_tokens,
        history_token_count=record.history_tokens,
        output_token_count=record.output_tokens,
        lane=_LANE[record.lane],
        prefill_pass_count=len(record.pass_ids),
        queue_duration=duration_of(queue_s),
        prefill_duration=duration_of(prefill_s),
        ttft_duration=duration_of(ttft_s),
        dispatch_reason=record.first_dispatch_reason.value if record.first_dispatch_reason else "",
    )
