"""`config.json` beside an engine or in a checkpoint, as far as a bundle depends on it.

`Engine.save` writes {version, pretrained_config, build_config} with `plugin_config` inside the last (parsed
at 0.17 and read in a 1.0-line file; not read at 1.2.1's tag). It says what the plan was really built with, so
the manifest is held against it. Enums are written in more than one way across releases ("PAGED",
"KVCacheType.PAGED") [not verified]: the last word decides, in any case. `null`, absent, "disable" and false
all mean that a plugin is off.

A Hugging Face checkpoint has the same names for the sizes at the top of its own config.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.models import ModelShape

CONFIG = "config.json"
_OFF = (None, False, "", "disable", "None", "none")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine was built with. Tokens and requests.

    sizes: fields of `ModelShape` that the file names, without name and tied. quantisation, kv_dtype: in the
    manifest's words, or the algorithm's own name. reuse: block reuse works (paged context attention, no
    logits of the context); it is off silently otherwise. packed: no padding between requests, KV in blocks.
    """

    version: str
    architecture: str
    dtype: str
    quantisation: str
    kv_dtype: str
    tp: int
    pp: int
    sizes: dict[str, int]
    context_tokens_max: int
    requests_max: int
    pass_tokens_max: int
    opt_tokens: int | None
    block_tokens: int
    multiple_profiles: bool
    gemm_plugin: bool
    packed: bool
    reuse: bool
    build_config_sha256: str


def build_config_digest(build_config: Mapping[str, Any]) -> str:
    """SHA-256 of a build configuration, whatever the order and layout in which it was written."""
    return hashlib.sha256(json.dumps(build_config, sort_keys=True).encode()).hexdigest()


def read_engine_config(path: Path) -> EngineConfig:
    """From `path`, the config.json of an engine directory. Raises ValueError naming the key."""
    data = _object(_load(path), "pretrained_config", "build_config")
    model, build = data["pretrained_config"], data["build_config"]
    plugins = _object(build, "plugin_config")["plugin_config"]
    quantisation, mapping = _optional(model, "quantization"), _optional(model, "mapping")
    dtype = _text(model, "pretrained_config.dtype")
    paged = _word(build.get("kv_cache_type")) == "paged" or plugins.get("paged_kv_cache") is True
    return EngineConfig(
        version=_text(data, "version"),
        architecture=_text(model, "pretrained_config.architecture"),
        dtype=dtype,
        quantisation=_word(quantisation.get("quant_algo")) or "none",
        kv_dtype=_word(quantisation.get("kv_cache_quant_algo")) or dtype,
        tp=_whole({"tp_size": 1, **mapping}, "pretrained_config.mapping.tp_size"),
        pp=_whole({"pp_size": 1, **mapping}, "pretrained_config.mapping.pp_size"),
        sizes=shape_sizes(model),
        context_tokens_max=_whole(build, "build_config.max_seq_len"),
        requests_max=_whole(build, "build_config.max_batch_size"),
        pass_tokens_max=_whole(build, "build_config.max_num_tokens"),
        opt_tokens=_maybe_whole(build, "build_config.opt_num_tokens"),
        block_tokens=_whole(plugins, "build_config.plugin_config.tokens_per_block"),
        multiple_profiles=plugins.get("multiple_profiles") not in _OFF,
        gemm_plugin=plugins.get("gemm_plugin") not in _OFF,
        packed=plugins.get("remove_input_padding") not in _OFF and paged,
        reuse=plugins.get("use_paged_context_fmha") not in _OFF
        and build.get("gather_context_logits") in _OFF,
        build_config_sha256=build_config_digest(build),
    )


def read_checkpoint_sizes(path: Path) -> tuple[str, dict[str, int]]:
    """Model type and sizes from the config.json of a Hugging Face checkpoint. Raises ValueError."""
    data = _load(path)
    return _text(data, "model_type"), shape_sizes(data)


def shape_sizes(model: Mapping[str, Any]) -> dict[str, int]:
    """The sizes in the words of `ModelShape`; heads that are left out have their usual meaning."""
    heads, hidden = _whole(model, "num_attention_heads"), _whole(model, "hidden_size")
    return {
        "layers": _whole(model, "num_hidden_layers"),
        "hidden": hidden,
        "ffn": _whole(model, "intermediate_size"),
        "heads": heads,
        "kv_heads": _maybe_whole(model, "num_key_value_heads") or heads,
        "head_dim": _maybe_whole(model, "head_size") or _maybe_whole(model, "head_dim") or hidden // heads,
        "vocab": _whole(model, "vocab_size"),
    }


def size_differences(shape: ModelShape, sizes: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """(field, in the file, in the manifest) of every size that differs.

    The vocabulary of a file may be larger than the model's: it is padded to whole rows for each GPU.
    """
    return [
        (name, found, getattr(shape, name))
        for name, found in sizes.items()
        if (found < shape.vocab if name == "vocab" else found != getattr(shape, name))
    ]


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"it can't be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError("it is not an object")
    return data


def _object(data: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        if not isinstance(data.get(name), dict):
            raise ValueError(f"{name} is missing or not an object")
    return data


def _optional(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {} if data.get(name) is None else _object(data, name)[name]
    return found


def _maybe_whole(data: Mapping[str, Any], where: str) -> int | None:
    return None if data.get(where.rpartition(".")[2]) is None else _whole(data, where)


def _whole(data: Mapping[str, Any], where: str) -> int:
    value = data.get(where.rpartition(".")[2])
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where} must be a whole number above 0, got {value!r}")
    return value


def _text(data: Mapping[str, Any], where: str) -> str:
    value = data.get(where.rpartition(".")[2])
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where} must be a text, got {value!r}")
    return value


def _word(value: Any) -> str:
    """The last word of an enum as it was written, in small letters; empty for none."""
    return "" if value in _OFF else str(value).rpartition(".")[2].lower()
