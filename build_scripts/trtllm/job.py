"""One build under way: its plan, its machine, its folders, and the two ways in which a step reaches the GPU.

A step either runs inside TensorRT-LLM's environment (`inside`), or asks an engine through the adapter that
the service will use (`open`). One engine is open at a time: two on one GPU would need memory for two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from build_scripts.spec import BuildError
from build_scripts.store import Store
from build_scripts.trtllm.estimates import RESERVE_BYTES, kv_bytes_per_token
from build_scripts.trtllm.launch import Update, run_inside
from build_scripts.trtllm.measure import MeasurableEngine
from build_scripts.trtllm.plan import TrtLlmPlan
from build_scripts.trtllm.recipe import child_config
from build_scripts.trtllm.spec import TrtLlmSpec
from engines.executor.types import ExecutorSettings
from engines.gpu_host import Gpu, GpuHost
from engines.trtllm_child.config import ChildConfig, Driver

CHOICE = "choice.json"
FACTS = "facts.json"  # beside an engine: how it came out
SOURCE = "source.json"
ENVIRONMENT = "environment.json"
VERIFIED = "verify.json"
_TIME_FACTOR = 8.0  # a step may take so many times its estimate, which is a guess,
_TIME_MIN_S = 1_800.0  # and at least this long
_DOWNLOAD_S = 86_400.0  # a slow network is no fault
_SMALLER_PLANS = ", gemm plugin (its plans hold one copy of the weights) or FP8"
_PASS_TIMEOUT_S = 120.0  # the first pass of an engine makes its contexts


def _open_engine(config: ChildConfig, python: Path, log: Path) -> MeasurableEngine:
    from engines import trtllm, trtllm_torch

    open_engine = trtllm.open_engine if config.driver is Driver.ENGINE else trtllm_torch.open_engine
    return open_engine(config, python, ExecutorSettings(pass_timeout_s=_PASS_TIMEOUT_S), log=log)


@dataclass(frozen=True, slots=True)
class Tools:
    """What a build reaches the machine by; tests give others. open_engine: the last argument is its log."""

    host: Callable[[Path], GpuHost] = GpuHost.current
    open_engine: Callable[[ChildConfig, Path, Path], MeasurableEngine] = _open_engine


@dataclass(frozen=True, slots=True)
class Job:
    """See the module text. commit: of the checkpoint on the hub; None: it is local."""

    plan: TrtLlmPlan
    store: Store
    host: GpuHost
    gpu: Gpu
    commit: str | None = None
    checkpoint_hashes: Mapping[str, str] = field(default_factory=dict)
    tools: Tools = field(default_factory=Tools)
    update: Update = lambda share, words: None

    @property
    def spec(self) -> TrtLlmSpec:
        return self.plan.spec

    @property
    def checkpoint(self) -> Path:
        """Directory of the Hugging Face checkpoint."""
        return self.store.folder("fetch") if self.spec.checkpoint is None else self.spec.checkpoint.resolve()

    @property
    def timing_cache(self) -> Path:
        """Kernel timings of all builds here for this target; they mean nothing for another."""
        target = self.plan.target
        words = (target.tensorrt_llm, target.tensorrt, target.gpu, target.compute_capability)
        return self.store.root / "timing" / f"{'_'.join(words).replace(' ', '-')}.cache"

    @property
    def choice(self) -> dict[str, Any]:
        return self.read("choose", CHOICE)

    def engine_folder(self, name: str) -> Path:
        """Folder of the engine that the bundle will have as `sp` or `lp`; else the checkpoint."""
        if self.spec.torch:
            return self.checkpoint
        return self.store.folder(self.choice["kept"] if name == "sp" else "build-lp")

    def read(self, step: str, name: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads((self.store.folder(step) / name).read_text(encoding="utf-8"))
        return data

    def log(self, name: str) -> Path:
        """Where what a process says goes."""
        logs = self.store.root / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{name}.log"

    def inside(self, step: str, what: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of `what`, a step of `inside`, for the build step `step`. Raises BuildError."""
        estimate_s = max((s.time.seconds for s in self.plan.steps if s.name == step), default=0.0)
        return run_inside(
            self.spec.python,
            what,
            request,
            scratch=self.store.root / "scratch",
            log=self.log(step if what == step else f"{step}-{what}"),
            timeout_s=max(_DOWNLOAD_S if what == "fetch" else _TIME_MIN_S, _TIME_FACTOR * estimate_s),
            update=self.update,
        )

    @contextmanager
    def open(self, step: str, directory: Path, kv_blocks: int) -> Iterator[MeasurableEngine]:
        """The engine in `directory`, through the adapter, for the build step `step`."""
        spec = self.spec
        version = self.plan.target.tensorrt_llm
        config = child_config(spec, version, str(directory.resolve()), kv_blocks)
        engine = self.tools.open_engine(config, spec.python, self.log(f"{step}-{directory.name}"))
        try:
            yield engine
        finally:
            engine.close()

    def kv_blocks(self, plan_bytes: Sequence[int], activation_bytes: Sequence[int]) -> int:
        """Blocks of each engine's pool: what is left of the allowed memory, shared out evenly.

        Raises BuildError when the longest request does not fit.
        """
        spec = self.spec
        usable = int(spec.memory_share * min(spec.gpu_memory_bytes, self.gpu.memory_bytes))
        fixed = sum(plan_bytes) + sum(activation_bytes) + RESERVE_BYTES * len(plan_bytes)
        block_bytes = spec.block_tokens * kv_bytes_per_token(spec)
        blocks = (usable - fixed) // len(plan_bytes) // block_bytes
        needed = -(-spec.context_tokens_max // spec.block_tokens)
        if blocks < needed:
            plans, beside = ("weights", "graphs") if spec.torch else ("plans", "activations")
            raise BuildError(
                f"{usable / 1e9:.1f} GB may be used and {fixed / 1e9:.1f} GB are taken by {plans} "
                f"({sum(plan_bytes) / 1e9:.1f}), {beside} ({sum(activation_bytes) / 1e9:.1f}), buffers. "
                f"That leaves KV for {max(0, blocks) * spec.block_tokens} tokens, fewer than "
                f"context_tokens_max ({spec.context_tokens_max}); use a smaller context_tokens_max or "
                "pass_tokens_max" + ("" if spec.torch else _SMALLER_PLANS)
            )
        return int(blocks)

    def memory_bytes(self, plan_bytes: Sequence[int], activation_bytes: Sequence[int], kv_blocks: int) -> int:
        """All that the engines take on the GPU with pools of `kv_blocks` each."""
        count, spec = len(plan_bytes), self.spec
        pool = count * kv_blocks * spec.block_tokens * kv_bytes_per_token(spec)
        return sum(plan_bytes) + sum(activation_bytes) + RESERVE_BYTES * count + pool


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
