"""What parent and child say to each other: plain data as JSON, one object a message.

Both ends are this project's code, but a child that is dying may write anything. So nothing is unpickled,
every message names its kind, and what is read is checked against the dataclass that the kind stands for: each
field there, none besides, each of its type. Anything else is a `WireError` that says where.

A kind is a dataclass' name. Bytes travel as base64, enums as their value, tuples as lists. Converters are
made once for each type: a decoding GPU makes thousands of answers a second.
"""

from __future__ import annotations

import base64
import binascii
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from engines.executor.types import Call, Facts, Report
from engines.trtllm_child.config import ChildConfig

MESSAGE_BYTES_MAX = 256 * 1024 * 1024  # a pass of 64 prompts of 128k tokens is about 60 MB


class WireError(Exception):
    """A message that this version does not know, or not a message at all."""


# --- parent to child ---


@dataclass(frozen=True, slots=True)
class Configure:
    config: ChildConfig


@dataclass(frozen=True, slots=True)
class Enqueue:
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    call_id: str


@dataclass(frozen=True, slots=True)
class Close:
    """End: `grace_s` for the executor's own shutdown, which may block for ever."""

    grace_s: float


# --- child to parent ---


@dataclass(frozen=True, slots=True)
class Started:
    facts: Facts


@dataclass(frozen=True, slots=True)
class Failed:
    """This executor can't run here (`BackendUnavailable`)."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Reports:
    """What was heard in one moment: iterations and cache events first, then the answers they belong to.

    skipped: statistics, events or responses that could not be understood and were left out.
    """

    reports: tuple[Report, ...]
    skipped: int = 0


Message = Configure | Enqueue | Cancel | Close | Started | Failed | Reports

Decode = Callable[[Any, str], Any]

_KIND = "is"  # no field may have this name
_AS_IT_IS = frozenset((str, int, float, bool))
_encoders: dict[Any, Callable[[Any], Any]] = {}
_decoders: dict[Any, Decode] = {}


def encode(message: Message) -> bytes:
    return json.dumps(_encoder(type(message))(message), separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes) -> Message:
    """Raises WireError."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {data[:60]!r} ({error})") from None
    message: Message = _decoder(Message)(raw, "message")
    return message


def _encoder(of: Any) -> Callable[[Any], Any]:
    """Makes a value of class `of` into what JSON has."""
    made = _encoders.get(of)
    if made is None:
        made = _encoders[of] = _new_encoder(of)
    return made


def _new_encoder(of: Any) -> Callable[[Any], Any]:
    if is_dataclass(of):
        names = tuple(field.name for field in fields(of))
        kind = typing.cast(type, of).__name__

        def object_of(value: Any) -> Any:
            raw: dict[str, Any] = {_KIND: kind}
            for name in names:
                item = getattr(value, name)
                raw[name] = item if item is None or type(item) in _AS_IT_IS else _encoder(type(item))(item)
            return raw

        return object_of
    if issubclass(of, Enum):
        return lambda value: value.value
    if of is bytes:
        return lambda value: base64.b64encode(value).decode("ascii")
    if of is tuple:
        return _list_of
    if of in _AS_IT_IS or of is types.NoneType:
        return lambda value: value
    raise TypeError(f"{of.__name__} can't be sent")


def _decoder(of: Any) -> Decode:
    """Reads what JSON has as type `of`; the second argument of what it gives is where in the message."""
    made = _decoders.get(of)
    if made is None:
        made = _decoders[of] = _new_decoder(of)
    return made


def _new_decoder(of: Any) -> Decode:
    origin = typing.get_origin(of)
    if origin in (typing.Union, types.UnionType):
        return _one_of(typing.get_args(of))
    if origin is tuple:
        return _tuple_of(typing.get_args(of))
    if is_dataclass(of):
        return _object_of(typing.cast(type, of))
    if of is bytes:
        return _bytes
    if issubclass(of, Enum):
        return _enum_of(of)
    return _plain(of)


def _list_of(items: tuple[Any, ...]) -> Any:
    return items if _all_int(items) else [_encoder(type(item))(item) for item in items]


def _all_int(items: Any) -> bool:
    """Token ids, most of what is sent, need no look at each."""
    return set(map(type, items)) == {int}


def _plain(of: type) -> Decode:
    allowed = (int, float) if of is float else (of,)

    def read(raw: Any, where: str) -> Any:
        if type(raw) not in allowed:
            raise WireError(f"{where}: {_short(raw)} is not {of.__name__}")
        return float(raw) if of is float else raw

    return read


def _bytes(raw: Any, where: str) -> bytes:
    try:
        return base64.b64decode(raw.encode("ascii"), validate=True)
    except (AttributeError, UnicodeEncodeError, binascii.Error):
        raise WireError(f"{where}: {_short(raw)} is not base64") from None


def _enum_of(of: type[Enum]) -> Decode:
    def read(raw: Any, where: str) -> Enum:
        try:
            return of(raw)
        except ValueError:
            raise WireError(f"{where}: {_short(raw)} is not one of {of.__name__}") from None

    return read


def _tuple_of(args: tuple[Any, ...]) -> Decode:
    endless = len(args) == 2 and args[1] is Ellipsis
    each = [_decoder(arg) for arg in args if arg is not Ellipsis]
    whole = endless and args[0] is int

    def read(raw: Any, where: str) -> tuple[Any, ...]:
        if type(raw) is not list:
            raise WireError(f"{where}: {_short(raw)} is not a list")
        if whole and _all_int(raw):
            return tuple(raw)
        if endless:
            return tuple(each[0](item, where) for item in raw)
        if len(raw) != len(each):
            raise WireError(f"{where}: {len(raw)} items, not {len(each)}")
        return tuple(one(item, where) for one, item in zip(each, raw, strict=True))

    return read


def _object_of(of: type) -> Decode:
    hints = typing.get_type_hints(of)
    parts = {field.name: _decoder(hints[field.name]) for field in fields(of)}
    names = {_KIND, *parts}

    def read(raw: Any, where: str) -> Any:
        if type(raw) is not dict or raw.get(_KIND) != of.__name__:
            raise WireError(f"{where}: {_short(raw)} is not {of.__name__}")
        if raw.keys() != names:
            odd = sorted(names.symmetric_difference(raw))
            raise WireError(f"{where}: fields of {of.__name__} differ: {', '.join(odd)}")
        return of(**{name: part(raw[name], name) for name, part in parts.items()})

    return read


def _one_of(args: tuple[Any, ...]) -> Decode:
    objects = {typing.cast(type, arg).__name__: _decoder(arg) for arg in args if is_dataclass(arg)}
    others = [_decoder(arg) for arg in args if not is_dataclass(arg) and arg is not types.NoneType]
    nothing = types.NoneType in args

    def read(raw: Any, where: str) -> Any:
        if raw is None and nothing:
            return None
        if objects and type(raw) is dict:
            kind = raw.get(_KIND)
            if not isinstance(kind, str) or kind not in objects:
                raise WireError(f"{where}: unknown kind {_short(kind)}; known are {', '.join(objects)}")
            return objects[kind](raw, where)
        if len(others) == 1:
            return others[0](raw, where)
        raise WireError(f"{where}: {_short(raw)} is not expected here")

    return read


def _short(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."
