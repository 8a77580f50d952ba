"""A GPU bundle opens only where it fits: each field is refused by name, warned of, or free."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from engines.bundle import open_bundle
from engines.bundle_base import MANIFEST, BundleMismatch, bundle_backend
from engines.gpu_bundle import open_gpu_bundle
from engines.gpu_manifest import GpuManifest
from tests.engines.gpu_bundles import (
    HOST,
    TENSORRT,
    edit,
    engine_bundle,
    put,
    refusal,
    torch_bundle,
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return engine_bundle(tmp_path / "bundle")


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    return torch_bundle(tmp_path / "torch")


# ----------------------------------------------------------------- every field of the manifest


class Rule(NamedTuple):
    """What another value of a field leads to, in a manifest that is sealed with it.

    refused: the field that the refusal names; None: it opens. warns: with a warning that names it. A field
    that neither refuses nor warns says what the bundle is and nothing that this machine could contradict.
    """

    value: Any
    refused: str | None = None
    warns: bool = False
    torch: bool = False  # in a bundle of the PyTorch backend


def refused(value: Any, field: str | None = None, *, torch: bool = False) -> Rule:
    return Rule(value, refused=field or "itself", torch=torch)


def free(value: Any) -> Rule:
    return Rule(value)


SHA = "1" * 64
RULES: dict[str, Rule] = {
    "schema_version": refused(2),
    "bundle_id": free("0" * 64),  # a seal is never free: the test of unsealed edits refuses it
    "model.name": free("another"),
    "model.architecture": refused("llama"),
    "model.shape.name": free("another"),
    **{f"model.shape.{n}": refused(3) for n in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim")},
    "model.shape.vocab": refused(2000),
    "model.shape.tied": free(False),
    "model.source.repo": free("another/model"),
    "model.source.revision": free("def"),
    "model.source.licence": free("MIT"),
    "model.source.files.0.name": free("b.safetensors"),
    "model.source.files.0.size_bytes": free(8),
    "model.source.files.0.sha256": free(SHA),
    "backend.name": refused("abacus"),
    "backend.tensorrt_llm": refused("1.2.0"),
    "backend.tensorrt": refused("10.13.3.9"),
    "backend.dtype": refused("float32"),
    "backend.quantisation": refused("fp8"),
    "backend.kv_dtype": refused("fp8"),
    "backend.tp": refused(2),
    "backend.pp": refused(2),
    "gpu.name": refused("NVIDIA H100 80GB HBM3"),
    "gpu.compute_capability": refused("8.9"),
    "gpu.memory_bytes": refused(10**8),
    "gpu.driver": Rule("550.54.14", warns=True),
    "engines.sp.directory": refused("short"),
    "engines.sp.build_config_sha256": refused(SHA),
    "engines.sp.gemm_plugin": refused(False),
    "engines.sp.plan_bytes": refused(2049),
    "engines.sp.profiles": refused([[1, 64, 64], [64, 2048, 2048]]),
    "engines.sp.requests_max": refused(128),
    "engines.lp.directory": refused("sp"),
    "engines.lp.build_config_sha256": refused(SHA),
    "engines.lp.gemm_plugin": refused(True),
    "engines.lp.plan_bytes": refused(1),
    "engines.lp.profiles": refused([[1, 2048, 2048]]),
    "engines.lp.requests_max": refused(128),
    "checkpoint.directory": refused("other", torch=True),
    "checkpoint.capture_tokens": refused([64, 100], torch=True),
    "profiles.layout": refused("rectangular"),
    "profiles.padding": refused("class"),
    "profiles.t_classes": refused([64, 2048]),
    "profiles.h_classes": refused([0, 4096]),
    "profiles.cells": refused([[8, 1]]),
    "profiles.block_mask": refused(True),
    "profiles.captured": refused([[8, 1]]),
    "limits.context_tokens_max": refused(8192),
    "limits.requests_max": refused(65),
    "limits.block_tokens": refused(64),
    "limits.kv_blocks": refused(1),
    "limits.memory_bytes": refused(1),
    "text.chat_template": free("{{ y }}"),
    "text.bos_id": refused(1000),
    "text.eos_id": refused(1000),
    "text.add_bos": free(True),
    **{
        f"cost.model.{name}": refused(-1.0, "cost.model")
        for name in ("launch_s", "weights_s", "alpha", "beta", "gamma_w", "gamma_r", "smooth_p", "part_s")
    },
    "cost.model.tokens_max": free(8192),
    "cost.model.origin": free("measured elsewhere"),
    "cost.median_error": refused(0.5),
    "cost.worst_error": refused(0.001, "cost.median_error"),
    "cost.sample_count": refused(0),
    "cost.boundary_tokens": refused(1),
    "cost.knee_tokens": refused(1),
    "cost.quick": free(True),
    "candidates.0.engine": refused("mp"),
    "candidates.0.gemm_plugin": refused(False),
    "candidates.0.plan_bytes": refused(7),
    "candidates.0.pass_s": refused([[128, 0.1], [64, 0.1]]),
    "candidates.0.kept": refused(False, "candidates.kept"),
    "environment.python": free("3.11"),
    "environment.torch": free(None),
    "environment.cuda": free(None),
    "files.0.name": refused("../passwd"),
    "files.0.size_bytes": refused(1, "sp/config.json"),
    "files.0.sha256": refused(SHA, "sp/config.json"),
    "steps": free({"convert": "z"}),
}


def fields_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """Paths of all leaves of the manifest, from its types; items of a list of parts are number 0."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        hints: dict[str, Any] = {name: field.annotation for name, field in kind.model_fields.items()}
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
    else:
        part = next((arg for arg in typing.get_args(kind) if _holds_fields(arg)), None)
        if part is None:
            yield prefix
        else:
            yield from fields_of(part, f"{prefix}.0" if typing.get_origin(kind) is tuple else prefix)
        return
    for name, hint in hints.items():
        yield from fields_of(hint, f"{prefix}.{name}" if prefix else name)


