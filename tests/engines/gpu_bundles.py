"""GPU bundles made by hand: small files in the documented format, no GPU and no TensorRT-LLM."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engines.bundle_base import CALIBRATION, MANIFEST, TOKENIZER, BundleMismatch, Cost, Text
from engines.cost_model import CostModel
from engines.gpu_bundle import open_gpu_bundle
from engines.gpu_engine_config import build_config_digest
from engines.gpu_host import Gpu, GpuHost
from engines.gpu_manifest import (
    TRTLLM,
    TRTLLM_TORCH,
    Candidate,
    EngineBuild,
    Engines,
    Environment,
    GpuBackend,
    GpuIdentity,
    GpuLimits,
    GpuManifest,
    GpuModel,
    GpuSource,
    TorchBuild,
    gpu_file_entry,
)
from engines.models import ModelShape
from engines.profiles import Profiles
from engines.trtllm_profiles import profile_ranges, stock_profiles
from engines.types import Layout, Padding

VERSION, TENSORRT = "1.2.1", "10.14.1.48"
SHAPE = ModelShape("tiny-qwen", 2, 64, 128, 4, 2, 16, 1000, tied=True)
GPU = Gpu("NVIDIA H200", "9.0", 150_754_820_096, "570.124.06", "GPU-aaaa")
HOST = GpuHost((GPU,), VERSION, TENSORRT, Path("/opt/trtllm/bin/python"))
COST = CostModel(0.0, 0.002, 1e-10, 1e-6, 1e-7, 1e-9, origin="made up")
TOKENS = 2048

# `Engine.save` of the 1.x line, shortened to what is read and some that is not.
BUILD_CONFIG: dict[str, Any] = {
    "max_input_len": 4095,
    "max_seq_len": 4096,
    "opt_batch_size": 8,
    "max_batch_size": 64,
    "max_beam_width": 1,
    "max_num_tokens": TOKENS,
    "opt_num_tokens": None,
    "kv_cache_type": "PAGED",
    "gather_context_logits": False,
    "gather_generation_logits": False,
    "strongly_typed": True,
    "force_num_profiles": None,
    "profiling_verbosity": "layer_names_only",
    "weight_streaming": False,
    "plugin_config": {
        "dtype": "bfloat16",
        "gpt_attention_plugin": "bfloat16",
        "gemm_plugin": "bfloat16",
        "context_fmha": True,
        "paged_kv_cache": None,
        "remove_input_padding": True,
        "tokens_per_block": 32,
        "use_paged_context_fmha": True,
        "multiple_profiles": True,
    },
}
PRETRAINED: dict[str, Any] = {
    "architecture": "Qwen2ForCausalLM",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 16,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
    "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
}
HF_CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    **{
        name: value
        for name, value in PRETRAINED.items()
        if name.startswith(("hidden", "num", "int", "vocab"))
    },
}
LP_BUILD: dict[str, Any] = {"opt_num_tokens": 1024}  # what is other than in BUILD_CONFIG
LP_PLUGINS: dict[str, Any] = {"gemm_plugin": None, "multiple_profiles": False}
ENGINE_FILES = (
    *("sp/config.json", "sp/rank0.engine", "lp/config.json", "lp/rank0.engine"),
    *(TOKENIZER, CALIBRATION),
)
TORCH_FILES = ("checkpoint/config.json", "checkpoint/model.safetensors", TOKENIZER, CALIBRATION)


def engine_config(build: dict[str, Any], plugins: dict[str, Any]) -> dict[str, Any]:
    """Contents of an engine's config.json; the arguments replace fields of build_config."""
    config = {**BUILD_CONFIG, **build, "plugin_config": {**BUILD_CONFIG["plugin_config"], **plugins}}
    return {"version": VERSION, "pretrained_config": PRETRAINED, "build_config": config}


def put_file(path: Path, name: str, content: bytes) -> None:
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_bytes(content)


def engine_bundle(path: Path, change: Callable[[GpuManifest], GpuManifest] = lambda m: m) -> Path:
    """A finished bundle of engines. change: of the manifest, which is sealed afterwards."""
    put_file(path, "sp/config.json", json.dumps(engine_config({}, {})).encode())
    put_file(path, "lp/config.json", json.dumps(engine_config(LP_BUILD, LP_PLUGINS)).encode())
    for name in ("sp", "lp"):
        put_file(path, f"{name}/rank0.engine", bytes(range(256)) * 8)
    return finish(path, TRTLLM, ENGINE_FILES, change)


