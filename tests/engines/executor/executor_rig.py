"""An engine over a fake executor in this process, and a link that says what a script tells it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from engines.executor.engine import ExecutorEngine
from engines.executor.types import (
    Call,
    ContextTicket,
    ExecutorRole,
    ExecutorSettings,
    Facts,
    LinkLost,
    Report,
)
from engines.profiles import Profiles
from engines.types import (
    Capabilities,
    Chunking,
    DecodeMode,
    EngineRequest,
    ItemResult,
    Layout,
    Padding,
    Pass,
    PassItem,
    PassKind,
    PassResult,
    Sampling,
)
from tests.executor_fakes.link import InProcessLink, small_executor
from tests.executor_fakes.messages import make_token
from tests.executor_fakes.model import VOCABULARY, ExecutorCrash, FakeExecutor
from tests.executor_fakes.vices import VIRTUOUS, Vices

BLOCK, BLOCKS = 8, 24
EOS = 96
_pass_ids = count(1)


def limits(role: ExecutorRole = ExecutorRole.BOTH) -> Capabilities:
    return Capabilities(
        layout=Layout.PACKED,
        padding=Padding.NOTHING,
        chunking=Chunking.PREFIX_REUSE,
        merges_lanes=True,
        decode=DecodeMode.NONE if role is ExecutorRole.CONTEXT else DecodeMode.BESIDE,
        requests_max=4,
        context_tokens_max=192,
        block_tokens=BLOCK,
        kv_blocks_total=BLOCKS,
    )


PROFILES = Profiles(Layout.PACKED, Padding.NOTHING, (8, 16, 32, 64))


def over(
    link: Any, clock: Callable[[], float], role: ExecutorRole = ExecutorRole.BOTH, **settings: Any
) -> ExecutorEngine:
    made = ExecutorEngine(
        link,
        limits(role),
        PROFILES,
        ExecutorSettings(**{"eos_id": EOS, **settings}),
        role,
        fingerprint="fake-bundle",
        clock=clock,
    )
    made.start()
    return made


@dataclass
class Rig:
    """An engine, its link, and all that its passes reported."""

    link: InProcessLink
    engine: ExecutorEngine
    got: dict[str, list[ItemResult]] = field(default_factory=dict)

    @property
    def executor(self) -> FakeExecutor:
        assert self.link.executor is not None
        return self.link.executor

    def prefill(self, *items: tuple[str, int, int]) -> PassResult:
        return self._run(PassKind.PREFILL, tuple(PassItem(*item) for item in items))

    def decode(self, *items: tuple[str, int]) -> PassResult:
        return self._run(PassKind.DECODE, tuple(PassItem(i, 1, past) for i, past in items))

    def _run(self, kind: PassKind, items: tuple[PassItem, ...]) -> PassResult:
        result = self.engine.execute(Pass(next(_pass_ids), kind, items))
        for item in result.items:
            self.got.setdefault(item.request_id, []).append(item)
        return result

    def tokens(self, request_id: str) -> list[int]:
        return [item.token for item in self.got.get(request_id, ()) if item.token is not None]

    def decode_to_the_end(self, request_id: str) -> None:
        while not (last := self.got[request_id][-1]).finish and last.error is None:
            self.decode((request_id, last.position))

    def run_ahead(self, iterations: int = 100) -> None:
        """The executor works while nobody asks it."""
        with suppress(ExecutorCrash):
            for _ in range(iterations):
                if not self.executor.step():
                    return

    @property
    def incidents(self) -> dict[str, int]:
        return dict(self.engine.stats().incidents)

    @property
    def held(self) -> int:
        stats = self.engine.stats()
        return stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached


def rig(
    vices: Vices | Sequence[Vices] = VIRTUOUS,
    role: ExecutorRole = ExecutorRole.BOTH,
    link: dict[str, Any] | None = None,
    executor: dict[str, Any] | None = None,
    **settings: Any,
) -> Rig:
    """vices: of each start; the last one's stay."""
    each = list(vices) if not isinstance(vices, Vices) else [vices]

    def make() -> FakeExecutor:
        return small_executor(each.pop(0) if len(each) > 1 else each[0], **(executor or {}))

    made = InProcessLink(make, **(link or {}))
    return Rig(made, over(made, made.clock, role, **settings))


