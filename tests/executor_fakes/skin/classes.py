"""Classes that take exactly the recorded parameters, made from `surface.json`.

binding: as the C++ bindings show themselves: no signature to inspect, one in words in the docstring;
TypeError for any other keyword, AttributeError for any other attribute. pydantic: `model_fields`,
ValueError for an unknown key. keywords: a dataclass that takes keywords only. plugins: fields that are set
one by one.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

REQUIRED = "required"
_TABLE = Path(__file__).parents[1] / "surface.json"


@cache
def table() -> dict[str, Any]:
    return dict(json.loads(_TABLE.read_text(encoding="utf-8")))


class Surface:
    """One stratum. `classes[module][name]` are its classes, enums and functions' parameters."""

    def __init__(self, stratum: str) -> None:
        data = table()
        if stratum not in data["strata"]:
            raise ValueError(f"no stratum {stratum}; there are {', '.join(data['strata'])}")
        self.stratum = stratum
        self.version: str = data["strata"][stratum]["version"]
        self.tensorrt: str | None = data["strata"][stratum]["tensorrt"]
        self.entries = [entry for entry in data["symbols"] if stratum in entry["strata"]]
        self.classes: dict[str, dict[str, Any]] = {}
        for entry in self.entries:
            made = _make(entry, self.classes.setdefault(entry["module"], {}))
            if made is not None:
                self.classes[entry["module"]][entry["name"]] = made
        for entry in self.entries:
            if "nested_in" in entry:
                names = self.classes[entry["module"]]
                setattr(names[entry["nested_in"]], entry["name"], names.pop(entry["name"]))

    def entry(self, module: str, name: str) -> dict[str, Any]:
        return next(e for e in self.entries if (e["module"], e["name"]) == (module, name))

    def exported(self, module: str) -> dict[str, Any]:
        """Names that `module` re-exports."""
        names = table()["exported"].get(module, {})
        return {
            name: self.classes[home][name]
            for name, home in names.items()
            if name in self.classes.get(home, {})
        }


def check_call(what: str, params: list[list[str]], args: tuple[Any, ...], given: Mapping[str, Any],
               names: Mapping[str, Any]) -> dict[str, Any]:  # fmt: skip
    """The values of all parameters of a call. Raises TypeError as Python does."""
    known = [name for name, how, _ in params if how != "var"]
    positional = [name for name, how, _ in params if how == "any"]
    takes_any = any(name.startswith("**") for name, _, _ in params)
    if len(args) > len(positional):
        raise TypeError(f"{what} takes {len(positional)} positional arguments, {len(args)} were given")
    values = dict(zip(positional, args, strict=False))
    for name, value in given.items():
        if name in values:
            raise TypeError(f"{what} got multiple values for argument '{name}'")
        if name not in known and not takes_any:
            raise TypeError(f"{what} got an unexpected keyword argument '{name}'")
        values[name] = value
    for name, how, default in params:
        if how == "var" or name in values:
            continue
        if default == REQUIRED:
            raise TypeError(f"{what} is missing the argument '{name}'")
        values[name] = default_of(default, names)
    return values


def default_of(text: str, names: Mapping[str, Any]) -> Any:
    """What a recorded default stands for; a word that means nothing here stays a string."""
    if text in ("true", "false"):
        return text == "true"
    if text.startswith("factory:"):
        text = {"dict": "{}", "list": "[]"}.get(text[8:], text[8:] + "()")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    if text.endswith("()"):
        made = names.get(text[:-2])
        return made() if made is not None else None
    return text


def _make(entry: dict[str, Any], names: dict[str, Any]) -> Any:
    kind, name, params = entry["kind"], entry["name"], entry.get("params", [])
    if kind == "enum":
        return enum.Enum(name, {member: member for member in entry["members"]}, module=entry["module"])
    if kind == "binding":
        return _binding(entry, params, names)
    if kind == "pydantic":
        return _pydantic(entry, params, names)
    if kind == "plugins":
        return _plugins(entry, params)
    if kind in ("keywords", "dataclass"):
        return _dataclass(name, params, names, keywords=kind == "keywords")
    return None  # its behaviour is written by hand


def _base(entry: dict[str, Any], values: dict[str, Any]) -> type:
    return type(entry["name"], (), {"__module__": entry["module"], **values})


def _binding(entry: dict[str, Any], params: list[list[str]], names: dict[str, Any]) -> type:
    what = entry["name"]
    known = {*entry.get("properties", ()), *(name for name, _, _ in params)}
    dynamic = entry.get("dynamic", False)

    def init(self: Any, *args: Any, **given: Any) -> None:
        if not params:
            raise TypeError(f"{what}: No constructor defined!")
        for name, value in check_call(f"{what}.__init__()", params, args, given, names).items():
            object.__setattr__(self, name, value)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name not in known and not dynamic:
            raise AttributeError(f"'{what}' object has no attribute '{name}'")
        object.__setattr__(self, name, value)

    words, star = [], False
    for name, how, default in params:
        if how == "keyword" and not star:
            words.append("*")
            star = True
        words.append(f"{name}: object" + ("" if default == REQUIRED else f" = {default}"))
    init.__doc__ = f"__init__(self, {', '.join(words)}) -> None"
    made = {"__init__": init, "__setattr__": set_attribute}
    return _base(entry, {**made, **dict.fromkeys(entry.get("properties", ()))})


def bound(cls: type, **values: Any) -> Any:
    """An object of a binding class that only the other side makes."""
    made: Any = object.__new__(cls)
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _pydantic(entry: dict[str, Any], params: list[list[str]], names: dict[str, Any]) -> type:
    fields = {name: default for name, _, default in params}

    def init(self: Any, **given: Any) -> None:
        for name in given:
            if name not in fields:
                raise ValueError(f"{entry['name']}.{name}: Extra inputs are not permitted")
        for name, default in fields.items():
            if name not in given and default == REQUIRED:
                raise ValueError(f"{entry['name']}.{name}: Field required")
            setattr(self, name, given[name] if name in given else default_of(default, names))

    return _base(entry, {"__init__": init, "model_fields": fields})


def _plugins(entry: dict[str, Any], params: list[list[str]]) -> type:
    fields = {name: default_of(default, {}) for name, _, default in params}

    def init(self: Any, **given: Any) -> None:
        for name, default in fields.items():
            object.__setattr__(self, name, given.get(name, default))

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name not in fields:
            raise ValueError(f"PluginConfig has no field {name}")
        flags = {"enable": True, "disable": False if isinstance(fields[name], bool) else None}
        object.__setattr__(self, name, flags.get(value, value) if isinstance(value, str) else value)

    return _base(entry, {"__init__": init, "__setattr__": set_attribute, "model_fields": fields})


def _dataclass(name: str, params: list[list[str]], names: dict[str, Any], *, keywords: bool) -> type:
    fields: list[Any] = []
    for field, _, default in params:
        if default == REQUIRED:
            fields.append((field, Any))
        else:
            factory = dataclasses.field(default_factory=partial(default_of, default, names))
            fields.append((field, Any, factory))
    return dataclasses.make_dataclass(name, fields, kw_only=keywords)
