"""What is measured on: card, driver, torch, interpreter. Written beside the tables."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

import torch

_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,memory.total"
_TIMEOUT_S = 10


def describe(device: str) -> dict[str, Any]:
    """Names of `torch` and of the device; what `nvidia-smi` says, where there is one."""
    facts: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "card": platform.processor() or platform.machine(),
        "driver": None,
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        facts["card"] = properties.name
        facts["sms"] = properties.multi_processor_count
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["memory_gb"] = round(properties.total_memory / 1e9, 1)
        facts |= {key: value for key, value in state().items() if key != "name"}
        facts["driver"] = facts.pop("driver_version", None)
    return facts


def state() -> dict[str, str]:
    """Driver, clocks, power limit and temperature by `nvidia-smi`; empty where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    first = done.stdout.strip().splitlines()[:1]
    return dict(zip(_QUERY.split(","), first[0].split(", "), strict=False)) if first else {}
