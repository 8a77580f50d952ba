"""A Hugging Face checkpoint on disk: whether it is the model that the project knows, and what is in it.

The scheduler's cost estimates, the KV pool and the plan all rest on the project's own table of shapes. A
checkpoint of another shape would build without complaint and be served with wrong figures, so every size in
its `config.json` is compared first, before a GPU is touched. Files are hashed once; after that size and
modification time tell whether they are still the same.

Standard library and `engines.models` only: TensorRT-LLM's environment imports this too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.models import ModelShape

CONFIG = "config.json"
MODEL_TYPES = {
    "qwen2": ("qwen2",),
    "llama": ("llama",),
    "qwen3": ("qwen3",),
}  # our architecture -> `model_type` of config.json

# Field of ModelShape -> key of config.json. head_dim is not always written; see `_sizes`.
_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "tied": "tie_word_embeddings",
}


class CheckpointError(Exception):
    """The checkpoint can't be built: `reason`, and the `remedy`."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` of the checkpoint. Raises CheckpointError when it is not there or can't be read."""
    path = directory / CONFIG
    remedy = "give the directory of a complete Hugging Face checkpoint"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {directory} has no {CONFIG}", remedy) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} can't be read: {error}", remedy) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not an object", remedy)
    return data


def check_checkpoint(
    directory: Path, architecture: str, shape: ModelShape, context_tokens_max: int, *, engines: bool = True
) -> dict[str, Any]:
    """Compare a checkpoint with what is to be built; returns its config. Raises CheckpointError.

    Every size that differs is named, not only the first. engines: it becomes TensorRT engines.
    """
    config = read_config(directory)
    wrong = [
        f"{_KEYS[name]} is {found!r}, {shape.name} has {getattr(shape, name)!r}"
        for name, found in _sizes(directory, config).items()
        if found != getattr(shape, name)
    ]
    found_type = config.get("model_type")
    if found_type not in MODEL_TYPES[architecture]:
        wrong.insert(0, f"model_type is {found_type!r}, expected {MODEL_TYPES[architecture][0]!r}")
    if wrong:
        raise CheckpointError(
            f"checkpoint {directory} is not {shape.name}: {'; '.join(wrong)}",
            "give the checkpoint of that model, or build the model that this is",
        )
    if engines and config.get("use_sliding_window"):
        raise CheckpointError(
            f"checkpoint {directory}: use_sliding_window is on, and block reuse with it crashes engines "
            "of this release (TensorRT-LLM issue 13123)",
            "serve this model with the PyTorch adapter",
        )
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and positions < context_tokens_max:
        raise CheckpointError(
            f"checkpoint {directory}: max_position_embeddings is {positions}, less than context_tokens_max "
            f"({context_tokens_max})",
            f"build with context_tokens_max of at most {positions}",
        )
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(
            f"checkpoint {directory} has no *.safetensors file",
            "give a complete checkpoint; weights in another format are not read",
        )
    return config


def _sizes(directory: Path, config: Mapping[str, Any]) -> dict[str, object]:
    """The sizes that `config` states, by field of ModelShape. Absent optional keys as transformers has it."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
        if not isinstance(config.get(key), int) or isinstance(config.get(key), bool) or config[key] < 1:
            raise CheckpointError(
                f"{directory / CONFIG}: {key} must be a whole number above 0, got {config.get(key)!r}",
                "give the directory of a complete Hugging Face checkpoint",
            )
    assert isinstance(heads, int)
    assert isinstance(hidden, int)
    absent: dict[str, object] = {
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "tie_word_embeddings": False,
    }
    sizes = {}
    for name, key in _KEYS.items():
        found = config.get(key)
        sizes[name] = absent.get(key) if found is None else found
    return sizes


def licence_of(directory: Path) -> str:
    """The licence that the model card names in its front matter; "unknown" where there is none."""
    card = directory / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head = text.split("---")[1] if text.startswith("---") and text.count("---") > 1 else ""
    found = {}
    for line in head.splitlines():
        key, colon, value = line.partition(":")
        if colon and value.strip():
            found[key] = value.strip().strip("\"'")
    return found.get("license_name") or found.get("license") or "unknown"


def stamps(directory: Path) -> dict[str, list[int]]:
    """(size in bytes, modification time in ns) of every file: cheap to take, equal while nothing changed."""
    found = {}
    for path in _files(directory):
        status = path.stat()
        found[path.relative_to(directory).as_posix()] = [status.st_size, status.st_mtime_ns]
    return found


def hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file by its path in the checkpoint: reads all of it."""
    result = {}
    for path in _files(directory):
        with path.open("rb") as file:
            result[path.relative_to(directory).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return result


def _files(directory: Path) -> list[Path]:
    """Files of the checkpoint; hidden ones (caches of a download, version control) are left out."""
    return sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    )
