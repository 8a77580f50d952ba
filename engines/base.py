"""The Engine protocol: what every adapter offers, checked by one suite (tests/engines/test_contract.py).

An engine is synchronous and single-threaded: the runtime calls it from one worker thread. All methods but
`execute` return at once.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from engines.profiles import Profiles
from engines.types import Capabilities, EngineRequest, EngineStats, KvEvent, Pass, PassResult


class EngineError(Exception):
    """The engine can't go on; every request that it holds is lost."""


class PassError(Exception):
    """One pass failed; the engine goes on. `request_ids` names the requests that lost their KV."""

    def __init__(self, message: str, request_ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.request_ids = request_ids


@runtime_checkable
class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def profiles(self) -> Profiles: ...

    def submit(self, request: EngineRequest) -> None:
        """Make a request known. Raises ValueError for a known id or one that can never fit."""

    def execute(self, pass_: Pass) -> PassResult:
        """Run one forward and block until it is done.

        The first prefill pass of a request takes what the prefix cache holds of its prompt. A request that
        finishes (`ItemResult.finish`) gives its blocks back, full ones staying reusable. Raises PassError,
        EngineError, KeyError for an unknown request, ValueError for a pass that no profile takes.
        """

    def cancel(self, request_id: str) -> None:
        """Forget a request and free its blocks. Unknown ids are ignored: cancelling twice is harmless."""

    def stats(self) -> EngineStats: ...

    def kv_events(self) -> tuple[KvEvent, ...]:
        """Changes of the prefix cache since the last call, oldest first."""

    def close(self) -> None:
        """Give everything back. The engine can't be used afterwards."""
