"""docs/scheduling.md says what the code says: state diagrams and defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from pathlib import Path

import pytest

from service.core.lifecycle import (
    HANDOVER,
    HEALTH,
    INSTANCE,
    REQUEST,
    HandoverState,
    HealthState,
    InstanceState,
    RequestState,
)
from service.core.pressure import PressureSettings
from service.core.settings import SchedulerSettings

TEXT = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text(encoding="utf-8")


def diagram(table: Mapping[StrEnum, frozenset[StrEnum]], start: StrEnum) -> str:
    """The mermaid diagram of a table, arrows in the order of the states."""
    order = list(table)
    lines = [f"[*] --> {start}"]
    lines += [f"{old} --> {new}" for old in order for new in sorted(table[old], key=order.index)]
    lines += [f"{state} --> [*]" for state in order if not table[state]]
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])


@pytest.mark.parametrize(
    ("table", "start"),
    [
        (REQUEST, RequestState.QUEUED),
        (HANDOVER, HandoverState.PREFILLED),
        (INSTANCE, InstanceState.UP),
        (HEALTH, HealthState.HEALTHY),
    ],
    ids=["request", "hand-over", "instance", "health"],
)
def test_diagrams_are_the_tables(table: Mapping[StrEnum, frozenset[StrEnum]], start: StrEnum) -> None:
    """Each diagram in the page is the one drawn from `service/core/lifecycle.py`."""
    expected = diagram(table, start)
    assert expected in TEXT, f"put this into docs/scheduling.md:\n{expected}"


def test_the_table_of_knobs_is_complete_and_right() -> None:
    """Every scheduler setting is in the table with its default and a reason, and nothing else is."""
    section = TEXT.split("## Knobs", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.+) \|$", section, flags=re.MULTILINE)
    told = {name: value for name, value, _ in rows}
    assert told == {
        item.name: str(getattr(SchedulerSettings(), item.name)) for item in fields(SchedulerSettings)
    }
    assert all(len(reason) > 10 for _, _, reason in rows)


def test_the_table_of_the_controller_is_complete_and_right() -> None:
    """The same for the controller's knobs."""
    section = TEXT.split("| controller | default |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.*) \|$", section, flags=re.MULTILINE)
    assert {name: value for name, value, _ in rows} == {
        item.name: str(getattr(PressureSettings(), item.name)) for item in fields(PressureSettings)
    }


def test_named_tests_and_settings_exist() -> None:
    """Every setting that the page names in its text is one."""
    names = set(re.findall(r"`(\w+_(?:s|tokens|max|min|requests_max|s_max|s_min))`", TEXT))
    assert names <= {item.name for kind in (SchedulerSettings, PressureSettings) for item in fields(kind)}
