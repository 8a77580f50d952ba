"""Which TensorRT-LLM may be used: releases of the 1.2 line, by both drivers, and nothing else.

Prebuilt engines: 1.0 and 1.1 hold `BuildConfig` and `PluginConfig` otherwise than 1.2 and have known faults
in hand-over; the engine backend left the main branch in July 2026, between 1.3 and 1.4, and 1.3 candidates
may or may not have it. PyTorch backend: it goes on after that, but options are renamed (in 1.4
`prefill_cuda_graph_backend` and `prefill_capture_num_tokens`), so a later line is refused until it was tried.
One rule for both keeps one pinned environment, and hand-over needs the identical build on both sides anyway.

Development versions, candidates and anything that does not read as a release are refused: nobody can say what
they hold. Nothing here imports tensorrt_llm: that would load CUDA.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from engines.executor.types import BackendUnavailable
from engines.trtllm_child.config import Driver

PINNED = "1.2.1"
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?(?:\+[\w.]+)?")
_NUMBERS = re.compile(r"(\d+)\.(\d+)")
_REBUILD = f"install TensorRT-LLM {PINNED} and build the engines again with it"

# Runs in the other interpreter, which may be older than this project: no syntax of ours, nothing imported.
_ASK = """
import json, sys
from importlib import metadata
found = {"python": "%d.%d.%d" % sys.version_info[:3]}
for name in ("tensorrt_llm", "tensorrt", "torch"):
    found[name] = None
    for wheel in (name, "tensorrt_cu13", "tensorrt_cu12") if name == "tensorrt" else (name,):
        try:
            found[name] = found[name] or metadata.version(wheel)
        except metadata.PackageNotFoundError:
            pass
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed beside an interpreter; None: not there."""

    python: str
    tensorrt_llm: str | None
    tensorrt: str | None
    torch: str | None


def check_version(version: str, driver: Driver = Driver.ENGINE) -> None:
    """Raises BackendUnavailable, with the remedy, for a version that this project does not drive."""
    if (release := _RELEASE.fullmatch(version)) and (release[1], release[2]) == ("1", "2"):
        return
    numbers = _NUMBERS.match(version)
    line = (int(numbers[1]), int(numbers[2])) if numbers else None
    if line is not None and line < (1, 2):
        raise BackendUnavailable(f"TensorRT-LLM {version} is before 1.2", f"upgrade: {_REBUILD}")
    if line is not None and line > (1, 2):
        if driver is Driver.ENGINE:
            raise BackendUnavailable(
                f"TensorRT-LLM {version} is past 1.2, the last line known to run prebuilt engines",
                f"install TensorRT-LLM {PINNED}, or move to backend trtllm_torch, which needs none",
            )
        raise BackendUnavailable(
            f"TensorRT-LLM {version} was never tried with trtllm_torch; its options have other names",
            f"install TensorRT-LLM {PINNED}",
        )
    raise BackendUnavailable(
        f"TensorRT-LLM {version!r} is not a release, so what it holds is not known", f"{_REBUILD}"
    )


def check_pinned(version: str, wanted: str | None) -> None:
    """An engine runs with the version that built it and no other. Raises BackendUnavailable."""
    if wanted is not None and version != wanted:
        raise BackendUnavailable(
            f"the bundle was built with TensorRT-LLM {wanted}, this environment has {version}",
            "build the bundle again with this version, or use an environment with the other",
        )


def installed(python: Path, timeout_s: float = 20.0) -> Versions:
    """What the environment of `python` has, by its package metadata. Raises BackendUnavailable."""
    what = f"the interpreter {python}"
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK],
            capture_output=True,
            timeout=timeout_s,
            check=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout.strip().splitlines()[-1])
        return Versions(**found)
    except subprocess.TimeoutExpired:
        raise BackendUnavailable(f"{what} did not answer in {timeout_s:g} s", "look at its disk") from None
    except OSError as error:
        raise BackendUnavailable(
            f"{what} can't be started: {error}", "name the python of TensorRT-LLM's environment"
        ) from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:]
        raise BackendUnavailable(
            f"{what} ended with {error.returncode}: {' '.join(last)}", "repair that environment"
        ) from None
    except (ValueError, IndexError, TypeError):
        raise BackendUnavailable(f"{what} gave no list of versions", "name a Python interpreter") from None
