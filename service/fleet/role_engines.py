"""The engines of a worker, one of which is loaded at a time: which role runs which, loading, and the check
that the one loaded fits the fleet.

Loading and checking take a thread, so that heartbeats and leases go on meanwhile. A thread can't be stopped:
one that nobody waits for any more ends by itself, and what it has loaded is closed.

Long prefills may have an engine of their own; shorts then have the other one, and so has an instance of role
mixed: it takes both lanes, long prompts in chunks. Both must be of one model, tokenizer, context and block
size, because front ends check prompts and hash blocks without knowing where they will run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from engines.bundle_base import TOKENIZER
from engines.catalog import LoadedEngine
from engines.gpu_catalog import LP, SP
from engines.types import DecodeMode, EngineRequest, Pass, PassItem, PassKind
from service.core.types import Role

T = TypeVar("T")
ONE_ENGINE: Mapping[Role, str] = dict.fromkeys(Role, SP)
OWN_ENGINES: Mapping[Role, str] = {Role.SP: SP, Role.MIXED: SP, Role.LP: LP}
WARM_TOKENS = 8


class EngineRefused(Exception):  # noqa: N818 - what happened
    """An engine that was loaded does not do; the message says why."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """What the engines of a worker must have in common."""

    model: str
    tokenizer: str  # SHA-256 of its file; empty: it has none
    context_tokens_max: int
    block_tokens: int
    decodes: bool

    @classmethod
    def of(cls, loaded: LoadedEngine) -> Likeness:
        files = loaded.bundle.manifest.files if loaded.bundle is not None else ()
        capabilities = loaded.engine.capabilities
        return cls(
            loaded.model_name,
            next((file.sha256 for file in files if file.name == TOKENIZER), ""),
            capabilities.context_tokens_max,
            capabilities.block_tokens,
            capabilities.decode is not DecodeMode.NONE,
        )


class RoleEngines:
    """load: an engine by its name, blocking. names: which role runs which. first, first_s: the one that the
    worker began with, by name, and the seconds that it took to load."""

    def __init__(
        self,
        load: Callable[[str], LoadedEngine],
        names: Mapping[Role, str],
        first: LoadedEngine,
        first_name: str = SP,
        first_s: float = 0.0,
    ) -> None:
        self.names = names
        self.loaded = first_name
        self.load_s = {first_name: first_s}  # by name, as measured last
        self._load = load
        self._like = Likeness.of(first)
        self._bundles = {first_name: first.bundle_id}

    def of(self, role: Role) -> str:
        return self.names[role]

    @property
    def move_s(self) -> float:
        """Seconds to load the dearest of the others; one that was never loaded counts as the present one."""
        present_s = self.load_s[self.loaded]
        return max(
            (self.load_s.get(n, present_s) for n in self.names.values() if n != self.loaded), default=0.0
        )

    async def load(self, name: str, timeout_s: float) -> LoadedEngine:
        """Raises whatever loading raises; TimeoutError, after which it may still go on."""
        start_s = time.monotonic()
        loaded = await in_thread(lambda: self._load(name), timeout_s, _close)
        self.load_s[name] = time.monotonic() - start_s
        return loaded

    async def verify(self, name: str, loaded: LoadedEngine, timeout_s: float) -> None:
        """Raises EngineRefused, TimeoutError, or what the engine raises."""
        like, known = Likeness.of(loaded), self._bundles.get(name, loaded.bundle_id)
        for field in Likeness.__slots__:
            mine, other = getattr(self._like, field), getattr(like, field)
            if mine != other:
                raise EngineRefused(
                    f"engine {name}: {field} is {other!r}, that of the worker's first engine is {mine!r}; "
                    "build both from one model with the same limits"
                )
        if known != loaded.bundle_id:
            raise EngineRefused(
                f"engine {name}: its bundle was {known[:12]} and is {loaded.bundle_id[:12]} now; "
                "start the worker anew to serve another build"
            )
        await in_thread(lambda: warm(loaded), timeout_s, lambda _: None)
        self._bundles[name] = loaded.bundle_id

    async def close(self, loaded: LoadedEngine, timeout_s: float) -> None:
        """Raises TimeoutError, or what the engine raises."""
        await in_thread(loaded.engine.close, timeout_s, lambda _: None)


def warm(loaded: LoadedEngine) -> None:
    """One pass through the engine, less than a block so that it leaves nothing in the cache.

    Raises EngineRefused where no token comes of it or something is held after it, and what the engine raises.
    """
    engine = loaded.engine
    tokens = max(1, min(WARM_TOKENS, engine.capabilities.block_tokens - 1))
    engine.submit(EngineRequest("warm", tuple(range(3, 3 + tokens)), 1))
    result = engine.execute(Pass(0, PassKind.PREFILL, (PassItem("warm", tokens, 0),)))
    item = next((one for one in result.items if one.request_id == "warm"), None)
    if item is None or item.token is None:
        raise EngineRefused(f"a pass of {tokens} tokens gave no token: {item.error if item else 'no item'}")
    engine.cancel("warm")  # of no effect where it has ended
    if live := engine.stats().requests_live:
        raise EngineRefused(f"{live} requests are held after a pass that ended its only one")
    engine.kv_events()


def _close(loaded: LoadedEngine) -> None:
    loaded.engine.close()


async def in_thread(work: Callable[[], T], timeout_s: float, dispose: Callable[[T], None]) -> T:
    """`work` in a thread of its own, which does not keep the process from ending. Raises what it raises, and
    TimeoutError; `dispose` is given the result that comes when nobody waits for it any more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T) -> None:
        if future.done():
            threading.Thread(target=dispose, args=(result,), daemon=True).start()
        else:
            future.set_result(result)

    def fail(error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except Exception as error:
            _soon(loop, fail, error)
            return
        if not _soon(loop, deliver, result):
            dispose(result)

    threading.Thread(target=run, name="engine loading", daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await future


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[T], None], value: T) -> bool:
    """False where the loop is over."""
    try:
        loop.call_soon_threadsafe(call, value)
    except RuntimeError:
        return False
    return True
