"""TensorRT-LLM itself: the names that the adapters use, and the whole pipeline on a tiny random model.

Both need PLASERVE_TRTLLM_PYTHON. The pipeline also needs this project's own dependencies beside pytest.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from engines.models import ModelShape
from engines.types import EngineRequest, Pass, PassItem, PassKind

if TYPE_CHECKING:
    from build_scripts.trtllm.spec import TrtLlmSpec

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SURFACE = ROOT / "tests" / "executor_fakes" / "surface.json"
SHAPE = ModelShape("tiny", 2, 256, 512, 4, 2, 64, 1024)
MAKE_CHECKPOINT = """
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size={s.vocab}, hidden_size={s.hidden}, intermediate_size={s.ffn}, num_hidden_layers={s.layers},
    num_attention_heads={s.heads}, num_key_value_heads={s.kv_heads}, max_position_embeddings=4096,
    tie_word_embeddings=False, torch_dtype="bfloat16",
)
Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


def run(python: Path, *arguments: str, timeout_s: float = 600.0) -> str:
    done = subprocess.run(
        [str(python), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_installed_package_has_every_name_that_is_used(trtllm_python: Path) -> None:
    """A name of the nearest stratum that is missing must be looked at before this release is trusted."""
    said = run(trtllm_python, "build_scripts/gpu/drift.py", str(SURFACE))
    result = json.loads(said[said.index("{\n") :])  # the package prints a line of its own at import
    print(json.dumps(result, indent=1))
    assert result["missing"][result["nearest"]] == []


@pytest.fixture(scope="module")
def bundle(trtllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny random Qwen2, built by the pipeline on this machine's GPU."""
    for needed in ("pydantic", "rich", "scipy"):
        pytest.importorskip(needed)
    from build_scripts.trtllm import runner
    from build_scripts.trtllm.spec import GPUS

    card = (
        run(trtllm_python, "-c", "import torch; print(torch.cuda.get_device_name())").strip().splitlines()[-1]
    )
    gpu = next((name for name in GPUS if name in card), None)
    if gpu is None:
        pytest.skip(f"the pipeline knows no sizes of {card}")
    work = tmp_path_factory.mktemp("trtllm")
    run(trtllm_python, "-c", MAKE_CHECKPOINT.format(s=SHAPE), str(work / "checkpoint"))
    return runner.build(tiny_spec(work, trtllm_python, gpu))


def tiny_spec(work: Path, python: Path, gpu: str) -> TrtLlmSpec:
    from build_scripts.trtllm.spec import TrtLlmSpec

    return TrtLlmSpec(
        model="tiny",
        architecture="qwen2",
        shape=SHAPE,
        out=str(work / "bundles"),
        work_dir=work / "work",
        checkpoint=work / "checkpoint",
        python=python,
        gpu=gpu,
        pass_tokens_max=2048,
        requests_max=8,
        context_tokens_max=2048,
        calibration_s=5.0,
    )


def test_the_pipeline_builds_a_bundle_that_opens(bundle: Path, trtllm_python: Path) -> None:
    from engines.gpu_bundle import open_gpu_bundle

    assert open_gpu_bundle(bundle, python=trtllm_python, full=True).fingerprint


def test_the_bundle_serves(bundle: Path, trtllm_python: Path) -> None:
    """One prompt, prefilled and decoded to its end, twice: the second finds its blocks."""
    from engines.catalog import EngineOptions, load_engine
    from engines.gpu_catalog import ExecutorChoice

    options = EngineOptions(bundle, executor=ExecutorChoice(trtllm_python))
    engine = load_engine("trtllm", options).engine
    try:
        block, reused = engine.capabilities.block_tokens, []
        prompt = tuple(range(1, 3 * block + 1))
        for name in ("first", "second"):
            engine.submit(EngineRequest(name, prompt, 1))
            item = engine.execute(
                Pass(len(reused), PassKind.PREFILL, (PassItem(name, len(prompt), 0),))
            ).items[0]
            assert item.error is None
            assert item.position == len(prompt)
            reused.append(item.reused)
        assert reused[0] == 0
        assert reused[1] > 0
    finally:
        engine.close()
