"""Writes the fake `tensorrt_llm` and `tensorrt` of a stratum into a directory, for the PYTHONPATH of a child.

Each module is three lines that ask `skin.entry` for its names. Package metadata is written too, so that
`importlib.metadata.version` answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .skin.bindings import VARIABLE
from .skin.entry import modules, surface
from .vices import VIRTUOUS, Vices

LOADER = "_plaserve_fake_trtllm"
_LOADER = '''"""Finds the fakes without making other tests importable."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

if "executor_fakes" not in sys.modules:
    spec = spec_from_file_location(
        "executor_fakes", {init!r}, submodule_search_locations=[{directory!r}]
    )
    package = module_from_spec(spec)
    sys.modules["executor_fakes"] = package
    spec.loader.exec_module(package)

from executor_fakes.skin.entry import symbols


def fill(module):
    return symbols({stratum!r}, module)
'''
_MODULE = f"from {LOADER} import fill\n\nglobals().update(fill(__name__))\n"


def write_package(directory: Path, stratum: str) -> Path:
    """Returns `directory`. Raises ValueError for an unknown stratum."""
    found = surface(stratum)
    here = Path(__file__).parent.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    loader = _LOADER.format(init=str(here / "__init__.py"), directory=str(here), stratum=stratum)
    (directory / f"{LOADER}.py").write_text(loader, encoding="utf-8")
    for module in modules(stratum):
        package = directory.joinpath(*module.split("."))
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(_MODULE, encoding="utf-8")
    _write_metadata(directory, "tensorrt_llm", found.version)
    if found.tensorrt is not None:
        _write_metadata(directory, "tensorrt", found.tensorrt)
    return directory


def environment(directory: Path, vices: Vices = VIRTUOUS, **options: Any) -> Mapping[str, str]:
    """Variables of a child that uses the package there. options: see `skin.bindings`."""
    told = {"vices": json.loads(vices.to_json()), **options}
    return {"PYTHONPATH": str(directory), VARIABLE: json.dumps(told)}


def write_engine(
    directory: Path, *, block_tokens: int, requests: int, pass_tokens: int, context_tokens: int
) -> Path:
    """An engine directory that the fake executor takes its sizes from. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    build = {
        "max_batch_size": requests,
        "max_num_tokens": pass_tokens,
        "max_seq_len": context_tokens,
        "plugin_config": {"tokens_per_block": block_tokens},
    }
    config = {"version": "1.2.1", "pretrained_config": {"architecture": "fake"}, "build_config": build}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def _write_metadata(directory: Path, name: str, version: str) -> None:
    info = directory / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )
