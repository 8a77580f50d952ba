"""What a build for the PyTorch backend does otherwise: which files it takes, and whether it runs as planned.

Of a checkpoint the bundle takes what a download would fetch: weights in safetensors, configuration, licence,
tokenizer. What lies beside them (weights in other formats, folders) is left out.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from build_scripts.trtllm import measure
from build_scripts.trtllm.checkpoint import CheckpointError
from build_scripts.trtllm.estimates import beside_weights
from build_scripts.trtllm.inside import WANTED
from build_scripts.trtllm.job import ENVIRONMENT, SOURCE, VERIFIED, Job, write_json
from engines.trtllm_child.guard import installed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # as `engines.bundle_base.File` has it


def wanted(name: str) -> bool:
    """Whether a file of a checkpoint, by its path there, goes into the bundle."""
    return "/" not in name and any(fnmatch(name, pattern) for pattern in WANTED)


def check_files(directory: Path) -> None:
    """Raises CheckpointError for a file that goes into the bundle and whose name a manifest can't hold."""
    for path in sorted(directory.iterdir()):
        if path.is_file() and wanted(path.name) and not _NAME.fullmatch(path.name):
            raise CheckpointError(
                f"checkpoint {directory}: {path.name!r} can't be a file of a bundle",
                "name it with letters, digits, dots, dashes and underscores, or move it away",
            )


def checkpoint_files(job: Job) -> dict[str, str]:
    """SHA-256 of every file of the checkpoint that goes into the bundle, by its name, as `fetch` found it."""
    files: list[dict[str, Any]] = job.read("fetch", SOURCE)["files"]
    return {file["name"]: file["sha256"] for file in files if wanted(file["name"])}


def verify(job: Job, out: Path) -> str:
    spec, classes = job.spec, job.plan.classes
    weights = [
        (job.checkpoint / name).stat().st_size
        for name in checkpoint_files(job)
        if name.endswith(".safetensors")
    ]
    plans, beside = [sum(weights)], [sum(figure.size_bytes for figure in beside_weights(spec))]
    blocks = job.kv_blocks(plans, beside)
    job.update(0.1, f"starting it, which captures {len(classes)} sizes")
    with job.open("verify", job.checkpoint, blocks) as opened:
        job.update(0.5, "one request a captured size")
        found = measure.verify(opened, classes, spec.requests_opt, spec.shape.vocab)
    there = asdict(installed(spec.python))
    write_json(out / ENVIRONMENT, {"python": there["python"], "torch": there["torch"], "cuda": None})
    record = {
        "checkpoint": found,
        "driver": job.gpu.driver,
        "kv_blocks": blocks,
        "memory_bytes": job.memory_bytes(plans, beside, blocks),
    }
    write_json(out / VERIFIED, record)
    told = sum(one["ran"] is not None for one in found["passes"])
    return (
        f"{len(classes)} sizes captured, {len(found['passes'])} passes, {told} of them one iteration by its "
        f"statistics; {blocks} KV blocks"
    )
