"""docs/policies says what the registry says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from service.core.settings import SchedulerSettings
from service.policies import POLICIES, parse
from service.policies.docs import PATH, render

ROOT = Path(__file__).parents[2]
FOLDER = (ROOT / PATH).parent


def test_the_table_is_up_to_date() -> None:
    """docs/policies/README.md is what `python -m service.policies.docs` writes."""
    pages = {page.stem for page in FOLDER.glob("*.md")}
    assert (ROOT / PATH).read_text(encoding="utf-8") == render(pages), "run: python -m service.policies.docs"


def test_pages_are_of_policies_and_the_required_ones_exist() -> None:
    pages = {page.stem for page in FOLDER.glob("*.md")} - {"README"}
    assert pages <= set(POLICIES)
    assert {"fcfs", "plaserve"} <= pages


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_kind_is_complete(name: str) -> None:
    """Every policy says what it does and where it is from; what the search tries are its knobs, the default
    first, and every value is one that it takes."""
    kind = POLICIES[name]
    assert kind.what
    assert kind.source
    own = {item.name: item.default for item in fields(kind.knobs)} if kind.knobs is not None else {}
    for knob, values in kind.search.items():
        default = own[knob] if knob in own else getattr(SchedulerSettings(), knob)
        assert values[0] == default
        assert len(set(values)) == len(values) >= 2
        for value in values:
            _, settings, knobs = parse(f"{name}:{knob}={value}", SchedulerSettings())
            assert getattr(knobs if knob in own else settings, knob) == value


def test_the_page_of_fcfs_names_what_exists() -> None:
    """Files and settings that the page names are there."""
    text = (FOLDER / "fcfs.md").read_text(encoding="utf-8")
    for path in re.findall(r"`((?:service|tests)/[\w/]+\.py)`", text):
        assert (ROOT / path).exists(), path
    settings = {item.name for item in fields(SchedulerSettings)}
    table = text.split("## Knobs", 1)[1].split("\n## ", 1)[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) <= settings
