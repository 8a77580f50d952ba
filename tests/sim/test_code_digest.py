"""Keys of kept results, and the digest of code in them: it changes with the code that a result comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.policies.registry import POLICIES
from service.sim import code_digest
from service.sim.cache import key_of, write_whole
from service.sim.code_digest import imported, source_digest

FILES = {
    "service/__init__.py": "",
    "service/policies/__init__.py": "from service.policies.registry import POLICIES\n",
    "service/policies/registry.py": (
        "from service.policies.one import One\n"
        "from service.policies import two\n"
        "from service.core import base\n"
        "_BUDGETS = (1, 2)\n"
        "POLICIES = {\n"
        "    'one': Kind(make=One, what='serves', search={'b': _BUDGETS}),\n"
        "    'two': Kind(make=lambda settings: two.make(settings), what='waits'),\n"
        "}\n"
        "def parse(spec):\n    return base.read(spec)\n"
    ),
    "service/policies/one.py": (
        "from service.core.base import X\n\nclass One:\n    '''Serves.'''\n    y = X\n"
    ),
    "service/policies/two.py": "from ..core import base\nfrom . import shared\n",
    "service/policies/shared.py": "LIMIT = 3\n",
    "service/core/__init__.py": "",
    "service/core/base.py": "import numpy\nX = 1\n",
    "service/sim/__init__.py": "",
    "service/sim/kernel.py": "import heapq\nfrom service.policies.registry import POLICIES\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small project of the same layout."""
    for name, text in FILES.items():
        write_whole(tmp_path / name, text.encode())
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """Files are read once for each process."""
    for cached in (code_digest._file, code_digest._imports, code_digest._content):
        cached.cache_clear()


def changed_policies(project: Path, name: str, old: str, new: str) -> set[str]:
    before = {policy: source_digest(["service.sim.kernel"], policy) for policy in ("one", "two")}
    path = project / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    forget()
    return {p for p, digest in before.items() if source_digest(["service.sim.kernel"], p) != digest}


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("service/policies/one.py", "y = X", "y = X + 1", {"one"}),
        ("service/policies/one.py", "Serves.", "Serves everybody.", set()),
        ("service/policies/one.py", "y = X", "y = X  # why", set()),
        ("service/policies/shared.py", "3", "4", {"two"}),
        ("service/core/base.py", "X = 1", "X = 2", {"one", "two"}),
        ("service/sim/kernel.py", "heapq", "bisect", {"one", "two"}),
        ("service/policies/registry.py", "(1, 2)", "(1, 3)", {"one"}),
        ("service/policies/registry.py", "'serves'", "'serves all'", set()),
        ("service/policies/registry.py", "two.make(settings)", "two.make(settings, 1)", {"two"}),
        (
            "service/policies/registry.py",
            "return base.read(spec)",
            "return base.read(spec, 1)",
            {"one", "two"},
        ),
    ],
)
def test_a_change_of_code_is_a_change_of_what_depends_on_it(
    project: Path, name: str, old: str, new: str, changed: set[str]
) -> None:
    assert changed_policies(project, name, old, new) == changed


def test_imports_are_followed_and_names_that_do_not_exist_refused(project: Path) -> None:
    assert imported(["service.policies.two"]) == {
        "service",
        "service.core",
        "service.core.base",
        "service.policies.shared",
        "service.policies.two",
    }
    with pytest.raises(ValueError, match=r"module service\.policies\.nine is not in"):
        source_digest(["service.policies.nine"])
    with pytest.raises(ValueError, match="unknown policy 'three'; choose from one, two"):
        source_digest(["service.sim.kernel"], "three")


def test_of_the_real_table_every_policy_has_a_digest_of_its_own() -> None:
    some = ("plaserve", "fcfs", "router_lb", "laps_artifact")
    assert set(some) <= set(POLICIES)
    assert len({source_digest(["service.sim.point"], policy) for policy in some}) == len(some)
    found = imported(["service.sim.tasks", "service.policies.fcfs"])
    assert {"service.sim.kernel", "service.core.scheduler", "engines.simulated"} <= found
    assert "service.policies.edf_chunked" not in found


def test_keys_do_not_depend_on_the_order_of_what_they_are_made_of() -> None:
    assert key_of({"a": 1, "b": [1.5, None]}) == key_of({"b": [1.5, None], "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
