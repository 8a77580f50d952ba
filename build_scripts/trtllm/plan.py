"""What a TensorRT-LLM build will do, worked out without doing any of it: no GPU, no network, no disk.

fetch -> convert -> build-sp-plugin, build-sp-tensorrt -> choose -> build-lp or share -> verify -> calibrate
      -> manifest -> publish

With the PyTorch backend there is nothing to convert or to build, see `torch_plan`.

Every step has a content key, as in `build_scripts.plan`: the hash of all that its outcome depends on, the
keys of the steps before it included. What a key covers of the machine is its `Target`: the exact versions of
both libraries, and name and compute capability of the GPU, on which kernels are timed. Paths are in no key.

The grid: a cell (L, B) is T = L x B tokens of one pass, and the T-class of that T is the profile which runs
it. Six profiles of one engine share one set of weights; a cell above the largest pass is rejected, and its
requests run as several passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from build_scripts.trtllm import estimates
from build_scripts.trtllm.estimates import GraphComparison, Memory
from build_scripts.trtllm.plan_steps import EnginePlan, Steps, Target, TrtLlmStep, sp_builds
from build_scripts.trtllm.recipe import (
    build_arguments,
    cli_line,
    convert_arguments,
    pass_classes,
    pass_tokens,
)
from build_scripts.trtllm.spec import EngineName, Quantisation, TrtLlmSpec
from build_scripts.trtllm.torch_plan import LlmCall, llm_call, torch_notes, torch_steps
from engines.trtllm_profiles import CellClass, limits, map_cell, profile_ranges

TENSORRT_LLM = "1.2.1"  # the last line with the engine backend; pinned exactly
TENSORRT = "10.14.1.48"  # in the container image of release 1.2


@dataclass(frozen=True, slots=True)
class TrtLlmPlan:
    """Everything that a build will do. cells: the whole grid, lengths outside, batches inside.

    Of the PyTorch backend: classes are the sizes that it captures, llm is how it is started, and cells,
    engines and convert are empty.
    """

    spec: TrtLlmSpec
    target: Target
    steps: tuple[TrtLlmStep, ...]
    classes: tuple[int, ...]
    cells: tuple[CellClass, ...]
    engines: tuple[EnginePlan, ...]
    convert: Mapping[str, Any]
    memory: Memory
    graphs: GraphComparison
    notes: tuple[str, ...]
    llm: LlmCall | None = None

    def step(self, name: str) -> TrtLlmStep:
        return next(step for step in self.steps if step.name == name)

    def cell(self, length: int, batch: int) -> CellClass:
        return next(cell for cell in self.cells if (cell.length, cell.batch) == (length, batch))

    @property
    def time_s(self) -> float:
        return sum(step.time.seconds for step in self.steps)

    @property
    def keys(self) -> dict[str, str]:
        """Content keys of the steps that make a bundle what it is; kept in its manifest."""
        return {step.name: step.key for step in self.steps if step.name not in ("manifest", "publish")}


def wanted_target(spec: TrtLlmSpec) -> Target:
    """What a build is made for, before a machine was looked at."""
    return Target(TENSORRT_LLM, "" if spec.torch else TENSORRT, spec.gpu, spec.compute_capability)


def make_plan(
    spec: TrtLlmSpec,
    target: Target | None = None,
    *,
    checkpoint_key: str | None = None,
    calibration_key: str | None = None,
    code_key: str = "",
) -> TrtLlmPlan:
    """The plan of `spec`. Raises BuildError for what can't be built, or does not fit the GPU.

    target: None takes what is wanted. checkpoint_key: stands for the files of a local checkpoint, or the
    commit that `revision` is now; None takes the path or the revision as it is. calibration_key: stands for
    the calibration text in the same way. code_key: hash of the code that carries the steps out.
    """
    memory = estimates.memory(spec)
    tokens = pass_tokens(spec)
    classes = pass_classes(spec)
    engines = () if spec.torch else tuple(_engine(spec, name, tokens) for name in spec.engine_names)
    steps = Steps(spec, target or wanted_target(spec), checkpoint_key, calibration_key, code_key, engines)
    if spec.torch:
        llm = llm_call(spec, steps.target.tensorrt_llm, memory.kv_tokens // spec.block_tokens)
        return TrtLlmPlan(
            spec=spec,
            target=steps.target,
            steps=torch_steps(steps, classes, llm),
            classes=classes,
            cells=(),
            engines=(),
            convert={},
            memory=memory,
            graphs=estimates.graph_comparison(spec),
            notes=(*torch_notes(spec, classes), *_gated(spec)),
            llm=llm,
        )
    return TrtLlmPlan(
        spec=spec,
        target=steps.target,
        steps=steps.all(),
        classes=classes,
        cells=tuple(map_cell(length, batch, classes) for length in spec.lengths for batch in spec.batches),
        engines=engines,
        convert=convert_arguments(spec),
        memory=memory,
        graphs=estimates.graph_comparison(spec),
        notes=_notes(spec, memory),
    )


def _engine(spec: TrtLlmSpec, name: EngineName, tokens: int) -> EnginePlan:
    """Of an LP engine either way is given, since the choice falls in the build: it follows the SP engine."""
    if name is EngineName.SP:
        builds = sp_builds(spec)
    else:
        builds = {f"build-lp ({step.rsplit('-', 1)[1]})": plugin for step, plugin in sp_builds(spec).items()}
    return EnginePlan(
        name,
        profile_ranges(
            tokens,
            multiple=name is EngineName.SP,
            opt_num_tokens=None if name is EngineName.SP else min(spec.lp_tokens_opt, tokens),
            requests_max=spec.requests_max,
        ),
        {step: build_arguments(spec, name, plugin) for step, plugin in builds.items()},
        {step: cli_line(spec, name, plugin) for step, plugin in builds.items()},
    )


def _notes(spec: TrtLlmSpec, memory: Memory) -> tuple[str, ...]:
    """What a reader of the plan should know and can't see in its tables."""
    found = list(
        limits(spec.pass_tokens_max, spec.context_tokens_max, spec.requests_max, spec.block_tokens).notes
    )
    if memory.kv_tokens_worst is None:
        found.append(
            "if TensorRT kept a weight layout of its own for every profile, the engine without the GEMM "
            "plugin would not fit; what its plan really takes is measured when it is built"
        )
    if spec.quantisation is Quantisation.FP8 and spec.calibration_text is None:
        found.append(
            "FP8 scales are set from cnn_dailymail, which TensorRT-LLM fetches from the hub: give a text "
            "file of your own traffic to be independent of it"
        )
    return (*found, *_gated(spec))


def _gated(spec: TrtLlmSpec) -> tuple[str, ...]:
    if spec.repo is None or not spec.repo.startswith("meta-llama/") or spec.checkpoint is not None:
        return ()
    return (f"{spec.repo} is gated: accept its licence on the hub, or give a local checkpoint",)
