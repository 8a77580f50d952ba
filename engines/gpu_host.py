"""This machine, as far as a GPU bundle depends on it, found out without CUDA.

The devices come from `nvidia-smi`, which needs the driver only; the library versions from the package
metadata of TensorRT-LLM's own environment, which another interpreter owns. So a bundle can be refused before
anything that loads CUDA is imported, in a process that could not import it anyway.

CUDA_VISIBLE_DEVICES is obeyed here, since nvidia-smi does not: a worker that sees one GPU must not be told of
eight. As in CUDA the list ends at the first entry that names no device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engines.executor.types import BackendUnavailable
from engines.trtllm_child.guard import installed

_QUERY = ("index", "uuid", "name", "compute_cap", "memory.total", "driver_version")
_MIB = 2**20
_REPACKAGED = re.compile(r"\.post\d+$")
_TIMEOUT_S = 60.0  # a first call of nvidia-smi without persistence mode takes seconds for each GPU


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. memory_bytes: all that it has, as the driver reports it."""

    name: str
    compute_capability: str
    memory_bytes: int
    driver: str
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class GpuHost:
    """gpus: visible ones, in nvidia-smi's order. tensorrt_llm, tensorrt: versions in `python`'s environment.

    None for a version: not installed there. no_gpus, no_versions: why there are none; empty otherwise.
    """

    gpus: tuple[Gpu, ...]
    tensorrt_llm: str | None
    tensorrt: str | None
    python: Path
    no_gpus: str = ""
    no_versions: str = ""

    @classmethod
    def current(cls, python: Path = Path(sys.executable), *, smi: str = "nvidia-smi") -> GpuHost:
        """What is here. python: interpreter of TensorRT-LLM's environment. Never raises."""
        gpus, no_gpus = _gpus(smi, os.environ.get("CUDA_VISIBLE_DEVICES"))
        try:
            there = installed(python)
        except BackendUnavailable as error:
            return cls(gpus, None, None, python, no_gpus, str(error))
        return cls(gpus, there.tensorrt_llm, there.tensorrt, python, no_gpus)


def memory_used(gpu: Gpu, *, smi: str = "nvidia-smi") -> int | None:
    """Bytes of `gpu` that processes hold now; None where that can't be told."""
    command = [smi, "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
        return {uuid.strip(): int(mib) * _MIB for uuid, mib in rows}.get(gpu.uuid)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def release(version: str | None) -> str | None:
    """Without the number of a repackaging: the wheel of TensorRT 10.13.3.9 may be 10.13.3.9.post1, while the
    library in it still says 10.13.3.9."""
    return version if version is None else _REPACKAGED.sub("", version)


def _gpus(smi: str, visible: str | None) -> tuple[tuple[Gpu, ...], str]:
    """The visible GPUs, or none and why."""
    command = [smi, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except FileNotFoundError:
        return (), f"{smi} is not installed: no NVIDIA driver, or a container without the GPU runtime"
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"{smi} does not answer: {error}"
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        return (), f"{smi} failed with {done.returncode}: {said[0] if said else 'it said nothing'}"
    try:
        rows = [_gpu(line) for line in done.stdout.splitlines() if line.strip()]
    except ValueError as error:
        return (), f"{smi} gave something else than {', '.join(_QUERY)}: {error}"
    chosen = _visible(rows, visible)
    if rows and not chosen:
        return (), f"CUDA_VISIBLE_DEVICES={visible!r} names none of {len(rows)} GPU(s)"
    return chosen, "" if chosen else f"{smi} lists no GPU"


def _gpu(line: str) -> tuple[str, Gpu]:
    """Index and GPU of a row. Raises ValueError; the memory is in MiB."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(_QUERY):
        raise ValueError(line)
    index, uuid, name, capability, memory, driver = cells
    try:
        return index, Gpu(name, capability, int(memory) * _MIB, driver, uuid)
    except ValueError:
        raise ValueError(line) from None  # [N/A] under MIG and on some integrated GPUs


def _visible(rows: Sequence[tuple[str, Gpu]], visible: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, by index or by the start of a UUID."""
    if visible is None:
        return tuple(gpu for _, gpu in rows)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        found = [
            gpu
            for index, gpu in rows
            if entry == index or (entry[:4] == "GPU-" and gpu.uuid[: len(entry)] == entry)
        ]
        if len(found) != 1:
            break
        chosen.append(found[0])
    return tuple(chosen)
