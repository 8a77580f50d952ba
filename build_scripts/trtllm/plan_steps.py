"""The steps of a TensorRT-LLM build in order: what each does, calls and leaves, its key and its estimates.

A key covers all that a step's outcome depends on, the keys of the steps before it included: the recipe of
its calls, and of the machine what the step really sees of it. A plain conversion depends on the library
alone; kernels, scales and times depend on the GPU as well. No path is in a key, and nothing that only decides
where the bundle goes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from build_scripts.trtllm import estimates
from build_scripts.trtllm.estimates import Time
from build_scripts.trtllm.recipe import convert_arguments
from build_scripts.trtllm.spec import EngineName, GemmChoice, Quantisation, TrtLlmSpec
from engines.bundle_base import CALIBRATION, MANIFEST, TOKENIZER
from engines.trtllm_profiles import ProfileRange

MEASURED = "measured.json"

# Raised when a step would give something else for the same inputs.
VERSIONS = {
    "fetch": 1,
    "convert": 1,
    "build-sp-plugin": 1,
    "build-sp-tensorrt": 1,
    "choose": 1,
    "build-lp": 1,
    "share": 1,
    "verify": 1,
    "calibrate": 1,
    "manifest": 1,
    "publish": 1,
}


@dataclass(frozen=True, slots=True)
class Target:
    """What an engine is bound to. `measured`: read from a machine, not the wanted values of a dry run.

    tensorrt: empty for the PyTorch backend.
    """

    tensorrt_llm: str
    tensorrt: str
    gpu: str
    compute_capability: str
    measured: bool = False


@dataclass(frozen=True, slots=True)
class TrtLlmStep:
    """One step.

    after: the steps whose outputs it reads. outputs: files. calls: what is called, as text, paths in braces.
    inside: whether it runs in TensorRT-LLM's own environment. time: estimate with its basis. size_bytes: of
    its outputs, at least; size_most_bytes: at most, where that is not known.
    """

    name: str
    does: str
    after: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: tuple[str, ...]
    key: str
    time: Time
    size_bytes: int = 0
    size_most_bytes: int | None = None
    inside: bool = False


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One engine: its profiles in the executor's order, and the arguments of each way to build it."""

    name: EngineName
    ranges: tuple[ProfileRange, ...]
    arguments: Mapping[str, Mapping[str, Any]]  # by step
    commands: Mapping[str, tuple[str, ...]]  # the nearest command line, by step


def sp_builds(spec: TrtLlmSpec) -> dict[str, bool]:
    """The steps that build an SP engine, and whether each takes the GEMM plugin."""
    wanted = {"build-sp-plugin": True, "build-sp-tensorrt": False}
    if spec.gemm is GemmChoice.BOTH:
        return wanted
    return {name: plugin for name, plugin in wanted.items() if plugin is (spec.gemm is GemmChoice.PLUGIN)}


