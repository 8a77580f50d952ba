"""A digest of the code that a result depends on: the files of this project behind some modules and a policy.

Imports are found by reading import statements, not by running anything. The table of policies imports all of
them, so of it only the entry of the policy counts, with what that names, and the functions beside it: a
change of one policy leaves the digests of the others alone. Comments, layout and docstrings don't count, nor
what an entry says for the docs. Libraries are not looked at. The ablations of a policy (`name-mechanism`) are
its entry and the module that makes them, which counts for nobody else.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("engines", "service")
TABLE = "service.policies.registry"
ABLATIONS = "service.sim.ablations"
BARRIERS = frozenset({"service.policies", TABLE, ABLATIONS})
FOR_DOCS = frozenset({"what", "source", "differs"})  # fields of an entry that change no result


def source_digest(modules: Iterable[str], policy: str | None = None) -> str:
    """Of the project files behind these modules, behind `policy`, and behind all that they import.

    Raises ValueError for a module that is not of the project and for a policy that is not in the table.
    """
    names, digest = set(modules), hashlib.sha256()
    if policy is not None:
        name, minus, _ = policy.partition(":")[0].partition("-")
        entry, used = _entry(name)
        names |= used
        digest.update(entry.encode())
        if minus:
            names |= set(_imports(ABLATIONS))
            digest.update(_content(_found(ABLATIONS)).encode())
    for name in sorted(imported(names)):
        digest.update(f"{name}\0{_content(_found(name))}\0".encode())
    return digest.hexdigest()


def imported(modules: Iterable[str]) -> set[str]:
    """The project modules that these import, they themselves and the packages around them included.

    Raises ValueError for a module that is not of the project.
    """
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name in found or name in BARRIERS:
            continue
        found.add(name)
        waiting += [other for other in _imports(name) if other not in found]
    return found


@cache
def _file(module: str) -> Path | None:
    if module.split(".")[0] not in PACKAGES:
        return None
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _found(module: str) -> Path:
    path = _file(module)
    if path is None:
        raise ValueError(f"module {module} is not in {', '.join(PACKAGES)}")
    return path


@cache
def _imports(module: str) -> tuple[str, ...]:
    """Project modules named in the import statements of `module`, and its package."""
    path = _found(module)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    named = [module.rpartition(".")[0]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            named += _from(node, package)
    return tuple(sorted({name for name in named if name and _file(name) is not None}))


def _from(node: ast.ImportFrom, package: str) -> Iterator[str]:
    """`from a import b` names a, and a.b where that is a module."""
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        above = ".".join(parts[: len(parts) - node.level + 1])
        base = f"{above}.{base}" if base else above
    yield base
    for alias in node.names:
        yield f"{base}.{alias.name}"


@cache
def _content(path: Path) -> str:
    """The code of a file without comments, layout and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


# --- the table of policies ---


def _entry(name: str) -> tuple[str, set[str]]:
    """(what the table says of a policy and how it is made, the modules that this names)."""
    tree = ast.parse(_found(TABLE).read_text(encoding="utf-8"))
    modules, values = _modules_of(tree), _assigned(tree)
    table = values.get("POLICIES")
    entries = {
        key.value: value
        for key, value in (zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ())
        if isinstance(key, ast.Constant)
    }
    if name not in entries:
        raise ValueError(f"unknown policy {name!r}; choose from {', '.join(map(str, entries))}")
    entry = entries[name]
    if isinstance(entry, ast.Call):
        entry.keywords = [keyword for keyword in entry.keywords if keyword.arg not in FOR_DOCS]
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    parts: list[ast.AST] = [entry, *functions]
    used: set[str] = set()
    for part in parts:  # grows by the constants that are named
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and node.id != "POLICIES":
                used |= {modules[node.id]} if node.id in modules else set()
                value = values.get(node.id)
                parts += [value] if value is not None and value not in parts else []
    return "".join(ast.dump(part) for part in parts), {module for module in used if _file(module) is not None}


def _modules_of(tree: ast.Module) -> dict[str, str]:
    """Imported name -> the module that it is, or is from."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = inner if _file(inner) else node.module
    return found


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Names of the module -> what they are set to."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    return found
