"""The Triton repository that is written: valid, complete against the documented table, and explicit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tritonclient.grpc")

from build_scripts.spec import BuildError
from build_scripts.trtllm.triton_repository import (
    CONFIG,
    LEFT_OUT,
    TritonLimits,
    model_config,
    parameters,
    read_config,
    to_text,
    write_repository,
)
from engines.triton_tensors import BACKEND, BLOCK_TOKENS, FILE, FINGERPRINT, tensor_table

SURFACE = Path(__file__).parents[2] / ".." / "shared" / "trtllm_api" / "surface.json"
LIMITS = TritonLimits(requests_max=64, kv_blocks=4096, block_tokens=32)


def write(target: Path, **other: Any) -> Any:
    given = {"model_name": "sp", "engine_dir": "/engines/sp", "limits": LIMITS, "fingerprint": "abc"}
    return read_config(write_repository(target, **{**given, **other}))


# --- the table ---


def test_the_table_is_the_one_that_was_read() -> None:
    """But for what this project adds: which inputs are scalars, and sizes as numbers."""
    if not SURFACE.is_file():
        pytest.skip("the surface of TensorRT-LLM is not beside this repository")
    read = json.loads(SURFACE.read_text(encoding="utf-8"))["triton"]["inflight_batcher_llm/tensorrt_llm"]
    ours = json.loads(FILE.read_text(encoding="utf-8"))
    for row in ours["inputs"]:
        row.pop("scalar", None)
    for row in (*ours["inputs"], *ours["outputs"]):
        row["dims"] = [str(size) for size in row["dims"]]
    outputs = [{k: v for k, v in row.items() if k not in ("optional", "ragged")} for row in read["outputs"]]
    assert ours["inputs"] == read["inputs"]
    assert ours["outputs"] == outputs
    assert ours["parameters"] == read["parameters"]
    assert ours["request_parameters"] == read["request_parameters"]


def test_the_table_is_whole() -> None:
    table = tensor_table()
    assert (len(table.inputs), len(table.outputs)) == (60, 21)
    for tensors in (table.inputs, table.outputs):
        assert len({tensor.name for tensor in tensors}) == len(tensors)
        assert all(tensor.datatype.startswith("TYPE_") for tensor in tensors)
    assert all(tensor.dims == (1,) and not tensor.ragged for tensor in table.inputs if tensor.scalar)


# --- the configuration ---


def test_every_tensor_is_declared_as_documented(tmp_path: Path) -> None:
    from tritonclient.grpc.model_config_pb2 import DataType

    config, table = write(tmp_path), tensor_table()
    for declared, documented in ((config.input, table.inputs), (config.output, table.outputs)):
        assert [(t.name, DataType.Name(t.data_type), tuple(t.dims)) for t in declared] == [
            (t.name, t.datatype, t.dims) for t in documented
        ]
    for declared, documented in zip(config.input, table.inputs, strict=True):
        assert declared.optional == documented.optional
        assert declared.allow_ragged_batch == documented.ragged
        assert declared.HasField("reshape") == documented.scalar
        assert not declared.reshape.shape


def test_every_documented_parameter_is_written_or_left_out_with_a_reason(tmp_path: Path) -> None:
    written, documented = set(write(tmp_path).parameters), set(tensor_table().parameters)
    assert written - {FINGERPRINT, BLOCK_TOKENS} | set(LEFT_OUT) == documented
    assert not written & set(LEFT_OUT)
    assert all(LEFT_OUT.values())


def test_what_scheduling_rests_on_is_said(tmp_path: Path) -> None:
    config = write(tmp_path)
    assert config.backend == BACKEND
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 64
    assert list(config.dynamic_batching.preferred_batch_size) == [64]
    said = {name: value.string_value for name, value in config.parameters.items()}
    assert said["gpt_model_path"] == "/engines/sp"
    assert said["max_tokens_in_paged_kv_cache"] == str(4096 * 32)
    assert (said["enable_kv_cache_reuse"], said["enable_chunked_context"]) == ("true", "true")
    assert said["batch_scheduler_policy"] == "guaranteed_no_evict"
    assert (said[FINGERPRINT], said[BLOCK_TOKENS]) == ("abc", "32")
    assert said["guided_decoding_backend"] == ""  # read without a default: must be there


@given(
    requests_max=st.integers(1, 2048),
    kv_blocks=st.integers(1, 10**6),
    block_tokens=st.sampled_from([16, 32, 64, 128]),
    path=st.text(min_size=0, max_size=40),
)
def test_what_is_written_is_what_was_meant(
    requests_max: int, kv_blocks: int, block_tokens: int, path: str
) -> None:
    """Also for paths with quotes, newlines and other letters."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    limits = TritonLimits(requests_max, kv_blocks, block_tokens, queue_requests_max=4096)
    config = model_config("m", parameters(f"/{path}", limits), limits)
    assert text_format.Parse(to_text(config), model_config_pb2.ModelConfig()) == config


# --- the directory ---


def test_a_repository_holds_several_models_and_replaces_one(tmp_path: Path) -> None:
    write(tmp_path, model_name="prefill")
    write(tmp_path, model_name="decode")
    assert (
        write(tmp_path, model_name="decode", fingerprint="new").parameters[FINGERPRINT].string_value == "new"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode", "prefill"]
    for model in tmp_path.iterdir():
        assert sorted(path.name for path in model.iterdir()) == ["1", CONFIG]
        assert (model / CONFIG).stat().st_mode & 0o777 == 0o644  # a server of another user reads it
        assert not list((model / "1").iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [("model_name", "a/b"), ("model_name", ""), ("model_name", ".."), ("engine_dir", "engines/sp")],
)
def test_what_can_not_be_written_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(BuildError, match=name):
        write(tmp_path, **{name: value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"requests_max": 0}, "requests_max"),
        ({"kv_blocks": 0}, "kv_blocks"),
        ({"queue_delay_us": -1}, "queue_delay_us"),
        ({"queue_requests_max": 63}, "queue_requests_max"),
    ],
)
def test_limits_that_make_no_sense_are_named(other: dict[str, int], named: str) -> None:
    with pytest.raises(BuildError, match=named):
        TritonLimits(**{"requests_max": 64, "kv_blocks": 8, "block_tokens": 32, **other})


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "sp" / CONFIG).write_text("input [ { nme: 1 } ]")
    with pytest.raises(BuildError, match=r"config\.pbtxt.*nme"):
        read_config(tmp_path / "sp")
