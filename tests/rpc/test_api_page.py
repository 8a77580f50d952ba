"""docs/api.md says what the service does: every field, every outcome with its status, every limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from google.rpc import code_pb2

from protos.plaserve.v1 import inference_pb2 as pb
from service.core.types import Outcome, Request
from service.rpc.errors import RequestError, raise_unless_completed
from service.runtime.contract import RequestRecord
from service.settings import LimitSettings

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


def fields_of(message: Descriptor, path: str = "") -> set[str]:
    """Paths of the leaves, by the names in the proto."""
    found: set[str] = set()
    for field in message.fields:
        nested = field.message_type
        if nested is not None and nested.file.package == "plaserve.v1" and field.name != "messages":
            found |= fields_of(nested, f"{path}{field.name}.")
        else:
            found.add(path + field.name)
    return found


@pytest.mark.parametrize("message", [pb.GenerateRequest.DESCRIPTOR, pb.PrefillRequest.DESCRIPTOR])
def test_every_field_of_a_request_has_a_row(message: Descriptor) -> None:
    rows = set(re.findall(r"^\| `([a-z_.]+)` \|", PAGE, re.MULTILINE))
    assert fields_of(message) - rows == set()


def test_every_field_of_the_summary_is_explained() -> None:
    named = set(re.findall(r"`([a-z_]+)`", PAGE))
    assert {field.name for field in pb.Summary.DESCRIPTOR.fields} <= named


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.COMPLETED])
def test_every_outcome_has_its_status_and_whether_to_retry(outcome: Outcome) -> None:
    record = RequestRecord(Request("r", 1, 1, 0.0), outcome=outcome, retry_after_s=None)
    with pytest.raises(RequestError) as ended:
        raise_unless_completed(record)
    code = code_pb2.Code.Name(ended.value.status.code)
    (row,) = re.findall(rf"^\| `{outcome.value}` \| .*$", PAGE, re.MULTILINE)
    assert row.startswith(f"| `{outcome.value}` | {code} |")


def test_defaults_are_those_of_the_settings() -> None:
    limits = LimitSettings()
    numbers = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", PAGE)}
    bounds = limits.model_dump(exclude={"tokenizer_threads", "tokenizer_queue_max"})
    assert {name: value for name, value in bounds.items() if value not in numbers} == {}
