"""Fixtures of tests that need a GPU. They run on a bare machine too: pytest, numpy, torch and this checkout.

PLASERVE_GPU_TEST_DEVICE=cpu runs the logic of the torch tests without a GPU, to try them; nothing is captured
then. PLASERVE_TRTLLM_PYTHON names the interpreter of TensorRT-LLM's environment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The contract suite lies beside the engines' tests, and is imported by their names.
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engines")]


@pytest.fixture(scope="session")
def device() -> str:
    """Skips where torch, or a GPU that it sees, is missing."""
    torch = pytest.importorskip("torch")
    wanted = os.environ.get("PLASERVE_GPU_TEST_DEVICE", "cuda")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return wanted


@pytest.fixture(scope="session")
def trtllm_python() -> Path:
    """The interpreter of an environment with TensorRT-LLM 1.2; skips where it is not named or has another."""
    from engines.executor.types import BackendUnavailable
    from engines.trtllm_child.guard import check_version, installed

    named = os.environ.get("PLASERVE_TRTLLM_PYTHON")
    if not named:
        pytest.skip("PLASERVE_TRTLLM_PYTHON names no interpreter")
    try:
        found = installed(Path(named))
        if found.tensorrt_llm is None:
            pytest.skip(f"{named} has no TensorRT-LLM")
        check_version(found.tensorrt_llm)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return Path(named)
