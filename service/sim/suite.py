"""A suite: cases, the policies that meet in them, and how strictly they are measured, as one TOML file.

    title = "..."
    policies = ["fcfs", "plaserve"]     # left out: all
    [metric]  [search]  [tuning]        # what differs from the defaults of these settings
    [[case]]                            # see `case.Case`
    name = "..."
    vary = {model = ["qwen3-32b", "llama-3.1-8b"], instances = [1, 8]}   # one case of every combination

The suites of the package lie in `suites/`; any other is named by its path.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from service.policies import POLICIES
from service.sim.case import Case, cases_of
from service.sim.figures import MetricSettings
from service.sim.goodput import SearchSettings
from service.sim.lab_policies import is_known
from service.sim.tasks import LabSettings
from service.sim.tuning import TuningSettings

_KEYS = {"title", "policies", "metric", "search", "tuning", "case"}
_Settings = TypeVar("_Settings", MetricSettings, SearchSettings, TuningSettings)


@dataclass(frozen=True, slots=True)
class Suite:
    name: str
    title: str
    policies: tuple[str, ...]
    settings: LabSettings
    cases: tuple[Case, ...]

    def case(self, name: str) -> Case:
        """Raises ValueError naming the cases that exist."""
        for case in self.cases:
            if case.name == name:
                return case
        raise ValueError(
            f"suite {self.name} has no case {name!r}; it has {', '.join(c.name for c in self.cases)}"
        )


def suite_names() -> tuple[str, ...]:
    """Those that the package brings."""
    return tuple(sorted(Path(item.name).stem for item in _folder().iterdir() if item.name.endswith(".toml")))


def load_suite(name_or_path: str) -> Suite:
    """Raises ValueError naming the suites that exist, or the key that is wrong."""
    if name_or_path in suite_names():
        name, text = name_or_path, (_folder() / f"{name_or_path}.toml").read_text(encoding="utf-8")
    elif (path := Path(name_or_path)).is_file():
        name, text = path.stem, path.read_text(encoding="utf-8")
    else:
        raise ValueError(f"no suite {name_or_path!r}: give a path, or one of {', '.join(suite_names())}")
    try:
        return parse_suite(name, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"suite {name}: {error}") from error


def parse_suite(name: str, data: Mapping[str, Any]) -> Suite:
    unknown = sorted(set(data) - _KEYS)
    if unknown:
        raise ValueError(f"suite {name}: unknown key {unknown[0]!r}; it may have {', '.join(sorted(_KEYS))}")
    policies = tuple(data.get("policies", POLICIES))
    for policy in policies:
        if not is_known(policy):
            raise ValueError(f"suite {name}: unknown policy {policy!r}; choose from {', '.join(POLICIES)}")
    cases = cases_of([table for given in data.get("case", ()) for table in expanded(given)])
    if not cases:
        raise ValueError(f"suite {name}: it has no [[case]]")
    return Suite(
        name,
        str(data.get("title", name)),
        policies,
        LabSettings(
            _settings(MetricSettings, name, "metric", data),
            _settings(SearchSettings, name, "search", data),
            _settings(TuningSettings, name, "tuning", data),
        ),
        cases,
    )


def expanded(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One table of every combination of what `vary` lists; the name says which."""
    rest = {key: value for key, value in table.items() if key != "vary"}
    vary: Mapping[str, Iterable[Any]] = table.get("vary", {})
    for values in product(*vary.values()):
        name = "-".join([str(table.get("name", "")), *(_short(value) for value in values)])
        yield {**rest, **dict(zip(vary, values, strict=True)), "name": name}


def _short(value: Any) -> str:
    """As it stands in the name of a case: 32b for qwen3-32b, 8 for 8."""
    text = str(value)
    return text.rpartition("-")[2] if "-" in text else text


def _settings(kind: type[_Settings], suite: str, key: str, data: Mapping[str, Any]) -> _Settings:
    given = dict(data.get(key, {}))
    known = {item.name for item in fields(kind)}
    for name in given:
        if name not in known:
            raise ValueError(f"suite {suite}: {key}: unknown key {name!r}; it has {', '.join(sorted(known))}")
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        problem: Mapping[str, Any] = error.errors(include_url=False)[0]
        where = ".".join([key, *(str(part) for part in problem["loc"])])
        raise ValueError(f"suite {suite}: {where}: {problem['msg'].removeprefix('Value error, ')}") from error


def _folder() -> Any:
    return resources.files("service.sim") / "suites"