class Steps:
    """Makes the steps in order; each key covers the keys of the steps before it."""

    def __init__(
        self,
        spec: TrtLlmSpec,
        target: Target,
        checkpoint_key: str | None,
        calibration_key: str | None,
        code_key: str,
        engines: tuple[EnginePlan, ...],
    ) -> None:
        self.spec, self.target, self.checkpoint_key = spec, target, checkpoint_key
        self.calibration_key = calibration_key or str(spec.calibration_text)
        self.code_key, self.engines = code_key, engines
        self.keys: dict[str, str] = {}
        self.libraries = {"tensorrt_llm": target.tensorrt_llm, "tensorrt": target.tensorrt}
        self.machine = {**self.libraries, "gpu": target.gpu, "sm": target.compute_capability}

    def all(self) -> tuple[TrtLlmStep, ...]:
        before = (self.fetch(), self._convert())
        builds = tuple(self._build_sp(name) for name in sp_builds(self.spec))
        choose = self._choose(tuple(step.name for step in builds))
        long_prefill = self._build_lp() if self.spec.separate_lp else self._share()
        return (*before, *builds, choose, long_prefill, *self._end(long_prefill.name))

    def step(self, name: str, inputs: Mapping[str, object], **fields: Any) -> TrtLlmStep:
        after: tuple[str, ...] = fields["after"]
        # What was fetched is known by its hashes, whatever code fetched it: it is not fetched again.
        code = {} if name == "fetch" else {"code": self.code_key}
        body = {**inputs, **code, "after": [self.keys[other] for other in after]}
        text = json.dumps([name, VERSIONS[name], body], sort_keys=True)
        self.keys[name] = hashlib.sha256(text.encode()).hexdigest()
        return TrtLlmStep(name=name, key=self.keys[name], **fields)

    def fetch(self) -> TrtLlmStep:
        spec = self.spec
        if spec.checkpoint is not None:
            given = self.checkpoint_key or str(spec.checkpoint)
            return self.step(
                "fetch",
                {"checkpoint": given},
                does=f"take the checkpoint in {spec.checkpoint}, check its sizes, hash its files",
                after=(),
                outputs=("source.json",),
                calls=(f"read {spec.checkpoint}/config.json and *.safetensors; nothing is downloaded",),
                time=estimates.fetch_time(spec),
            )
        return self.step(
            "fetch",
            {"repo": spec.repo, "revision": self.checkpoint_key or spec.revision},
            does=f"download {spec.repo} at {spec.revision}, check its sizes, hash its files",
            after=(),
            outputs=("source.json", "config.json", "tokenizer.json", "*.safetensors"),
            calls=(f"huggingface_hub.snapshot_download({spec.repo!r}, revision={spec.revision!r})",),
            time=estimates.fetch_time(spec),
            size_bytes=spec.shape.weight_bytes,
            inside=True,
        )

    def _convert(self) -> TrtLlmStep:
        recipe = convert_arguments(self.spec)
        fp8 = self.spec.quantisation is Quantisation.FP8
        scaled = {**self.machine, "texts": self.calibration_key}
        return self.step(
            "convert",
            # Scales are measured on the GPU; a plain conversion is the same on each.
            {"recipe": recipe, **(scaled if fp8 else self.libraries)},
            does="quantise to FP8 with calibrated scales" if fp8 else "write the TensorRT-LLM checkpoint",
            after=("fetch",),
            outputs=("config.json", "rank0.safetensors"),
            calls=_convert_calls(recipe),
            time=estimates.convert_time(self.spec),
            size_bytes=estimates.weight_bytes(self.spec),
            inside=True,
        )

    def _build_sp(self, name: str) -> TrtLlmStep:
        engine = self.engines[0]
        recipe, plugin = engine.arguments[name], sp_builds(self.spec)[name]
        profiles = len(engine.ranges)
        least, most = estimates.plan_bytes(self.spec, gemm_plugin=plugin, profiles=profiles)
        whose = "cuBLASLt by the GEMM plugin" if plugin else "TensorRT's own"
        return self.step(
            name,
            {"recipe": recipe, **self.machine},
            does=f"build the SP engine with {profiles} profiles, GEMMs {whose}",
            after=("convert",),
            outputs=("config.json", "rank0.engine", "model.cache"),
            calls=_build_calls(recipe),
            time=estimates.build_time(self.spec, gemm_plugin=plugin, profiles=profiles),
            size_bytes=least,
            size_most_bytes=most if most > least else None,
            inside=True,
        )

    def _choose(self, builds: tuple[str, ...]) -> TrtLlmStep:
        one = len(builds) == 1
        count = len(self.engines[0].ranges)
        return self.step(
            "choose",
            self.machine,
            does="take the only engine" if one else f"time both at the {count} class edges, keep the faster",
            after=builds,
            outputs=("choice.json",),
            calls=() if one else (f"Executor({{engine}}, ...): {count} pass sizes, medians compared",),
            time=Time(1.0, "nothing to compare")
            if one
            else estimates.load_time(self.spec, 2, 20.0 * count, f"20 s a class for {count} classes"),
            inside=not one,
        )

    def _build_lp(self) -> TrtLlmStep:
        engine = self.engines[1]
        recipe = next(iter(engine.arguments.values()))
        low, high, best = engine.ranges[0][0], engine.ranges[0][2], engine.ranges[0][1]
        return self.step(
            "build-lp",
            {"recipes": dict(engine.arguments), **self.machine},
            does=f"build an LP engine, one profile {low} to {high} tuned at {best}; GEMMs as chosen",
            after=("convert", "choose"),
            outputs=("config.json", "rank0.engine", "model.cache"),
            calls=_build_calls(recipe),
            time=estimates.build_time(self.spec, gemm_plugin=True, profiles=1),
            size_bytes=estimates.weight_bytes(self.spec),
            inside=True,
        )

    def _share(self) -> TrtLlmStep:
        low, _, high = self.engines[0].ranges[-1]
        return self.step(
            "share",
            {},
            does=f"long prefills run on the SP engine, last profile ({low} to {high}): no second copy",
            after=("choose",),
            outputs=("share.json",),
            calls=(),
            time=Time(1.0, "nothing to build"),
        )

    def _end(self, long_prefill: str) -> tuple[TrtLlmStep, ...]:
        spec, count = self.spec, len(self.engines)
        profiles = sum(len(engine.ranges) for engine in self.engines)
        size = count * estimates.weight_bytes(spec)
        engines = ("choose", long_prefill)
        measure = {
            **self.machine,
            "seconds": spec.calibration_s,
            "memory_share": spec.memory_share,
            "context": spec.context_tokens_max,
        }
        return (
            self.step(
                "verify",
                {**self.machine, "memory_share": spec.memory_share, "memory": spec.gpu_memory_bytes},
                does="load it, read its profiles back, run one request a class, record sizes",
                after=engines,
                outputs=("verify.json",),
                calls=(
                    "ICudaEngine.get_tensor_profile_shape('input_ids', i) == the profiles of this plan",
                    f"Executor.enqueue_requests([...]): one request for each of {profiles} profiles",
                ),
                time=estimates.load_time(spec, count, 10.0 * profiles, "10 s a profile"),
                inside=True,
            ),
            self.step(
                "calibrate",
                measure,
                does=f"measure passes over T and history for {spec.calibration_s:.0f} s, fit the cost model",
                after=(*engines, "verify"),
                outputs=(CALIBRATION, MEASURED),
                calls=("Executor.enqueue_requests([...]), iteration statistics",),
                time=estimates.load_time(
                    spec, count, count * spec.calibration_s, f"{spec.calibration_s:.0f} s of measuring each"
                ),
                inside=True,
            ),
            self.step(
                "manifest",
                {},
                does="write down what was built, from what, for what",
                after=("fetch", "convert", *engines, "verify", "calibrate"),
                outputs=(MANIFEST, TOKENIZER),
                calls=(),
                time=Time(2 + size / 1e9, "hashing at 1 GB/s"),
            ),
            self.publish((*engines, "manifest"), size),
        )

    def publish(self, after: tuple[str, ...], size_bytes: int) -> TrtLlmStep:
        return self.step(
            "publish",
            {},
            does=f"put it into {self.spec.target}",
            after=after,
            outputs=(),
            calls=(),
            time=estimates.copy_time(size_bytes),
            size_bytes=size_bytes,
        )


def _convert_calls(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    mapping = f"Mapping({_keywords(recipe['mapping'])})"
    quant = recipe["quant_config"]
    quant_config = "None" if quant is None else f"QuantConfig({_keywords(quant)})"
    call = (
        f"model = {recipe['model_class']}.{recipe['call']}({_keywords(recipe['arguments'])}, "
        f"mapping={mapping}, quant_config={quant_config})"
    )
    if recipe["save"] is None:
        return (call.removeprefix("model = "),)
    return (call, f"model.save_checkpoint({_keywords(recipe['save'])})")


def _build_calls(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"model = {recipe['model_class']}.from_checkpoint({_keywords(recipe['load'])})",
        "engine = build(model, BuildConfig(..., plugin_config=PluginConfig(...)))",
        f"engine.save({_keywords(recipe['save'])})",
    )


def _keywords(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
