"""An exhibit: a question, what was published about it, what we find, and why the two differ. Plain data,
so that a page can be made again from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter

Cell = str | float | int | None


class Kind(StrEnum):
    """How the figures came about."""

    COMPUTED = "computed"  # from the cost model alone
    SIMULATED = "simulated"  # the scheduling core in virtual time over the cost model
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Series:
    """y over x, of equal length; `dashed` for what was published or is a bound, `steps` for levels."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    dashed: bool = False
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    name: str  # the stem of its file
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_log: bool = False
    y_log: bool = False
    marks: tuple[tuple[float, str], ...] = ()  # vertical lines: x, text


@dataclass(frozen=True, slots=True)
class Exhibit:
    """published: what the sources say, with the source. reading: our answer and why it differs."""

    name: str
    title: str
    kind: Kind
    published: str
    table: Table
    reading: str
    plots: tuple[Plot, ...] = ()


_ADAPTER = TypeAdapter(Exhibit)


def to_json(exhibit: Exhibit) -> dict[str, Any]:
    data: dict[str, Any] = _ADAPTER.dump_python(exhibit, mode="json")
    return data


def from_json(data: Mapping[str, Any]) -> Exhibit:
    """Raises pydantic.ValidationError naming the field that is wrong."""
    return _ADAPTER.validate_python(dict(data))
