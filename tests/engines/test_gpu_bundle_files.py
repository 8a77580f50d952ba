"""Files of a GPU bundle: no byte changes unnoticed, large ones cost no hash, engines are what is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import gpu_bundle
from engines.bundle_base import MANIFEST, BundleMismatch, sha256_file
from engines.gpu_bundle import open_gpu_bundle, store_digests
from engines.gpu_engine_config import build_config_digest, read_engine_config
from engines.gpu_manifest import GpuManifest, gpu_file_entry
from tests.engines.gpu_bundles import (
    BUILD_CONFIG,
    ENGINE_FILES,
    HOST,
    TORCH_FILES,
    VERSION,
    edit,
    engine_bundle,
    engine_config,
    refusal,
    torch_bundle,
)

SHA = "1" * 64


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return engine_bundle(tmp_path / "bundle")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_bundle(tmp_path_factory.mktemp("bundles") / "bundle")


@given(st.sampled_from([*ENGINE_FILES, MANIFEST]), st.data())
def test_no_byte_can_change_unnoticed(pristine: Path, name: str, data: st.DataObject) -> None:
    file = pristine / name
    content = file.read_bytes()
    offset = data.draw(st.integers(0, len(content) - 1), label="offset")
    flip = data.draw(st.integers(1, 255), label="flip")
    try:
        file.write_bytes(content[:offset] + bytes([content[offset] ^ flip]) + content[offset + 1 :])
        error = refusal(pristine)
        assert error.field == name or name == MANIFEST
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("name", [*ENGINE_FILES, MANIFEST])
def test_a_missing_or_shortened_file_is_named(bundle: Path, name: str) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:-1])
    assert refusal(bundle).field == name
    (bundle / name).unlink()
    assert refusal(bundle).field == name


@pytest.mark.parametrize("build", [(engine_bundle, ENGINE_FILES), (torch_bundle, TORCH_FILES)])
@pytest.mark.parametrize("index", range(4))
def test_what_an_engine_needs_must_be_listed(build: Any, index: int, tmp_path: Path) -> None:
    make, names = build
    needed = [name for name in names if not name.endswith(".safetensors")]
    left_out = needed[index % len(needed)]

    def unlist(manifest: GpuManifest) -> GpuManifest:
        return manifest.model_copy(update={"files": tuple(f for f in manifest.files if f.name != left_out)})

    error = refusal(make(tmp_path / "bundle", unlist))
    assert left_out in str(error.expected)


@pytest.fixture
def large(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A bundle whose engines count as large, their digests stored, and the names of files hashed since."""
    hashed: list[str] = []

    def spy(path: Path) -> str:
        hashed.append(path.name)
        return sha256_file(path)

    monkeypatch.setattr(gpu_bundle, "DIGEST_BYTES", 2000)
    monkeypatch.setattr(gpu_bundle, "sha256_file", spy)
    store_digests(bundle, open_gpu_bundle(bundle, host=HOST).manifest.files)
    hashed.clear()
    return bundle, hashed


def test_a_large_file_is_known_by_its_stored_digest(large: tuple[Path, list[str]]) -> None:
    bundle, hashed = large
    open_gpu_bundle(bundle, host=HOST)
    assert hashed
    assert "rank0.engine" not in hashed
    open_gpu_bundle(bundle, host=HOST, full=True)
    assert hashed.count("rank0.engine") == 2
    hashed.clear()
    store_digests(bundle, open_gpu_bundle(bundle, host=HOST).manifest.files)
    assert "rank0.engine" not in hashed  # written once


def test_a_large_file_that_changed_is_refused(large: tuple[Path, list[str]]) -> None:
    bundle, _ = large
    file, beside = bundle / "sp/rank0.engine", bundle / "sp/rank0.engine.sha256"
    stored = file.stat()
    file.write_bytes(bytes(2048))
    os.utime(file, ns=(stored.st_atime_ns, stored.st_mtime_ns))
    open_gpu_bundle(bundle, host=HOST)  # what the stored digest can't see; `full` does
    assert refusal(bundle, full=True).field == "sp/rank0.engine"
    later = beside.stat().st_mtime_ns + 10**9
    os.utime(file, ns=(later, later))
    assert refusal(bundle).field == "sp/rank0.engine"  # newer than its digest: hashed
    beside.unlink()
    assert refusal(bundle).field == "sp/rank0.engine"


def test_a_stored_digest_of_another_build_is_refused(large: tuple[Path, list[str]]) -> None:
    bundle, _ = large
    (bundle / "sp/rank0.engine.sha256").write_text(f"{SHA}  rank0.engine\n")
    assert SHA in str(refusal(bundle).found)


def test_a_digest_is_stored_of_the_right_file_only(large: tuple[Path, list[str]]) -> None:
    bundle, _ = large
    files = open_gpu_bundle(bundle, host=HOST).manifest.files
    (bundle / "sp/rank0.engine.sha256").unlink()
    (bundle / "sp/rank0.engine").write_bytes(bytes(2048))
    with pytest.raises(BundleMismatch, match="rank0"):
        store_digests(bundle, files)
    assert not (bundle / "sp/rank0.engine.sha256").exists()


# ----------------------------------------------------------------- config.json


