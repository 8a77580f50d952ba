"""Laws of imports: the core is pure, the packages are light and are ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPURE = [
    *("asyncio", "socket", "ssl", "selectors", "threading", "subprocess", "uvloop"),
    *("time", "random", "secrets", "logging"),
    *("numpy", "scipy", "torch"),
    *("grpc", "google.protobuf", "opentelemetry", "prometheus_client", "pydantic", "pydantic_settings"),
]
HEAVY = ["openvino", "gguf", "tokenizers", "torch", "tensorrt_llm", "tritonclient", "scipy", "grpc", "numpy"]

# Everything that `sortedcontainers` and the standard library bring is loaded first: what is asked is what our
# own modules ask for. Modules that the interpreter holds anyway (`time` is built in) are hidden from them.
_PURE = """
import importlib, pkgutil, sys, sortedcontainers, dataclasses, typing, hashlib, heapq, struct, enum
impure = set(json.loads(sys.argv[1]))

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in impure:
            raise ImportError(f"{name} is not for the core")
        return None

sys.meta_path.insert(0, Blocker())
for name in list(sys.modules):
    if name in impure or name.split(".")[0] in impure:
        del sys.modules[name]
for package in ("service.core", "service.policies"):
    module = importlib.import_module(package)
    for found in pkgutil.iter_modules(module.__path__, package + "."):
        importlib.import_module(found.name)
loaded = [name for name in sys.modules if name.startswith(("service.core.", "service.policies."))]
leaked = sorted(name for name in sys.modules if name in impure or name.split(".")[0] in impure)
print(json.dumps({"loaded": len(loaded), "leaked": leaked}))
"""

_LIGHT = """
import engines, service, build_scripts
heavy = set(json.loads(sys.argv[1]))
packages = (engines, service, build_scripts)
print(json.dumps({
    "leaked": sorted({name.split(".")[0] for name in sys.modules} & heavy),
    "files": [package.__file__ for package in packages],
}))
"""


def run_python(code: str, names: list[str]) -> dict[str, object]:
    program = "import json, sys\n" + code
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(names)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_the_core_imports_nothing_that_acts() -> None:
    """Every module of core and policies loads with clocks, randomness, IO and frameworks out of reach."""
    answer = run_python(_PURE, IMPURE)
    assert answer["leaked"] == []
    modules = [*ROOT.glob("service/core/*.py"), *ROOT.glob("service/policies/*.py")]
    assert answer["loaded"] == len([path for path in modules if path.name != "__init__.py"])


@pytest.mark.parametrize("name", ["time", "random", "asyncio", "numpy"])
def test_the_blocker_blocks(name: str) -> None:
    """The law above can fail: a module that imports one of these is refused."""
    code = _PURE.replace("for package in", f"import {name}\nfor package in", 1)
    with pytest.raises(AssertionError, match="is not for the core"):
        run_python(code, IMPURE)


def test_the_packages_are_light_and_ours() -> None:
    """`import engines, service, build_scripts` loads no engine library, and finds this project's packages."""
    answer = run_python(_LIGHT, HEAVY)
    assert answer["leaked"] == []
    expected = [str(ROOT / package / "__init__.py") for package in ("engines", "service", "build_scripts")]
    assert answer["files"] == expected


@pytest.mark.parametrize("package", ["engines", "service", "build_scripts", "protos"])
def test_top_level_names_resolve_here(package: str) -> None:
    """The names are common words: from anywhere, each is still this project's package."""
    code = f"import {package} as p\nprint(json.dumps({{'at': list(p.__path__)}}))"
    program = "import json, sys\n" + code
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert [Path(path) for path in json.loads(done.stdout)["at"]] == [ROOT / package]
