"""The Engine protocol: what every adapter offers, checked by one suite (tests/engines/test_contract.py).

An engine is synchronous and single-threaded: the runtime calls it from one worker thread. All methods but
`execute` return at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from engines.profiles import Profiles
from engines.types import (
    Capabilities,
    Chunking,
    DecodeMode,
    EngineRequest,
    EngineStats,
    KvEvent,
    Pass,
    PassKind,
    PassResult,
)


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


def check_pass(
    pass_: Pass,
    limits: Capabilities,
    answered: Callable[[str], bool | None],
    prompt_tokens: Callable[[str], int] | None = None,
) -> None:
    """What every engine refuses before it runs a pass. Raises ValueError, KeyError with all unknown requests.

    answered: whether a request has its first token, so that it decodes; None where it is not known.
    prompt_tokens: of a known request. An engine that takes each part of a prompt as a request of its own
    must give it: a part that does not end its prompt must end with a block, since the next finds its blocks.
    """
    what, decode = f"pass {pass_.pass_id}", pass_.kind is PassKind.DECODE
    _check_layer_block(what, pass_, limits)
    ids = [item.request_id for item in pass_.items]
    if not ids or len(set(ids)) != len(ids):
        raise ValueError(f"{what}: items must be at least one, each of another request")
    if len(ids) > limits.requests_max:
        raise ValueError(f"{what}: {len(ids)} items; at most {limits.requests_max}")
    if decode and limits.decode is DecodeMode.NONE:
        raise ValueError(f"{what}: this engine does not decode")
    if unknown := [name for name in ids if answered(name) is None]:
        raise KeyError(*unknown)
    by_blocks = limits.chunking is Chunking.PREFIX_REUSE and not decode
    for item in pass_.items:
        has_token = answered(item.request_id)
        if item.new_tokens < 1 or (decode and item.new_tokens != 1):
            raise ValueError(f"{what}: new_tokens of {item.request_id} is {item.new_tokens}")
        if has_token is not decode:
            state = "is already" if has_token else "is not yet"
            raise ValueError(f"{what}: the prompt of {item.request_id} {state} computed")
        if by_blocks and prompt_tokens is not None:
            end = item.history + item.new_tokens
            if end % limits.block_tokens and end < prompt_tokens(item.request_id):
                raise ValueError(
                    f"{what}: the part of {item.request_id} ends at {end}; end it with a block of "
                    f"{limits.block_tokens} tokens or with its prompt"
                )


def _check_layer_block(what: str, pass_: Pass, limits: Capabilities) -> None:
    block, blocks = pass_.layer_block, pass_.layer_blocks
    if blocks == 1 and block == 0:
        return
    if not 1 <= blocks <= limits.layer_blocks_max:
        raise ValueError(
            f"{what}: layer_blocks is {blocks}; this engine takes 1 to {limits.layer_blocks_max}"
        )
    if not 0 <= block < blocks:
        raise ValueError(f"{what}: layer_block is {block}; it must be 0 to {blocks - 1}")
    if pass_.kind is PassKind.DECODE:
        raise ValueError(f"{what}: layer_blocks is {blocks}, but a decode pass runs whole")