def prompt(tokens: int, family: int = 0) -> tuple[int, ...]:
    """Prompts of one family begin alike."""
    return tuple((family * 31 + position * 7 + position // 5) % VOCABULARY for position in range(tokens))


def asked(
    request_id: str,
    tokens: int,
    max_new_tokens: int = 1,
    family: int = 0,
    *,
    ignore_eos: bool = True,
    retain: bool = False,
) -> EngineRequest:
    sampling = Sampling(ignore_eos=ignore_eos)
    return EngineRequest(request_id, prompt(tokens, family), max_new_tokens, sampling, retain)


def answer_of(request: EngineRequest, end_id: int | None = None) -> list[int]:
    """What the fake executor says to it, when nothing ends it early."""
    return [
        make_token(request.token_ids, place, VOCABULARY, end_id) for place in range(request.max_new_tokens)
    ]


@dataclass
class ScriptedLink:
    """Gives the reports of `script`, one list a receive; then nothing, for as long as it was told to wait.

    An exception in the script is raised. Names in the script's answers are request ids: they stand for the
    call that was made for it last.
    """

    script: list[list[Report] | Exception] = field(default_factory=list)
    calls: list[tuple[Call, ...]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    facts: Facts = field(default_factory=lambda: Facts("1.2.1", BLOCKS, BLOCK))
    now_s: float = 0.0
    starts: int = 0
    history: list[str] = field(default_factory=list)
    start_fails: int = 0
    refuses: bool = False  # enqueue and cancel find the executor gone
    at_start: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.now_s

    def start(self) -> Facts:
        self.starts += 1
        self.history.append("start")
        self.at_start()
        if self.starts > 1 and self.start_fails:
            self.start_fails -= 1
            raise LinkLost("it does not come up")
        self.refuses = False
        return self.facts

    def enqueue(self, calls: Sequence[Call]) -> None:
        if self.refuses:
            raise LinkLost("it is gone")
        self.calls.append(tuple(calls))

    def cancel(self, call_id: str) -> None:
        if self.refuses:
            raise LinkLost("it is gone")
        self.cancelled.append(call_id)

    def receive(self, timeout_s: float) -> Sequence[Report]:
        assert timeout_s >= 0.0
        if self.refuses:
            raise LinkLost("it is gone")
        if timeout_s == 0.0:
            return ()
        if not self.script:
            self.now_s += timeout_s
            return ()
        reports = self.script.pop(0)
        if isinstance(reports, Exception):
            raise reports
        return [self._addressed(report) for report in reports]

    def close(self) -> None:
        self.history.append("close")

    def interrupt(self) -> None:
        self.history.append("interrupt")

    def call_of(self, request_id: str) -> str:
        ids = [call.call_id for calls in self.calls for call in calls]
        return next((i for i in reversed(ids) if i.rpartition("/")[0] == request_id), request_id)

    def _addressed(self, report: Any) -> Report:
        made: Report = report
        if hasattr(report, "call_id"):
            made = replace(report, call_id=self.call_of(report.call_id))
        return made


def scripted(
    script: Sequence[list[Report] | Exception] = (), role: ExecutorRole = ExecutorRole.BOTH, **settings: Any
) -> tuple[ScriptedLink, ExecutorEngine]:
    link = ScriptedLink(list(script))
    return link, over(link, link.clock, role, **settings)


def ticket(first: tuple[int, ...] = (7,), fingerprint: str = "fake-bundle") -> ContextTicket:
    return ContextTicket(first, 1, b"kv", fingerprint, BLOCK)
