"""Every module imports without torch, TensorRT or TensorRT-LLM: they load CUDA, and most machines have none.

What a module imports of them it must import inside the function that needs it; only the inner modules of an
adapter, which the adapter itself imports inside, may do so at their head. `__main__` modules run when they
are imported, so they are left out.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What only `engines.torch_cuda` imports, inside, and the measurements on a GPU machine.
_GPU = tuple(f"build_scripts.gpu.{name}" for name in ("bench", "machine", "measure", "part_", "timing"))
INNER = ("engines.torch_cuda_", *_GPU)
PACKAGES = ("engines", "service", "build_scripts")
SCRIPT = """
import importlib, sys, traceback
BLOCKED = {blocked!r}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
bad = []
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except Exception:
        bad.append(name + ": " + traceback.format_exc(limit=-2))
assert not BLOCKED & {{name.split(".")[0] for name in sys.modules}}
print("\\n".join(bad))
"""


def modules(*packages: str) -> list[str]:
    """Names of all modules of the packages, by their files."""
    found = []
    for package in packages:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [name for name in found if not name.endswith("__main__") and not name.startswith(INNER)]


def failures(blocked: set[str], names: list[str]) -> str:
    """Tracebacks of what does not import in a fresh process with `blocked` missing; empty where all do."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(blocked=blocked, modules=names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_imports_without_cuda_libraries() -> None:
    names = modules(*PACKAGES)
    assert {"engines.gpu_bundle", "service.cli", "build_scripts.trtllm"} <= set(names)
    assert failures({"torch", "tensorrt_llm", "tensorrt", "cuda", "pynvml", "transformers"}, names) == ""


def test_every_module_imports_without_optional_libraries() -> None:
    """Those of the extras, and what only a build or a store needs."""
    extras = {"openvino", "tokenizers", "gguf", "jinja2", "tritonclient", "huggingface_hub", "fsspec"}
    assert failures(extras, modules(*PACKAGES)) == ""


def test_what_runs_beside_tensorrt_llm_needs_the_standard_library_only() -> None:
    """Its environment has numpy and pydantic of its own choosing, or none that fits."""
    others = {"numpy", "scipy", "pydantic", "pydantic_settings", "grpc", "fsspec", "rich", "typer"}
    assert failures(others, modules("engines/executor", "engines/trtllm_child")) == ""


def test_the_block_works() -> None:
    assert "json is blocked" in failures({"json"}, ["engines.bundle_base"])