def _holds_fields(kind: Any) -> bool:
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)
    return any(_holds_fields(arg) for arg in typing.get_args(kind))


FIELDS = tuple(fields_of(GpuManifest))


def test_every_field_has_a_rule() -> None:
    assert len(FIELDS) > 80
    assert set(FIELDS) == set(RULES)


@pytest.mark.parametrize("field", FIELDS)
def test_another_value_is_refused_warned_of_or_free(field: str, tmp_path: Path) -> None:
    rule = RULES[field]
    path = (torch_bundle if rule.torch else engine_bundle)(tmp_path / "bundle")
    edit(path, lambda data: put(data, field, rule.value), seal=True)
    if rule.refused is not None:
        assert refusal(path).field == (field if rule.refused == "itself" else rule.refused)
        return
    opened = open_gpu_bundle(path, host=HOST)
    assert [warning.field for warning in opened.warnings] == ([field] if rule.warns else [])
    assert opened.reverify is rule.warns


@pytest.mark.parametrize("field", FIELDS)
def test_an_edit_by_hand_is_always_refused(field: str, tmp_path: Path) -> None:
    """Also of what is free: the seal shows it."""
    rule = RULES[field]
    path = (torch_bundle if rule.torch else engine_bundle)(tmp_path / "bundle")
    edit(path, lambda data: put(data, field, rule.value), seal=False)
    error = refusal(path)
    named = field if rule.refused in (None, "itself") else rule.refused
    assert error.field in (named, "bundle_id")


@pytest.mark.parametrize("field", [f for f in FIELDS if f not in ("cost.model.part_s", "profiles.captured")])
def test_a_field_that_is_left_out_is_refused(field: str, tmp_path: Path) -> None:
    path = (torch_bundle if RULES[field].torch else engine_bundle)(tmp_path / "bundle")

    def drop(data: Any) -> None:
        *parents, last = field.split(".")
        for name in parents:
            data = data[int(name) if name.isdigit() else name]
        del data[last]

    edit(path, drop, seal=False)
    error = refusal(path)  # by the seal or the text as it was built where it has a default
    assert field.startswith(error.field) or error.field in ("bundle_id", MANIFEST)


@pytest.mark.parametrize("where", ["", "model", "model.shape", "engines.sp", "cost.model", "profiles", "gpu"])
def test_a_field_that_the_schema_does_not_know_is_refused(where: str, bundle: Path) -> None:
    field = f"{where}.colour".lstrip(".")
    edit(bundle, lambda data: put(data, field, "red"), seal=False)
    assert refusal(bundle).field in (field, where)  # of a dataclass the part is named, and the field in words


# ----------------------------------------------------------------- the two kinds


def test_what_was_written_is_read(bundle: Path, torch: Path) -> None:
    opened = open_gpu_bundle(bundle, host=HOST)
    assert opened.warnings == ()
    assert not opened.reverify
    assert (opened.sp_dir, opened.lp_dir) == (bundle / "sp", bundle / "lp")
    assert opened.fingerprint == opened.manifest.content_id()
    assert opened.tokenizer_path.read_bytes() == b"{}"
    other = open_gpu_bundle(torch, host=HOST)
    assert (other.sp_dir, other.lp_dir) == (torch / "checkpoint", None)


def test_one_engine_may_serve_both_lanes(tmp_path: Path) -> None:
    def shared(manifest: GpuManifest) -> GpuManifest:
        assert manifest.engines is not None
        files = tuple(file for file in manifest.files if not file.name.startswith("lp/"))
        engines = manifest.engines.model_copy(update={"lp": None})
        return manifest.model_copy(update={"engines": engines, "files": files})

    assert open_gpu_bundle(engine_bundle(tmp_path / "b", shared), host=HOST).lp_dir is None


def test_the_pytorch_backend_does_not_ask_for_tensorrt(torch: Path) -> None:
    open_gpu_bundle(torch, host=dataclasses.replace(HOST, tensorrt=None))
    edit(torch, lambda data: put(data, "backend.tensorrt", TENSORRT), seal=True)
    assert refusal(torch).field == "backend.tensorrt"


@pytest.mark.parametrize("build", [engine_bundle, torch_bundle])
def test_a_bundle_of_the_other_kind_is_told_by_its_backend(
    build: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = build(tmp_path / "bundle")
    assert bundle_backend(path) in ("trtllm", "trtllm_torch")
    with pytest.raises(BundleMismatch) as caught:
        open_bundle(path)
    assert caught.value.field == "backend.name"


def test_engines_and_checkpoint_exclude_each_other(bundle: Path, torch: Path) -> None:
    edit(bundle, lambda data: data.update(engines=None), seal=True)
    assert refusal(bundle).field == "engines"
    edit(torch, lambda data: data.update(checkpoint=None), seal=True)
    assert refusal(torch).field == "checkpoint"


def test_an_uncalibrated_bundle_opens_with_a_warning(bundle: Path) -> None:
    edit(bundle, lambda data: data.update(cost=None), seal=True)
    opened = open_gpu_bundle(bundle, host=HOST)
    assert [warning.field for warning in opened.warnings] == ["cost"]
    assert not opened.reverify
