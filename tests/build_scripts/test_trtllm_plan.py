"""The plan of a TensorRT-LLM build is pure; keys change with what a step depends on; sizes add up."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build_scripts.spec import BuildError
from build_scripts.trtllm import estimates
from build_scripts.trtllm.plan import TrtLlmPlan, make_plan, wanted_target
from build_scripts.trtllm.spec import GPUS, REPOSITORIES, EngineName, TrtLlmSpec, trtllm_spec
from engines.trtllm_profiles import map_cell

ROOT = Path(__file__).parents[2]
OUT = Path("bundles")
BEFORE = (
    "fetch",
    "convert",
    "build-sp-plugin",
    "build-sp-tensorrt",
    "choose",
    "share",
    "verify",
    "calibrate",
)


def spec(model: str = "Qwen2.5-7B", **options: Any) -> TrtLlmSpec:
    return trtllm_spec(model, OUT, **options)


BIG_FP8 = {"model": "Qwen2.5-32B", "gpu": "L40S", "quantisation": "fp8", "context_tokens_max": 8_192}
FP8 = spec(quantisation="fp8", calibration_text=Path("texts.txt"))


def changed(base: TrtLlmPlan, other: TrtLlmPlan) -> set[str]:
    return {name for name, key in other.keys.items() if base.keys.get(name) != key}


def from_step(name: str) -> set[str]:
    """A step and all that come after it; both builds come after `convert`."""
    return set(BEFORE[BEFORE.index(name) :])


TARGET = wanted_target(spec())
PLAN = make_plan(spec())


@pytest.mark.parametrize(
    ("other", "steps"),
    [
        (make_plan(spec(), TARGET), set()),
        (make_plan(spec(publish="s3://bucket/bundles")), set()),
        (make_plan(trtllm_spec("Qwen2.5-7B", Path("elsewhere"), python=Path("py"))), set()),
        (make_plan(spec(lengths=(8, 16), batches=(1,))), set()),
        (make_plan(spec("Qwen2.5-7B-Instruct")), from_step("fetch")),
        (make_plan(spec(revision="v2")), from_step("fetch")),
        (make_plan(spec(), checkpoint_key="a commit"), from_step("fetch")),
        (make_plan(spec(checkpoint=Path("here"))), from_step("fetch")),
        (make_plan(spec(), code_key="other code"), from_step("convert")),
        (make_plan(spec(dtype="float16")), from_step("convert")),
        (make_plan(spec(), replace(TARGET, tensorrt_llm="1.2.0")), from_step("convert")),
        (make_plan(spec(), replace(TARGET, tensorrt="10.13.3.9")), from_step("convert")),
        (make_plan(spec(), replace(TARGET, gpu="H100")), from_step("build-sp-plugin")),
        (make_plan(spec(pass_tokens_max=4096)), from_step("build-sp-plugin")),
        (make_plan(spec(requests_max=32)), from_step("build-sp-plugin")),
        (make_plan(spec(context_tokens_max=16_384)), from_step("build-sp-plugin")),
        (make_plan(replace(spec(), block_tokens=64)), from_step("build-sp-plugin")),
        (make_plan(replace(spec(), memory_share=0.8)), from_step("verify")),
        (make_plan(replace(spec(), gpu_memory_bytes=120_000_000_000)), from_step("verify")),
        (make_plan(replace(spec(), calibration_s=10.0)), {"calibrate"}),
    ],
)
def test_a_change_reaches_exactly_the_steps_that_depend_on_it(other: TrtLlmPlan, steps: set[str]) -> None:
    assert changed(PLAN, other) == steps


def test_fp8_scales_depend_on_the_gpu_and_the_texts() -> None:
    base = make_plan(FP8)
    assert "convert" in changed(base, make_plan(FP8, replace(TARGET, gpu="H100")))
    assert "convert" in changed(base, make_plan(FP8, calibration_key="a hash"))
    assert "fetch" not in changed(base, make_plan(FP8, calibration_key="a hash"))


def test_a_model_is_quantised_where_its_16_bits_fit() -> None:
    """The FP8 engine fits the small GPU, what its scales are measured by does not."""
    with pytest.raises(BuildError, match=r"can't be quantised on L40S.*67\.5 GB.*48 GB; use a larger gpu"):
        make_plan(spec(**BIG_FP8))
    make_plan(spec(**{**BIG_FP8, "gpu": "H100"}))


@pytest.mark.parametrize("gemm", ["both", "plugin", "tensorrt"])
@pytest.mark.parametrize("separate_lp", [False, True])
def test_every_step_comes_after_what_it_reads(gemm: str, separate_lp: bool) -> None:
    plan = make_plan(spec(gemm=gemm, separate_lp=separate_lp))
    names = [step.name for step in plan.steps]
    assert len(set(names)) == len(names)
    seen: set[str] = set()
    for step in plan.steps:
        assert set(step.after) <= seen
        assert step.time.seconds > 0
        assert step.time.basis
        seen.add(step.name)
    assert ("build-lp" in seen, "share" in seen) == (separate_lp, not separate_lp)
    assert ("build-sp-plugin" in seen, "build-sp-tensorrt" in seen) == (gemm != "tensorrt", gemm != "plugin")
    assert [engine.name for engine in plan.engines] == list(EngineName)[: 1 + separate_lp]
    assert len({step.key for step in plan.steps}) == len(plan.steps)


@given(
    st.sampled_from(sorted(REPOSITORIES)),
    st.integers(65, 16_384),
    st.lists(st.integers(1, 512), min_size=1, max_size=6, unique=True).map(sorted).map(tuple),
    st.lists(st.integers(1, 64), min_size=1, max_size=6, unique=True).map(sorted).map(tuple),
)
def test_the_grid_is_whole_and_every_cell_has_its_class_or_a_reason(
    model: str, most: int, lengths: tuple[int, ...], batches: tuple[int, ...]
) -> None:
    plan = make_plan(spec(model, pass_tokens_max=most, lengths=lengths, batches=batches))
    assert [(c.length, c.batch) for c in plan.cells] == [(x, y) for x in lengths for y in batches]
    for cell in plan.cells:
        assert cell == map_cell(cell.length, cell.batch, plan.classes)
        assert cell.why
        if cell.class_index is None:
            assert cell.tokens > most
        else:
            low, _, high = plan.engines[0].ranges[cell.class_index]
            assert low <= cell.tokens <= high


def test_the_grid_of_laps_is_42_cells_and_12_sizes() -> None:
    assert len(PLAN.cells) == 42
    assert len({cell.tokens for cell in PLAN.cells}) == 12
    assert [(c.length, c.batch) for c in PLAN.cells if c.class_index is None] == [(256, 64)]


CASES = [(m, q, lp) for m in sorted(REPOSITORIES) for q in ("none", "fp8") for lp in (False, True)]


@pytest.mark.parametrize(("model", "quantisation", "separate_lp"), CASES)
@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_what_fits_adds_up_and_what_does_not_says_what_to_change(
    model: str, quantisation: str, separate_lp: bool, gpu: str
) -> None:
    if quantisation == "fp8" and GPUS[gpu][1] == "8.0":
        with pytest.raises(BuildError, match=r"fp8 needs compute capability 8\.9"):
            spec(model, quantisation=quantisation, gpu=gpu)
        return
    case = spec(model, quantisation=quantisation, separate_lp=separate_lp, gpu=gpu)
    needs = len(case.engine_names) * (
        estimates.weight_bytes(case)
        + estimates.activation_bytes(case)
        + estimates.RESERVE_BYTES
        + case.context_tokens_max * estimates.kv_bytes_per_token(case)
    )
    if needs > 0.9 * GPUS[gpu][0]:
        with pytest.raises(BuildError, match=f"does not fit {gpu}.*change one of") as error:
            make_plan(case)
        assert ("separate_lp" in str(error.value)) == separate_lp
        assert ("fp8" in str(error.value)) == (quantisation == "none")
        return
    if quantisation == "fp8" and 2 * case.shape.parameters + estimates.RESERVE_BYTES > GPUS[gpu][0]:
        with pytest.raises(BuildError, match=f"can't be quantised on {gpu}.*larger gpu"):
            make_plan(case)
        return
    memory = make_plan(case).memory
    block_bytes = case.block_tokens * memory.kv_bytes_per_token
    total = sum(figure.size_bytes for figure in memory.figures)
    assert memory.usable_bytes - block_bytes < total <= memory.usable_bytes
    assert memory.kv_tokens % case.block_tokens == 0
    assert memory.kv_tokens >= len(case.engine_names) * memory.kv_tokens_min >= case.context_tokens_max
    assert memory.kv_tokens_worst is None or memory.kv_tokens_worst <= memory.kv_tokens
    assert all(figure.basis for figure in memory.figures)


def test_sizes_that_are_known_elsewhere() -> None:
    assert estimates.weight_bytes(spec()) == pytest.approx(15.2e9, rel=0.01)
    assert estimates.kv_bytes_per_token(spec()) == 56 * 1024
    assert estimates.kv_bytes_per_token(spec("Llama-3.1-8B")) == 128 * 1024
    assert PLAN.graphs.engine_per_cell_bytes == pytest.approx(640e9, rel=0.01)


@pytest.mark.parametrize("model", sorted(REPOSITORIES))
def test_fp8_needs_less_than_16_bits_and_more_than_half(model: str) -> None:
    full, quantised = (estimates.weight_bytes(spec(model, quantisation=q)) for q in ("none", "fp8"))
    assert full / 2 < quantised < full
    kv, kv8 = (estimates.kv_bytes_per_token(spec(model, quantisation=q)) for q in ("none", "fp8"))
    assert kv == 2 * kv8


@given(st.integers(65, 16_383), st.sampled_from(sorted(REPOSITORIES)))
def test_a_larger_pass_leaves_less_kv(most: int, model: str) -> None:
    small, large = (make_plan(spec(model, pass_tokens_max=t)).memory for t in (most, 16_384))
    assert small.kv_tokens >= large.kv_tokens


def test_graphs_of_published_models_are_not_called_estimates() -> None:
    each = {m: make_plan(spec(m)).graphs for m in ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")}
    assert [g.graph_bytes_each for g in each.values()] == [228_000_000, 240_000_000, 277_000_000]
    assert not any(g.estimated for g in each.values())
    between = make_plan(spec("Llama-3.1-8B")).graphs
    assert between.estimated
    assert 228_000_000 < between.graph_bytes_each < 240_000_000
    assert between.capture_s == (42 * 8.0, 42 * 12.0)
    assert make_plan(spec(quantisation="fp8")).graphs.estimated  # published for bf16 only


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "gpt-2"}, "model 'gpt-2' can't be built"),
        ({"model": "Qwen2.5-3B"}, "model 'Qwen2.5-3B' is not known.*Qwen2.5-7B"),
        ({"gpu": "B300"}, "gpu 'B300' is not known; use H200"),
        ({"dtype": "float32"}, "dtype 'float32'"),
        ({"quantisation": "int4"}, "quantisation 'int4' is not known; use none or fp8"),
        ({"gemm": "maybe"}, "gemm 'maybe' is not known; use both or plugin or tensorrt"),
        ({"pass_tokens_max": 64}, "pass_tokens_max must be 65"),
        ({"pass_tokens_max": 49_152}, "pass_tokens_max must be 65 to 16384"),
        ({"requests_max": 0}, "requests_max"),
        ({"lengths": (16, 8)}, "lengths must be ascending"),
        ({"batches": ()}, "batches must be ascending"),
        ({"context_tokens_max": 100}, "context_tokens_max is 100"),
        ({"calibration_text": Path("t")}, "calibration_text is for quantisation fp8"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(BuildError, match=named):
        trtllm_spec(**{"model": "Qwen2.5-7B", "out": OUT, **options})


@pytest.mark.parametrize(
    ("typed", "repo"),
    [
        ("Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("qwen/qwen2.5-14b-instruct", "Qwen/Qwen2.5-14B-Instruct"),
        ("Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-32B"),
        ("llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
    ],
)
def test_a_model_is_found_by_any_of_its_names(typed: str, repo: str) -> None:
    found = spec(typed)
    assert found.repo == repo
    assert found.model == repo.split("/")[1]
    assert found.target == f"bundles/{found.model}-trtllm"
    assert found.work_dir == OUT / ".work" / f"{found.model}-trtllm"


def test_a_plan_opens_nothing_and_imports_nothing_heavy() -> None:
    script = (
        "import builtins, socket, sys; from pathlib import Path;"
        "from build_scripts.trtllm.plan import make_plan;"
        "from build_scripts.trtllm.spec import trtllm_spec;"
        "trtllm_spec('Qwen2.5-7B', Path('b'));"  # the table of shapes is read once
        "refuse = lambda *a, **k: sys.exit('opened something');"
        "builtins.open = socket.socket = Path.open = Path.stat = refuse;"
        "plan = make_plan(trtllm_spec('Qwen2.5-32B', Path('b')));"
        "assert len(plan.steps) == 10;"
        "heavy = {'tensorrt_llm', 'torch', 'tensorrt', 'openvino', 'huggingface_hub'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
