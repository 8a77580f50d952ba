"""Scheduler and worker: protos to the types of engines and core, and back. The only file that knows both.

What goes out comes back the same, with two exceptions on purpose: a token crosses as the fact that it came
(`HIDDEN_TOKEN` on the other side), since its value goes to the front end alone, and seconds are rounded to
whole nanoseconds. Fields that are not known here are ignored, in JSON too, and missing ones mean what they
meant before they existed: the two ends may be of neighbouring versions.

A message that makes no sense raises BadMessage naming the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from pydantic import TypeAdapter, ValidationError

from engines.cost_model import CostModel
from engines.profiles import Profiles
from engines.types import (
    BlocksRemoved,
    BlocksStored,
    Capabilities,
    EngineRequest,
    EngineStats,
    FinishReason,
    ItemResult,
    KvEvent,
    Pass,
    PassItem,
    PassKind,
    PassResult,
    Ran,
    Sampling,
)
from protos.plaserve.v1 import fleet_pb2, inference_pb2
from protos.plaserve.v1 import worker_pb2 as pb
from service.core.types import (
    Event,
    InstanceDown,
    InstanceSpec,
    KvChanged,
    PassFailed,
    PassFinished,
    PassRevoked,
    PassStarted,
    Role,
    RoleChanged,
)

HIDDEN_TOKEN = -1  # stands for a token whose value went to the front end
HASHES_MAX = 65_536  # in one KvEvents message: half a megabyte

E = TypeVar("E", bound=StrEnum)
T = TypeVar("T")

_KIND: Mapping[PassKind, int] = {
    PassKind.PREFILL: pb.PASS_KIND_PREFILL,
    PassKind.DECODE: pb.PASS_KIND_DECODE,
}
_FINISH: Mapping[FinishReason, int] = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}
_ROLE: Mapping[Role, int] = {
    Role.SP: fleet_pb2.ROLE_SP,
    Role.LP: fleet_pb2.ROLE_LP,
    Role.MIXED: fleet_pb2.ROLE_MIXED,
}


class BadMessage(ValueError):  # noqa: N818 - reads as what it is
    """The other side sent what can't be; the message names the field."""


# --- passes -----------------------------------------------------------------------------------------------


def dispatch_of(
    pass_: Pass,
    new_requests: Sequence[EngineRequest],
    *,
    staged: bool,
    front_end_of: Callable[[str], str] = lambda request_id: "",
) -> pb.DispatchPass:
    """front_end_of: request id -> the front end that its tokens go to."""
    return pb.DispatchPass(
        pass_id=pass_.pass_id,
        kind=_KIND[pass_.kind],  # type: ignore[arg-type]
        items=[
            pb.PassItem(
                request_id=item.request_id,
                new_token_count=item.new_tokens,
                history_token_count=item.history,
            )
            for item in pass_.items
        ],
        staged=staged,
        new_requests=[_request_of(request, front_end_of(request.request_id)) for request in new_requests],
        layer_block=pass_.layer_block,
        layer_blocks=pass_.layer_blocks,
    )


def read_pass(message: pb.DispatchPass) -> Pass:
    """Raises BadMessage."""
    if not message.items:
        raise BadMessage(f"DispatchPass.items: pass {message.pass_id} has none")
    blocks = message.layer_blocks or 1
    if message.layer_block >= blocks:
        raise BadMessage(f"DispatchPass.layer_block: {message.layer_block} of {blocks}")
    items = tuple(
        PassItem(
            _named(item.request_id, "DispatchPass.items.request_id"),
            item.new_token_count,
            item.history_token_count,
        )
        for item in message.items
    )
    kind = _known(_KIND, message.kind, "DispatchPass.kind")
    return Pass(message.pass_id, kind, items, message.layer_block, blocks)


def read_requests(message: pb.DispatchPass) -> tuple[tuple[EngineRequest, str], ...]:
    """The new requests of a pass, each with the front end that its tokens go to. Raises BadMessage."""
    in_pass = {item.request_id for item in message.items}
    for request in message.new_requests:
        if request.request_id not in in_pass:
            raise BadMessage(f"DispatchPass.new_requests: {request.request_id!r} is not in the pass")
    return tuple((_read_request(request), request.front_end) for request in message.new_requests)


def _request_of(request: EngineRequest, front_end: str) -> pb.WorkerRequest:
    sampling = request.sampling
    return pb.WorkerRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        max_new_tokens=request.max_new_tokens,
        retain=request.retain,
        front_end=front_end,
        engine_sampling=pb.EngineSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            ignore_eos=sampling.ignore_eos,
        ),
    )