def rewrite(bundle: Path, config: dict[str, Any]) -> None:
    """Another config.json of the SP engine, in a manifest that was written for it as far as it goes."""
    (bundle / "sp/config.json").write_text(json.dumps(config))
    digest = build_config_digest(config["build_config"])

    def change(data: dict[str, Any]) -> None:
        data["files"][0] = gpu_file_entry(bundle, "sp/config.json").model_dump()
        data["engines"]["sp"]["build_config_sha256"] = digest

    edit(bundle, change, seal=True)


def test_the_documented_format_is_read(bundle: Path) -> None:
    config = read_engine_config(bundle / "sp/config.json")
    assert (config.version, config.architecture, config.dtype) == (VERSION, "Qwen2ForCausalLM", "bfloat16")
    assert (config.quantisation, config.kv_dtype) == ("none", "bfloat16")
    assert (config.context_tokens_max, config.requests_max, config.pass_tokens_max) == (4096, 64, 2048)
    assert (config.multiple_profiles, config.gemm_plugin, config.packed, config.reuse) == (True,) * 4
    lp = read_engine_config(bundle / "lp/config.json")
    assert (lp.multiple_profiles, lp.gemm_plugin, lp.opt_tokens) == (False, False, 1024)


@pytest.mark.parametrize(
    ("build", "plugins"),
    [
        ({"kv_cache_type": "KVCacheType.PAGED"}, {}),
        ({"kv_cache_type": "paged"}, {}),
        ({"kv_cache_type": None}, {"paged_kv_cache": True}),
        ({}, {"gemm_plugin": "auto"}),
    ],
)
def test_spellings_of_other_releases_open(bundle: Path, build: Any, plugins: Any) -> None:
    rewrite(bundle, engine_config(build, plugins))
    open_gpu_bundle(bundle, host=HOST)


@pytest.mark.parametrize(
    ("build", "plugins", "field"),
    [
        ({"max_seq_len": 2048}, {}, "limits.context_tokens_max"),
        ({"max_batch_size": 32}, {}, "engines.sp.requests_max"),
        ({"max_num_tokens": 4096}, {}, "engines.sp.profiles"),
        ({"max_num_tokens": 64}, {}, "sp/config.json"),
        ({"max_num_tokens": "many"}, {}, "sp/config.json"),
        ({}, {"multiple_profiles": False}, "engines.sp.profiles"),
        ({}, {"tokens_per_block": 64}, "limits.block_tokens"),
        ({}, {"gemm_plugin": None}, "engines.sp.gemm_plugin"),
        ({}, {"gemm_plugin": "disable"}, "engines.sp.gemm_plugin"),
        ({}, {"remove_input_padding": False}, "sp/config.json"),
        ({"kv_cache_type": "CONTINUOUS"}, {}, "sp/config.json"),
        ({"kv_cache_type": "DISABLED"}, {}, "sp/config.json"),
        ({}, {"use_paged_context_fmha": False}, "sp/config.json"),
        ({"gather_context_logits": True}, {}, "sp/config.json"),
    ],
)
def test_an_engine_that_is_not_what_the_manifest_says_is_refused(
    bundle: Path, build: Any, plugins: Any, field: str
) -> None:
    rewrite(bundle, engine_config(build, plugins))
    assert refusal(bundle).field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": "1.2.0"}, "backend.tensorrt_llm"),
        ({"dtype": "float16"}, "backend.dtype"),
        (
            {"quantization": {"quant_algo": "QuantAlgo.FP8", "kv_cache_quant_algo": "FP8"}},
            "backend.quantisation",
        ),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "backend.kv_dtype"),
        ({"mapping": {"tp_size": 2}}, "backend.tp"),
        ({"mapping": {"pp_size": 2}}, "backend.pp"),
        ({"mapping": 3}, "sp/config.json"),
        ({"architecture": "LlamaForCausalLM"}, "model.architecture"),
        ({"num_hidden_layers": 3}, "model.shape.layers"),
        ({"num_key_value_heads": None}, "model.shape.kv_heads"),
        ({"vocab_size": 999}, "model.shape.vocab"),
        ({"vocab_size": 1024}, None),  # padded to whole rows
    ],
)
def test_an_engine_of_another_model_is_refused(
    bundle: Path, change: dict[str, Any], field: str | None
) -> None:
    config = engine_config({}, {})
    version = change.get("version", VERSION)
    config = {**config, "version": version, "pretrained_config": {**config["pretrained_config"], **change}}
    rewrite(bundle, config)
    if field is None:
        open_gpu_bundle(bundle, host=HOST)
    else:
        assert refusal(bundle).field == field


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": "1.2.1"}', "\x00", '{"pretrained_config": []}']
)
def test_garbage_instead_of_a_config_is_a_value_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"must|missing|not an object|can't be read"):
        read_engine_config(tmp_path / "config.json")


@given(st.permutations(sorted(BUILD_CONFIG)))
def test_the_digest_of_a_build_does_not_depend_on_order(names: list[str]) -> None:
    assert build_config_digest({name: BUILD_CONFIG[name] for name in names}) == build_config_digest(
        BUILD_CONFIG
    )
    other = {**BUILD_CONFIG, "max_seq_len": 1}
    assert build_config_digest(other) != build_config_digest(BUILD_CONFIG)
