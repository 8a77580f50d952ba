"""The plan of a bundle for the PyTorch backend: a checkpoint, sizes to capture, how the LLM is started.

fetch -> verify -> calibrate -> manifest -> publish

There is nothing to convert and no engine: `tensorrt_llm.LLM` reads the checkpoint when it starts, and then
captures a piecewise prefill graph for every T-class. Passes are padded up to the next captured size, so each
costs its class's upper edge, and only these are measured.

The arguments of the LLM are those of its driver, asked with names in place of TensorRT-LLM's classes: what is
shown here is what a child process calls. Which of the optional ones a release has is seen only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from build_scripts.trtllm import estimates
from build_scripts.trtllm.plan_steps import MEASURED, Steps, TrtLlmStep
from build_scripts.trtllm.recipe import child_config
from build_scripts.trtllm.spec import TrtLlmSpec
from engines.bundle_base import CALIBRATION, MANIFEST, TOKENIZER
from engines.trtllm_child.spelling import TorchSpelling
from engines.trtllm_child.torch_driver import arguments_of

CHECKPOINT = "checkpoint"  # the folder in the bundle


@dataclass(frozen=True, slots=True)
class LlmCall:
    """How `tensorrt_llm.LLM` is started.

    arguments: plain data; an object is {class: fields}, a member of an enum its dotted name. optional: names
    that are given only where the release has them, of the LLM and of KvCacheConfig.
    """

    arguments: Mapping[str, Any]
    optional: tuple[str, ...]

    def text(self) -> str:
        """As Python would write it, an argument a line."""
        return f"LLM({_fields(self.arguments, '    ')})"


class _Name:
    """Stands for a class or an enum of TensorRT-LLM: a call gives {class: fields}."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, **fields: Any) -> dict[str, Any]:
        return {self._name: fields}

    def __getattr__(self, member: str) -> str:
        return f"{self._name}.{member}"


class _Api:
    def __getattr__(self, name: str) -> _Name:
        return _Name(name)


def llm_call(spec: TrtLlmSpec, version: str, kv_blocks: int) -> LlmCall:
    """How the LLM of `spec` is started; the checkpoint's path stands as {checkpoint}."""
    optional: list[str] = []

    def noted(**options: Any) -> dict[str, Any]:
        optional.extend(options)
        return options

    def no_transceiver(*given: Any) -> Any:
        raise AssertionError("a bundle is served with prefill and decode in one place")

    config = child_config(spec, version, "{checkpoint}", kv_blocks)
    spelling = TorchSpelling(arguments=noted, kv_cache=noted, captures=True, transceiver=no_transceiver)
    return LlmCall(arguments_of(config, _Api(), spelling), tuple(sorted(optional)))


def torch_steps(steps: Steps, classes: tuple[int, ...], llm: LlmCall) -> tuple[TrtLlmStep, ...]:
    """The steps in order; `steps` makes their keys."""
    spec, count, size = steps.spec, len(classes), steps.spec.shape.weight_bytes
    started = {**steps.machine, "memory_share": spec.memory_share, "llm": llm.arguments}
    measure = {**started, "seconds": spec.calibration_s, "context": spec.context_tokens_max}
    seconds = f"{spec.calibration_s:.0f} s of measuring"
    return (
        steps.fetch(),
        steps.step(
            "verify",
            started,
            does=f"start it, which captures {count} sizes; one request a size, a prompt twice",
            after=("fetch",),
            outputs=("verify.json", "environment.json"),
            calls=("LLM(...)", f"LLM.generate_async(...): one request for each of {count} sizes"),
            time=estimates.start_time(spec, 5.0 * count, "5 s a size"),
            inside=True,
        ),
        steps.step(
            "calibrate",
            measure,
            does=f"measure passes of the captured sizes over history for {spec.calibration_s:.0f} s, fit the "
            "cost model",
            after=("fetch", "verify"),
            outputs=(CALIBRATION, MEASURED),
            calls=("LLM(...)", "LLM.generate_async(...), iteration statistics"),
            time=estimates.start_time(spec, spec.calibration_s, seconds),
            inside=True,
        ),
        steps.step(
            "manifest",
            {},
            does="write down what is in it, from what, for what",
            after=("fetch", "verify", "calibrate"),
            outputs=(MANIFEST, TOKENIZER),
            calls=(),
            time=estimates.Time(2.0, "nothing is hashed again"),
        ),
        steps.publish(("fetch", "manifest"), size),
    )


def torch_notes(spec: TrtLlmSpec, classes: tuple[int, ...]) -> tuple[str, ...]:
    linked = (
        "where the file system has links, the bundle's checkpoint is the same files as those in "
        f"{spec.checkpoint}: replace files there, don't write into them"
    )
    return (
        *((linked,) if spec.checkpoint is not None else ()),
        "releases near 1.0 can't capture prefill graphs at given sizes: the build then ends at verify",
        f"a pass is padded up to the next captured size, and none is larger than {classes[-1]:,} tokens",
        "graphs are captured at every start of the service, not in the build",
    )


def _fields(fields: Mapping[str, Any], indent: str) -> str:
    lines = (f"{indent}{name}={_text(value, indent)},\n" for name, value in fields.items())
    return f"\n{''.join(lines)}{indent[4:]}"


def _text(value: Any, indent: str) -> str:
    if isinstance(value, Mapping):
        ((name, fields),) = value.items()
        return f"{name}({_fields(fields, indent + '    ')})"
    if isinstance(value, str) and "." in value:  # a member of an enum
        return value
    return repr(value)
