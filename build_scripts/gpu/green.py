"""Two streams on disjoint SMs of one GPU, by green contexts of the CUDA driver (12.4 and newer).

A green context holds some SMs, and work on its streams runs on no others. torch offers green contexts too
(torch.cuda.green_contexts, 2.9 and newer), but each one there is cut from the whole GPU anew, so that two of
them may hold the same SMs. Here one split gives both sides: a group of SMs, and all that remain. The driver
is called through ctypes, so nothing has to be installed; torch takes the streams as external ones.

The layout of `CUdevResource` is that of cuda.h (12.4 to 13): a type, then from byte 96 what it describes, for
SMs their number first. It is checked against the number that torch knows before it is trusted.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

_SM_RESOURCE = 1  # CU_DEV_RESOURCE_TYPE_SM
_SM_COUNT_AT = 96
_RESOURCE_BYTES = 512  # 144 in these versions; room for more
_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM: the only flag, and needed before 13
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the only kind of stream that a green context gives


class NoGreenContexts(Exception):  # noqa: N818 - what happened
    """This driver or GPU gives none; the message says which call failed."""


@dataclass(frozen=True, slots=True)
class Side:
    """sms: as the driver rounded them. stream: handle of a stream that runs on them alone."""

    sms: int
    stream: int


def load_driver() -> Any:
    """Raises NoGreenContexts where there is no CUDA driver, or one that is too old."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in ("cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuGreenCtxStreamCreate"):
            getattr(driver, name)
    except (OSError, AttributeError) as error:
        raise NoGreenContexts(f"the CUDA driver has no green contexts: {error}") from error
    return driver


def split(driver: Any, ordinal: int, total_sms: int, sms: int) -> tuple[Side, Side]:
    """(at least `sms` SMs, all the others) of a GPU of `total_sms`. They live as long as the process.

    Raises NoGreenContexts. The GPU must be in use by torch already.
    """
    device = ctypes.c_int()
    _call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
    whole, group, rest = (ctypes.create_string_buffer(_RESOURCE_BYTES) for _ in range(3))
    _call(driver, "cuDeviceGetDevResource", device, whole, ctypes.c_int(_SM_RESOURCE))
    if _count(whole) != total_sms:
        raise NoGreenContexts(f"the driver describes SMs otherwise than expected ({_count(whole)} of them)")
    groups = ctypes.c_uint(1)
    _call(
        driver,
        "cuDevSmResourceSplitByCount",
        group,
        ctypes.byref(groups),
        whole,
        rest,
        ctypes.c_uint(0),
        ctypes.c_uint(sms),
    )
    if not 0 < _count(group) < total_sms or _count(group) + _count(rest) > total_sms:
        raise NoGreenContexts(f"a split at {sms} SMs gave {_count(group)} and {_count(rest)} of {total_sms}")
    return _side(driver, device, group), _side(driver, device, rest)


def _side(driver: Any, device: ctypes.c_int, resource: Any) -> Side:
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _call(driver, "cuDevResourceGenerateDesc", ctypes.byref(description), resource, ctypes.c_uint(1))
    flags = ctypes.c_uint(_DEFAULT_STREAM)
    _call(driver, "cuGreenCtxCreate", ctypes.byref(context), description, device, flags)
    flags, priority = ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0)
    _call(driver, "cuGreenCtxStreamCreate", ctypes.byref(stream), context, flags, priority)
    return Side(_count(resource), stream.value or 0)


def _count(resource: Any) -> int:
    return int.from_bytes(resource.raw[_SM_COUNT_AT : _SM_COUNT_AT + 4], "little")


def _call(driver: Any, name: str, *arguments: Any) -> None:
    status = getattr(driver, name)(*arguments)
    if status != 0:
        raise NoGreenContexts(f"{name} failed with CUDA error {status}")
