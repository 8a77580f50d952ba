"""Tables of a TOML file into dataclasses, strictly: a wrong or unknown key is an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

STRICT = ConfigDict(extra="forbid")


def checked(adapter: TypeAdapter[Any], value: Any, name_of: Callable[[tuple[Any, ...]], str]) -> Any:
    """`value` as what `adapter` is for, which must have been made with `STRICT`.

    name_of: the path to the value that is wrong -> how to call it in the message, its key included.
    Raises ValueError with one line.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = str(first["msg"]).removeprefix("Value error, ")
        raise ValueError(f"{name_of(first['loc'])}: {message}") from error


def dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)
