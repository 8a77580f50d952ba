"""A machine for TensorRT-LLM builds without a GPU: a checkpoint of a tiny model, an environment with the fake
packages, `nvidia-smi`, and an engine behind the adapter's interface that keeps time by a cost model."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from build_scripts.progress import Silent
from build_scripts.trtllm import runner
from build_scripts.trtllm.job import Tools
from build_scripts.trtllm.spec import TrtLlmSpec
from engines.cost_model import CostModel
from engines.gpu_bundle import GpuBundle, open_gpu_bundle
from engines.gpu_engine_config import read_engine_config
from engines.gpu_host import GpuHost
from engines.models import ModelShape
from engines.simulated import SimulatedModel
from engines.trtllm_child.config import ChildConfig
from engines.trtllm_profiles import stock_profiles
from engines.types import (
    Capabilities,
    Chunking,
    DecodeMode,
    EngineRequest,
    EngineStats,
    KvEvent,
    Layout,
    Padding,
    Pass,
    PassResult,
    Ran,
)

VERSION, TENSORRT = "1.2.1", "10.14.1.48"
SHAPES = {
    "qwen2": ModelShape("tiny-qwen", 2, 64, 128, 4, 2, 16, 600, tied=True),
    "llama": ModelShape("tiny-llama", 2, 64, 128, 4, 2, 16, 600),
}
CONTEXT = 2_048
BLOCK = 32
GPU_MIB = 4_800  # RESERVE_BYTES for two engines and little more: pools stay small
COST = CostModel(1e-4, 2e-3, 1e-9, 4e-6, 1e-8, 1e-9)
# TensorRT's GEMMs are slower here where a pass is bound by compute, and equal where by memory.
COSTS = {True: COST, False: replace(COST, beta=5e-6)}


class Heard(Silent):
    """Which steps ran and which were skipped; `stop_at` plays the power failure, before or after a step."""

    def __init__(self, stop_at: str = "", *, at_end: bool = False) -> None:
        self.stop_at, self.at_end = stop_at, at_end
        self.ran: list[str] = []
        self.skipped: list[str] = []
        self.said: dict[str, str] = {}
        self.updates: list[str] = []

    def begin(self, step: str, detail: str) -> None:
        if step == self.stop_at and not self.at_end:
            raise KeyboardInterrupt
        self.ran.append(step)

    def update(self, share: float, detail: str = "") -> None:
        assert 0.0 <= share <= 1.0
        self.updates.append(detail)

    def end(self, detail: str) -> None:
        self.said[self.ran[-1]] = detail
        if self.ran[-1] == self.stop_at and self.at_end:  # its outputs are there, its record is not
            raise KeyboardInterrupt

    def skip(self, step: str) -> None:
        self.skipped.append(step)


def write_checkpoint(directory: Path, architecture: str = "qwen2", **changed: Any) -> Path:
    """A Hugging Face checkpoint of `SHAPES[architecture]`. changed: keys of its config.json."""
    shape = SHAPES[architecture]
    directory.mkdir(parents=True, exist_ok=True)
    name = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[architecture]
    config = {
        "architectures": [name],
        "model_type": architecture,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 4 * CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": [1, 2],
        "torch_dtype": "bfloat16",
        **changed,
    }
    vocabulary = {"<s>": 0, "<|text_end|>": 1, "<|turn_end|>": 2, "a": 3}
    vocabulary |= {f"w{number}": number for number in range(4, shape.vocab)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": text,
                "special": True,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for text, number in vocabulary.items()
            if number < 3
        ],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    }
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "<|turn_end|>"},
        "add_bos_token": architecture == "llama",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|turn_end|>{% endfor %}",
    }
    for file, data in (
        ("config.json", config),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
    ):
        (directory / file).write_text(json.dumps(data), encoding="utf-8")
    (directory / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Made up\n", encoding="utf-8")
    write_weights(directory / "model.safetensors")
    return directory


def write_weights(path: Path, seed: int = 0) -> None:
    """One tensor in the safetensors format."""
    values = bytes((seed + n) % 251 for n in range(2_048))
    head = json.dumps({"w": {"dtype": "U8", "shape": [2_048], "data_offsets": [0, 2_048]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + values)


def write_python(
    directory: Path, packages: Sequence[Path], version: str = VERSION, tensorrt: str = TENSORRT
) -> Path:
    """A virtual environment whose site-packages has `packages` (folders) and the metadata of both wheels."""
    major, minor = sys.version_info[:2]
    site = directory / "lib" / f"python{major}.{minor}" / "site-packages"
    site.mkdir(parents=True)
    (directory / "bin").mkdir()
    base = Path(os.path.realpath(sys.executable))
    settings = f"home = {base.parent}\ninclude-system-site-packages = false\n"
    (directory / "pyvenv.cfg").write_text(settings, encoding="utf-8")
    python = directory / "bin" / "python"
    python.symlink_to(base)
    (site / "fakes.pth").write_text("".join(f"{path}\n" for path in packages), encoding="utf-8")
    for name, number in (("tensorrt_llm", version), ("tensorrt", tensorrt)):
        if not any(list(path.glob(f"{name}-*.dist-info")) for path in packages):
            info = site / f"{name}-{number}.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
            (info / "METADATA").write_text(text, encoding="utf-8")
    return python


def write_smi(
    directory: Path,
    name: str = "NVIDIA H200",
    mib: int = GPU_MIB,
    driver: str = "570.124.06",
    used_mib: int = 4,
) -> Path:
    """`nvidia-smi` that lists one GPU; returns the folder for PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    row = {
        "index": "0",
        "uuid": "GPU-0a",
        "name": name,
        "compute_cap": "9.0",
        "memory.total": str(mib),
        "memory.used": str(used_mib),
        "driver_version": driver,
        "mig.mode.current": "Disabled",
    }
    script = directory / "nvidia-smi"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nrow = {row!r}\n"
        "names = next(a for a in sys.argv if a.startswith('--query-gpu=')).partition('=')[2].split(',')\n"
        "print(', '.join(row[name] for name in names))\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    return directory


