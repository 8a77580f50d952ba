"""The table of policies in docs/policies/README.md, made from the registry.

`python -m service.policies.docs` writes it, in the root of the repository; a test fails where it is old.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from pathlib import Path

from service.policies.registry import POLICIES, PolicyKind

PATH = Path("docs/policies/README.md")

_HEAD = """\
# Policies

The policies that the lab compares. All run under the same scheduler: the same admission, decode rule,
promises of KV and predicted times; a policy only orders the queue, places requests and makes passes. A name
with knobs selects one, as `fcfs:budget_tokens=512`. A knob is one of the policy's own or a
[setting of the scheduler](../scheduling.md).

Peers are built as strong as they are: where a simplification was needed, it favours the peer, and the table
says so. This page is made by `python -m service.policies.docs` from `service/policies/registry.py`.

| policy | what it does | built from | what differs from it |
| --- | --- | --- | --- |
"""

_KNOBS = """
## Knobs

Defaults are the published ones where there are any. Knobs in the first column are tuned per case, all
policies by the same search with the same budget; the default comes first.

| policy | tuned | others |
| --- | --- | --- |
"""

_STARVES = """
## Who may starve

Under an overload without end, these let a request be overtaken for as long as it lasts, as what they are
built from would: {names}. All others bound by whom a request can be overtaken, at their defaults. A test
holds each to what is said here.
"""


def render(pages: Collection[str]) -> str:
    """The page. pages: names of policies that have a page of their own."""
    rows = [_row(name, kind, name in pages) for name, kind in POLICIES.items()]
    knobs = [_knob_row(name, kind) for name, kind in POLICIES.items()]
    starving = ", ".join(f"`{name}`" for name, kind in POLICIES.items() if kind.starves)
    return "".join([_HEAD, *rows, _KNOBS, *knobs, _STARVES.format(names=starving)])


def _row(name: str, kind: PolicyKind, has_page: bool) -> str:
    shown = f"[`{name}`]({name}.md)" if has_page else f"`{name}`"
    what = f"{kind.what}. Its controller moves roles" if kind.controller is not None else kind.what
    return _cells(shown, what, kind.source, kind.differs)


def _knob_row(name: str, kind: PolicyKind) -> str:
    tuned = [f"`{knob}` {', '.join(_value(v) for v in values)}" for knob, values in kind.search.items()]
    own = fields(kind.knobs) if kind.knobs is not None else ()
    others = [f"`{item.name}` {_value(item.default)}" for item in own if item.name not in kind.search]
    return _cells(f"`{name}`", "; ".join(tuned), "; ".join(others))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "none"


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main() -> None:
    pages = {page.stem for page in PATH.parent.glob("*.md")}
    PATH.write_text(render(pages), encoding="utf-8")


if __name__ == "__main__":
    main()
