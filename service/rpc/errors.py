"""Outcome to gRPC status, in one table, with rich details.

Every error carries exactly one `google.rpc.ErrorInfo` (reason: the outcome or INVALID_FIELD; domain
"plaserve"), `BadRequest` when a field is at fault, `RetryInfo` when trying again later can help. All of them
leave through `explained`, a bug in the service too.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from service.core.types import Outcome, Reason
from service.runtime.contract import RequestRecord

log = logging.getLogger(__name__)

DOMAIN = "plaserve"

_CODES: dict[Outcome, tuple[int, str]] = {
    Outcome.REJECTED_CAPACITY: (code_pb2.RESOURCE_EXHAUSTED, "the queue is full; try again later"),
    Outcome.REJECTED_TOO_LARGE: (code_pb2.FAILED_PRECONDITION, "the request can never fit; make it smaller"),
    Outcome.REJECTED_LATE: (code_pb2.RESOURCE_EXHAUSTED, "the TTFT target is out of reach now"),
    Outcome.REJECTED_DRAINING: (code_pb2.UNAVAILABLE, "the service is shutting down; use another one"),
    Outcome.ENGINE_FAILED: (code_pb2.UNAVAILABLE, "the engine failed; the request may be sent again"),
    Outcome.UNAVAILABLE: (code_pb2.UNAVAILABLE, "who ran it is gone; the request may be sent again"),
    Outcome.DEADLINE_EXCEEDED: (code_pb2.DEADLINE_EXCEEDED, "the deadline passed"),
    Outcome.CANCELLED: (code_pb2.CANCELLED, "cancelled by the client"),
}
_RETRY_S = {Outcome.REJECTED_DRAINING: 1.0, Outcome.ENGINE_FAILED: 1.0, Outcome.UNAVAILABLE: 1.0}


class RequestError(Exception):
    """Ends the call with `status`."""

    def __init__(
        self,
        code: int,
        message: str,
        reason: str,
        field: str = "",
        *,
        retry_s: float | None = None,
        why: Reason | None = None,
    ) -> None:
        super().__init__(message)
        metadata = {"reason": why.value} if why is not None else None
        self.status = status_of(code, message, reason, field=field, retry_s=retry_s, metadata=metadata)


class InvalidField(RequestError):  # noqa: N818 - reads as what it is at the call site
    """INVALID_ARGUMENT: `field` is its path in the proto, `message` says what to send instead."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(code_pb2.INVALID_ARGUMENT, f"{field}: {message}", "INVALID_FIELD", field)


def status_of(
    code: int,
    message: str,
    reason: str,
    *,
    field: str = "",
    retry_s: float | None = None,
    metadata: dict[str, str] | None = None,
) -> status_pb2.Status:
    """A status with its details packed."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata or {})
    ]
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(retry_s * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code, message=message, details=packed)


def raise_unless_completed(record: RequestRecord) -> None:
    """Raise RequestError for an ended request that did not complete."""
    assert record.outcome is not None, "the request has not ended"
    if record.outcome is Outcome.COMPLETED:
        return
    code, text = _CODES[record.outcome]
    message = f"{text} ({record.detail})" if record.detail else text
    reason = record.reason or Reason.CLIENT_CANCELLED
    retry_s = record.retry_after_s if record.retry_after_s is not None else _RETRY_S.get(record.outcome)
    raise RequestError(code, message, record.outcome.value, retry_s=retry_s, why=reason)


@asynccontextmanager
async def explained(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn what goes wrong inside into the rich status of the call."""
    try:
        yield
    except RequestError as error:
        status = error.status
    except Exception:
        log.exception("a call failed in the service itself")
        status = status_of(code_pb2.INTERNAL, "the service has a fault; its log has the details", "INTERNAL")
    else:
        return
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