def _read_request(message: pb.WorkerRequest) -> EngineRequest:
    sampling = Sampling()
    if message.HasField("engine_sampling"):
        sent = message.engine_sampling
        sampling = Sampling(sent.temperature, sent.top_p, sent.top_k, sent.seed, sent.ignore_eos)
    if not message.token_ids:
        raise BadMessage(f"WorkerRequest.token_ids: {message.request_id!r} has none")
    return EngineRequest(
        _named(message.request_id, "WorkerRequest.request_id"),
        tuple(message.token_ids),
        message.max_new_tokens,
        sampling,
        message.retain,
    )


# --- events -----------------------------------------------------------------------------------------------


def events_of(event: Event) -> Iterable[pb.ControlResponse]:
    """What a worker sends for an event of its instance; several messages where one would grow too large."""
    match event:
        case PassStarted():
            yield pb.ControlResponse(started=pb.PassStarted(pass_id=event.pass_id))
        case PassFinished():
            yield pb.ControlResponse(finished=_finished_of(event.result))
        case PassFailed():
            failed = pb.PassFailed(pass_id=event.pass_id, error=event.error, lost_request_ids=event.lost)
            yield pb.ControlResponse(failed=failed)
        case PassRevoked():
            yield pb.ControlResponse(revoked=pb.PassRevoked(pass_id=event.pass_id))
        case KvChanged():
            for part in _parts(event.events):
                yield pb.ControlResponse(kv_events=pb.KvEvents(events=part))
        case RoleChanged():
            yield pb.ControlResponse(role_changed=pb.RoleChanged(role=_ROLE[event.role]))  # type: ignore[arg-type]
        case InstanceDown():
            yield pb.ControlResponse(instance_failed=pb.InstanceFailed(error=event.error))
        case _:
            raise ValueError(f"{type(event).__name__} is no event of a worker")


def read_event(message: pb.ControlResponse, instance_id: str) -> Event | None:
    """The event in `message`; None where it holds another kind of message. Raises BadMessage."""
    match message.WhichOneof("event"):
        case "started":
            return PassStarted(instance_id, message.started.pass_id)
        case "finished":
            return PassFinished(instance_id, _read_finished(message.finished))
        case "failed":
            failed = message.failed
            return PassFailed(instance_id, failed.pass_id, tuple(failed.lost_request_ids), failed.error)
        case "revoked":
            return PassRevoked(instance_id, message.revoked.pass_id)
        case "kv_events":
            return KvChanged(instance_id, tuple(_read_kv(event) for event in message.kv_events.events))
        case "role_changed":
            return RoleChanged(instance_id, read_role(message.role_changed.role))
        case "instance_failed":
            return InstanceDown(instance_id, message.instance_failed.error)
        case _:
            return None


def _finished_of(result: PassResult) -> pb.PassFinished:
    made = pb.PassFinished(
        pass_id=result.pass_id,
        kind=_KIND[result.kind],  # type: ignore[arg-type]
        items=[_item_of(item) for item in result.items],
        executed_token_count=result.executed_tokens,
        executed_history_count=result.executed_history,
        elapsed_duration=duration_of(result.elapsed_s),
    )
    if result.ran is not None:
        made.ran.iteration_count = result.ran.iterations
        made.ran.request_count = result.ran.requests
        made.ran.token_count = result.ran.tokens
    return made


def _item_of(item: ItemResult) -> pb.ItemResult:
    made = pb.ItemResult(
        request_id=item.request_id,
        position=item.position,
        computed_token_count=item.computed,
        reused_token_count=item.reused,
        has_token=item.token is not None,
    )
    if item.finish is not None:
        made.finish_reason = _FINISH[item.finish]  # type: ignore[assignment]
    if item.error is not None:
        made.error = item.error
    return made


def _read_finished(message: pb.PassFinished) -> PassResult:
    ran = None
    if message.HasField("ran"):
        ran = Ran(message.ran.iteration_count, message.ran.request_count, message.ran.token_count)
    return PassResult(
        message.pass_id,
        _known(_KIND, message.kind, "PassFinished.kind"),
        tuple(_read_item(item) for item in message.items),
        message.executed_token_count,
        message.executed_history_count,
        seconds_of(message.elapsed_duration),
        ran,
    )


def _read_item(message: pb.ItemResult) -> ItemResult:
    finish = finish_from(message.finish_reason)
    if finish is not None and not message.has_token:
        raise BadMessage(f"ItemResult.finish_reason: {message.request_id!r} ended without a token")
    return ItemResult(
        _named(message.request_id, "ItemResult.request_id"),
        message.position,
        message.computed_token_count,
        message.reused_token_count,
        HIDDEN_TOKEN if message.has_token else None,
        finish,
        message.error if message.HasField("error") else None,
    )


def _parts(events: Sequence[KvEvent]) -> Iterable[list[pb.KvEvent]]:
    """`events` in messages of at most HASHES_MAX hashes; a longer event is cut."""
    part: list[pb.KvEvent] = []
    room = HASHES_MAX
    for event in events:
        for start in range(0, max(1, len(event.block_hashes)), HASHES_MAX):
            hashes = event.block_hashes[start : start + HASHES_MAX]
            if len(hashes) > room:
                yield part
                part, room = [], HASHES_MAX
            part.append(pb.KvEvent(removed=isinstance(event, BlocksRemoved), block_hashes=hashes))
            room -= len(hashes)
    if part:
        yield part


def _read_kv(message: pb.KvEvent) -> KvEvent:
    hashes = tuple(message.block_hashes)
    return BlocksRemoved(hashes) if message.removed else BlocksStored(hashes)


# --- instances --------------------------------------------------------------------------------------------


def describe(spec: InstanceSpec, ready: pb.WorkerReady) -> None:
    """Write what a scheduler must know of an instance into `ready`."""
    ready.instance_id = spec.instance_id
    ready.capabilities_json = json.dumps(asdict(spec.capabilities))
    ready.profiles_json = json.dumps(asdict(spec.profiles))
    ready.cost_json = json.dumps(asdict(spec.cost))
    ready.role = _ROLE[spec.role]  # type: ignore[assignment]


def read_spec(ready: pb.WorkerReady) -> InstanceSpec:
    """Raises BadMessage."""
    return InstanceSpec(
        _named(ready.instance_id, "WorkerReady.instance_id"),
        _read_json(Capabilities, ready.capabilities_json, "WorkerReady.capabilities_json"),
        _read_json(Profiles, ready.profiles_json, "WorkerReady.profiles_json"),
        _read_json(CostModel, ready.cost_json, "WorkerReady.cost_json"),
        read_role(ready.role) if ready.role else Role.MIXED,
    )


def _read_json(kind: type[T], text: str, field: str) -> T:
    try:
        return TypeAdapter(kind).validate_python(json.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join([field, *(str(part) for part in first["loc"])])
        raise BadMessage(f"{where}: {first['msg']}") from error
    except ValueError as error:
        raise BadMessage(f"{field}: {error}") from error


def role_of(role: Role) -> Any:
    return _ROLE[role]


def read_role(number: int) -> Role:
    return _known(_ROLE, number, "role")


def statistics_of(stats: EngineStats) -> pb.WorkerStatistics:
    return pb.WorkerStatistics(
        kv_blocks_total=stats.kv_blocks_total,
        kv_blocks_free=stats.kv_blocks_free,
        kv_blocks_cached=stats.kv_blocks_cached,
        live_request_count=stats.requests_live,
        pass_count=stats.passes_done,
        incidents=[pb.Incident(name=name, count=count) for name, count in stats.incidents],
    )


def read_statistics(message: pb.WorkerStatistics) -> EngineStats:
    return EngineStats(
        message.kv_blocks_total,
        message.kv_blocks_free,
        message.kv_blocks_cached,
        message.live_request_count,
        message.pass_count,
        tuple((incident.name, incident.count) for incident in message.incidents),
    )


def delta_of(
    request_id: str, first_index: int, token_ids: Sequence[int], finish: FinishReason | None
) -> pb.TokenDelta:
    made = pb.TokenDelta(request_id=request_id, first_index=first_index, token_ids=token_ids)
    if finish is not None:
        made.finish_reason = _FINISH[finish]  # type: ignore[assignment]
    return made


def finish_from(number: int) -> FinishReason | None:
    """None for unspecified. Raises BadMessage for a number that is not known."""
    return _known(_FINISH, number, "finish_reason") if number else None


def duration_of(seconds: float) -> Duration:
    """To whole nanoseconds; what is below zero becomes zero."""
    duration = Duration()
    duration.FromNanoseconds(round(max(0.0, seconds) * 1e9))
    return duration


def seconds_of(duration: Duration) -> float:
    return int(duration.ToNanoseconds()) / 1e9


def _known(table: Mapping[E, int], number: int, field: str) -> E:
    for name, value in table.items():
        if value == number:
            return name
    raise BadMessage(f"{field}: {number} is not known; known are {sorted(table.values())}")


def _named(value: str, field: str) -> str:
    if not value:
        raise BadMessage(f"{field}: is empty")
    return value
