"""A small model for fake Triton servers, of the size that the contract suite of engines fills."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from build_scripts.trtllm.triton_repository import TritonLimits, write_repository
from engines.executor.engine import ExecutorEngine
from engines.executor.types import Answer, Call, Facts, Report
from engines.profiles import Profiles
from engines.triton_link import TritonLink
from engines.triton_options import TritonOptions
from engines.triton_server import capabilities
from tests.executor_fakes.link import small_executor
from tests.executor_fakes.triton import FakeTriton

MODEL = "tensorrt_llm"
FINGERPRINT = "bundle-1"
_WAIT_S = 10.0  # for what takes milliseconds
LIMITS = TritonLimits(requests_max=4, kv_blocks=24, block_tokens=8)


def write_small(repository: Path, **other: Any) -> Path:
    """The model's directory."""
    given = {"model_name": MODEL, "engine_dir": "/engines/sp", "limits": LIMITS, "fingerprint": FINGERPRINT}
    return write_repository(repository, **{**given, **other})


def options_for(url: str, **other: Any) -> TritonOptions:
    """Of `LIMITS`, with deadlines that a test can wait for."""
    small = {
        "model": MODEL,
        "fingerprint": FINGERPRINT,
        "requests_max": LIMITS.requests_max,
        "pass_tokens_max": 64,
        "context_tokens_max": 192,
        "kv_blocks": LIMITS.kv_blocks,
        "block_tokens": LIMITS.block_tokens,
        "start_timeout_s": 5.0,
        "rpc_timeout_s": 5.0,
    }
    return TritonOptions(**{"url": url, **small, **other})


class SteppedLink:
    """A link with a server of its own, whose iterations stand still between calls of `receive`.

    So what an engine over it sees does not depend on threads. Time is counted as by `link.InProcessLink`; all
    requests of an enqueue are with the server before the next iteration, in order.
    """

    def __init__(self, repository: Path, iteration_s: float = 0.001) -> None:
        self.now_s = 0.0
        self._iteration_s = iteration_s
        self.server = FakeTriton(write_small(repository), small_executor(), stepped=True)
        self._open: set[str] = set()
        self._link = TritonLink(options_for(self.server.url, cancel_timeout_s=60.0))

    def clock(self) -> float:
        return self.now_s

    def start(self) -> Facts:
        return self._link.start()

    def enqueue(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._link.enqueue([call])
            self._open.add(call.call_id)
            _until(lambda call=call: _among(self.server.enqueued, call.call_id))

    def cancel(self, call_id: str) -> None:
        self._link.cancel(call_id)
        if call_id in self._open:
            _until(lambda: _among(self.server.stopped, call_id))

    def receive(self, timeout_s: float) -> Sequence[Report]:
        until_s = self.now_s + timeout_s
        while True:
            moved, answered = self.server.step() if self.now_s < until_s else (False, [])
            self.now_s += self._iteration_s if moved else 0.0
            if answered:
                return self._fetch(answered)
            if not moved:
                self.now_s = max(self.now_s, until_s)
                return ()

    def close(self) -> None:
        self._link.close()
        self.server.stop()

    def interrupt(self) -> None:
        self._link.interrupt()

    def _fetch(self, answered: list[str]) -> list[Report]:
        """The answers that an iteration made, in its order; streams bring them in any."""
        heard: list[Answer] = []
        while len(heard) < len(answered):
            new = self._link.receive(_WAIT_S)
            assert new, f"{len(heard)} of {len(answered)} answers came"
            heard += [answer for answer in new if isinstance(answer, Answer)]
        self._open -= {answer.call_id for answer in heard if answer.final}
        order = [name.partition("-")[2] for name in answered]
        return sorted(heard, key=lambda answer: order.index(answer.call_id))


def stepped_engine(repository: Path, profiles: Profiles) -> ExecutorEngine:
    """An engine as `engines.triton_server.open_engine` makes it, over a `SteppedLink`."""
    link = SteppedLink(repository)
    limits = capabilities(options_for("localhost:8001"))
    engine = ExecutorEngine(link, limits, profiles, fingerprint=FINGERPRINT, clock=link.clock)
    engine.start()
    return engine


def _among(request_ids: Sequence[str], call_id: str) -> bool:
    return any(request_id.partition("-")[2] == call_id for request_id in request_ids)


def _until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _WAIT_S
    while not true():
        assert time.monotonic() < end_s, "the server did not get it"
        time.sleep(0.0005)
