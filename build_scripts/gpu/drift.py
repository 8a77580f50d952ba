"""Compare an installed TensorRT-LLM with the table that the adapters and their fakes were written against.

    PYTHON_OF_TENSORRT_LLM build_scripts/gpu/drift.py tests/executor_fakes/surface.json

Release 1.2.1 was not read at its tag: the table holds what sources around it have (strata S1, S2 and S3), and
any of them may be what 1.2.1 has. So each stratum is compared, and the nearest named. A name that is recorded
and not there is a difference; what is there and not recorded is none, since nothing uses it. Default values
are not compared: where one matters it is written out.

Runs in TensorRT-LLM's own interpreter: standard library only, and no other module of this project. Classes of
the bindings have no signature that Python can inspect, their docstring has it in words; where it has neither,
nothing can be said of its parameters, and that is listed too.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STRATA = ("S1", "S2", "S3")

Load = Callable[[str], Any]  # module by name; raises ImportError
Difference = tuple[bool, str]  # (known, or only not to be seen; words)


def compare(table: dict[str, Any], stratum: str, load: Load) -> tuple[list[str], list[str]]:
    """(what is recorded for `stratum` and missing, what can't be inspected)."""
    found: list[Difference] = []
    for entry in table["symbols"]:
        if stratum in entry["strata"]:
            found += _differences(entry, load)
    for module, names in table["exported"].items():
        homes = {(e["module"], e["name"]) for e in table["symbols"] if stratum in e["strata"]}
        for name, home in names.items():
            if (home, name) in homes and _get(load, module, name) is None:
                found.append((True, f"{module}.{name}: not there"))
    missing = sorted({words for known, words in found if known})
    unseen = sorted({words for known, words in found if not known})
    return missing, unseen


def report(table: dict[str, Any], load: Load, strata: tuple[str, ...] = STRATA) -> dict[str, Any]:
    """All strata, and the one with the fewest differences."""
    compared = {stratum: compare(table, stratum, load) for stratum in strata}
    return {
        "nearest": min(strata, key=lambda stratum: len(compared[stratum][0])),
        "missing": {stratum: missing for stratum, (missing, _) in compared.items()},
        "not_inspectable": {stratum: unseen for stratum, (_, unseen) in compared.items()},
    }


def _get(load: Load, module: str, name: str) -> Any:
    """The object, or None: its module may not exist either."""
    try:
        found = load(module)
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _differences(entry: dict[str, Any], load: Load) -> Iterator[Difference]:
    module, owner, name = entry["module"], entry.get("nested_in"), entry["name"]
    full = f"{owner}.{name}" if owner else name
    where, found = f"{module}.{full}", _get(load, module, full)
    if found is None:
        yield True, f"{where}: not there"
        return
    for kind in ("members", "properties", "methods"):
        for attribute in entry.get(kind, ()):
            if not _has(found, attribute):
                yield True, f"{where}.{attribute}: not there"
    names = [parameter[0] for parameter in entry.get("params", ())] + entry.get("constructor", [])
    if not names:
        return
    known = parameters(found)
    for parameter in names:
        if known is None:
            yield False, f"{where}: parameters can't be inspected"
            return
        if parameter not in known and not _has(found, parameter):
            yield True, f"{where}: takes no {parameter}"


def _has(of: Any, name: str) -> bool:
    """Attributes, and fields that only an instance has."""
    fields = {**getattr(of, "model_fields", {}), **getattr(of, "__dataclass_fields__", {})}
    return hasattr(of, name) or name in fields or f"_{name}" in fields


def parameters(of: Any) -> set[str] | None:
    """Names that a class or function takes; None where that can't be seen."""
    fields = getattr(of, "model_fields", None)
    if isinstance(fields, dict):
        return set(fields)
    named: dict[str, inspect.Parameter] = {}
    with contextlib.suppress(ValueError, TypeError):
        named = dict(inspect.signature(of).parameters)
    if named and not any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in named.values()):
        return set(named)
    text = f"{getattr(getattr(of, '__init__', None), '__doc__', '')}\n{getattr(of, '__doc__', '')}"
    signatures = re.findall(r"\w+\(([^\n]*)\)", text)
    words = {word for line in signatures for word in re.findall(r"(\w+)\s*(?=[:=,)])", line + ")")}
    return words | set(named) if words - {"self", "args", "kwargs"} else None


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: drift.py SURFACE.json", file=sys.stderr)  # noqa: T201
        return 2
    table = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    version = importlib.import_module("tensorrt_llm").__version__
    result = {"version": version, **report(table, importlib.import_module)}
    print(json.dumps(result, indent=1))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