def torch_bundle(path: Path, change: Callable[[GpuManifest], GpuManifest] = lambda m: m) -> Path:
    put_file(path, "checkpoint/config.json", json.dumps(HF_CONFIG).encode())
    put_file(path, "checkpoint/model.safetensors", bytes(range(256)) * 8)
    return finish(path, TRTLLM_TORCH, TORCH_FILES, change)


def finish(
    path: Path, backend: str, names: tuple[str, ...], change: Callable[[GpuManifest], GpuManifest]
) -> Path:
    put_file(path, TOKENIZER, b"{}")
    put_file(path, CALIBRATION, b"tokens,ms\n")
    (path / MANIFEST).write_text(change(manifest(path, backend, names)).sealed().to_text())
    return path


def manifest(path: Path, backend: str, names: tuple[str, ...]) -> GpuManifest:
    engines = backend == TRTLLM
    sp = EngineBuild(
        directory="sp",
        build_config_sha256=build_config_digest(BUILD_CONFIG),
        gemm_plugin=True,
        plan_bytes=2048,
        profiles=profile_ranges(TOKENS, requests_max=64),
        requests_max=64,
    )
    lp = EngineBuild(
        directory="lp",
        build_config_sha256=build_config_digest(engine_config(LP_BUILD, LP_PLUGINS)["build_config"]),
        gemm_plugin=False,
        plan_bytes=2048,
        profiles=((1, 1024, TOKENS),),
        requests_max=64,
    )
    source_file = {"name": "model.safetensors", "size_bytes": 9, "sha256": "0" * 64}
    return GpuManifest(
        model=GpuModel(
            name="tiny-qwen",
            architecture="qwen2",
            shape=SHAPE,
            source=GpuSource(repo="some/model", revision="abc", licence="Apache-2.0", files=(source_file,)),  # type: ignore[arg-type]
        ),
        backend=GpuBackend(
            name=backend,
            tensorrt_llm=VERSION,
            tensorrt=TENSORRT if engines else None,
            dtype="bfloat16",
            quantisation="none",
            kv_dtype="bfloat16",
        ),
        gpu=GpuIdentity(
            name=GPU.name,
            compute_capability=GPU.compute_capability,
            memory_bytes=GPU.memory_bytes,
            driver=GPU.driver,
        ),
        engines=Engines(sp=sp, lp=lp) if engines else None,
        checkpoint=None if engines else TorchBuild(directory="checkpoint", capture_tokens=(64, 256)),
        profiles=stock_profiles(TOKENS)
        if engines
        else Profiles(Layout.PACKED, Padding.CLASS, (64, 256, TOKENS)),
        limits=GpuLimits(
            context_tokens_max=4096, requests_max=64, block_tokens=32, kv_blocks=512, memory_bytes=10**9
        ),
        text=Text(chat_template="{{ x }}", bos_id=1, eos_id=2, add_bos=False),
        cost=Cost(
            model=COST,
            median_error=0.01,
            worst_error=0.1,
            sample_count=8,
            boundary_tokens=COST.boundary_tokens(0),
            knee_tokens=COST.knee_tokens(),
            quick=False,
        ),
        candidates=candidates() if engines else (),
        environment=Environment(python="3.12.3", torch="2.9.0", cuda="13.0"),
        files=tuple(gpu_file_entry(path, name) for name in names),
        steps={"convert": "a", "build": "b"},
    )


def candidates() -> tuple[Candidate, ...]:
    times = ((64, 0.002), (128, 0.003))
    return (
        Candidate(engine="sp", gemm_plugin=True, plan_bytes=2048, pass_s=times, kept=True),
        Candidate(engine="sp", gemm_plugin=False, plan_bytes=4096, pass_s=times, kept=False),
    )


def refusal(path: Path, host: GpuHost = HOST, **options: Any) -> BundleMismatch:
    with pytest.raises(BundleMismatch) as caught:
        open_gpu_bundle(path, host=host, **options)
    error = caught.value
    for part in (error.field, error.expected, error.found, error.remedy, path):
        assert str(part) in str(error)
    assert error.remedy
    return error


def edit(path: Path, change: Callable[[dict[str, Any]], None], *, seal: bool) -> None:
    """Change the manifest; seal: as a builder would that had written this from the start, where it can."""
    data = json.loads((path / MANIFEST).read_text())
    change(data)
    text = json.dumps(data, indent=2, sort_keys=True) + "\n"
    if seal:
        with contextlib.suppress(ValidationError):  # else not even a builder can write it
            text = GpuManifest.model_validate(data).sealed().to_text()
    (path / MANIFEST).write_text(text)


def put(data: Any, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        data = data[int(name) if name.isdigit() else name]
    data[last] = value