def spec_for(directory: Path, python: Path, architecture: str = "qwen2", **changed: Any) -> TrtLlmSpec:
    """A build below `directory` of a checkpoint that is there, or is written now."""
    checkpoint = directory / "checkpoint"
    if not checkpoint.exists():
        write_checkpoint(checkpoint, architecture)
    fields: dict[str, Any] = {
        "model": SHAPES[architecture].name,
        "architecture": architecture,
        "shape": SHAPES[architecture],
        "out": str(directory / "bundles"),
        "work_dir": directory / "bundles" / ".work" / "tiny",
        "checkpoint": checkpoint,
        "python": python,
        "gpu_memory_bytes": 141_000_000_000,
        "pass_tokens_max": 512,
        "requests_max": 16,
        "requests_opt": 4,
        "context_tokens_max": CONTEXT,
        "block_tokens": BLOCK,
        "lp_tokens_opt": 512,
        "calibration_s": 0.05,
        "memory_share": 0.9 if changed.get("separate_lp") else 0.45,
    }
    return TrtLlmSpec(**{**fields, **changed})


@dataclass
class Opened:
    """An engine that was opened, and whether it was closed."""

    config: ChildConfig
    engine: ModelEngine


class ModelEngine:
    """What `engines.trtllm.open_engine` gives, without an executor: a pass takes what the cost model says.

    split: in how many iterations a pass runs. reuse: whether blocks are found again.
    """

    def __init__(self, config: ChildConfig, *, split: int = 1, reuse: bool = True) -> None:
        engine = read_engine_config(Path(config.model_dir) / "config.json")
        self._split, self._reuse, self.closed = split, reuse, False
        self._profiles = stock_profiles(config.pass_tokens_max)
        capabilities = Capabilities(
            layout=Layout.PACKED,
            padding=Padding.NOTHING,
            chunking=Chunking.PREFIX_REUSE,
            merges_lanes=True,
            decode=DecodeMode.BESIDE,
            requests_max=config.requests_max,
            context_tokens_max=config.context_tokens_max,
            block_tokens=config.block_tokens,
            kv_blocks_total=config.kv_blocks,
        )
        self.cost = COSTS[engine.gemm_plugin]
        self._model = SimulatedModel(capabilities, self._profiles, self.cost)

    @property
    def capabilities(self) -> Capabilities:
        return self._model.capabilities

    @property
    def profiles(self) -> Any:
        return self._profiles

    def submit(self, request: EngineRequest) -> None:
        self._model.submit(request)

    def execute(self, pass_: Pass) -> PassResult:
        self._model.begin(pass_)
        result = self._model.finish()
        items = result.items
        if not self._reuse:
            items = tuple(replace(item, reused=0) for item in items)
        ran = Ran(self._split, len(pass_.items), sum(item.computed for item in items))
        return replace(result, items=items, ran=ran)

    def measure(self, new_tokens: int, history: int) -> float:
        assert new_tokens + history < self.capabilities.context_tokens_max
        return self.cost.request_s(new_tokens, history)

    def cancel(self, request_id: str) -> None:
        self._model.cancel(request_id)

    def stats(self) -> EngineStats:
        return self._model.stats()

    def kv_events(self) -> tuple[KvEvent, ...]:
        return ()

    def close(self) -> None:
        self.closed = True


def model_tools(opened: list[Opened] | None = None, **options: Any) -> Tools:
    """Tools that open a `ModelEngine`; `opened` hears of each."""

    def open_engine(config: ChildConfig, python: Path, log: Path) -> ModelEngine:
        engine = ModelEngine(config, **options)
        if opened is not None:
            assert all(one.engine.closed for one in opened), "two engines at once on one GPU"
            opened.append(Opened(config, engine))
        return engine

    return Tools(_host, open_engine)


def _host(python: Path) -> GpuHost:
    return _host_on(python, os.environ["PATH"])


@cache
def _host_on(python: Path, path: str) -> GpuHost:
    """As found; once for each machine that a test makes up."""
    return GpuHost.current(python)


def build(spec: TrtLlmSpec, tools: Tools | None = None, **options: bool) -> Heard:
    heard = Heard()
    runner.build(spec, heard, tools=tools or model_tools(), **options)
    return heard


def opened(spec: TrtLlmSpec, full: bool = True) -> GpuBundle:
    return open_gpu_bundle(Path(spec.target), python=spec.python, full=full)
