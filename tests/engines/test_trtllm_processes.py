"""Adapters over processes that hold a fake tensorrt_llm: hand-over, a crash, versions that are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from engines import trtllm, trtllm_torch
from engines.base import PassError
from engines.executor.engine import ExecutorEngine
from engines.executor.types import BackendUnavailable, ExecutorRole, ExecutorSettings, Incident
from engines.trtllm_child.config import ChildConfig, Driver
from engines.types import EngineRequest, Pass, PassItem, PassKind, Sampling
from tests.executor_fakes.driving import alone, prompt
from tests.executor_fakes.package import environment, write_engine, write_package
from tests.executor_fakes.vices import NEVER, VIRTUOUS, Vices

_pass_ids = count(1)


class Opener:
    """Opens engines; they are closed when the test ends."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        sizes = {"requests": 4, "pass_tokens": 64, "context_tokens": 192}
        self._engine_dir = write_engine(directory / "engine", block_tokens=8, **sizes)
        (directory / "exchange").mkdir()

    def __call__(
        self,
        stratum: str,
        role: ExecutorRole = ExecutorRole.BOTH,
        driver: Driver = Driver.ENGINE,
        vices: Vices = VIRTUOUS,
    ) -> ExecutorEngine:
        package = write_package(self._directory / stratum, stratum)
        config = ChildConfig(
            driver,
            str(self._engine_dir),
            None,
            role,
            requests_max=4,
            pass_tokens_max=64,
            context_tokens_max=192,
            block_tokens=8,
            kv_blocks=24,
        )
        if role is not ExecutorRole.BOTH:
            config = replace(config, transceiver="UCX")
        adapter = trtllm if driver is Driver.ENGINE else trtllm_torch
        told = environment(package, vices, exchange=str(self._directory / "exchange"))
        engine = adapter.open_engine(
            config, Path(sys.executable), ExecutorSettings(), fingerprint="bundle", environment=told
        )
        self._stack.callback(engine.close)
        return engine


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    with ExitStack() as stack:
        yield Opener(tmp_path, stack)


def asked(request_id: str, tokens: int, answer: int) -> EngineRequest:
    return EngineRequest(request_id, prompt(tokens), answer, Sampling(ignore_eos=True))


def run(engine: ExecutorEngine, kind: PassKind, request_id: str, new: int, history: int) -> list[int]:
    """The tokens that a pass of one item brought."""
    result = engine.execute(Pass(next(_pass_ids), kind, (PassItem(request_id, new, history),)))
    assert [item.error for item in result.items] == [None] * len(result.items)
    return [item.token for item in result.items if item.token is not None]


BAD = Vices(dup_first_token=True, late_transfer=3)


@pytest.mark.parametrize(
    ("stratum", "driver", "vices"),
    [("S2", Driver.ENGINE, VIRTUOUS), ("S3", Driver.ENGINE, BAD), ("S3", Driver.TORCH, BAD)],
)
def test_a_hand_over_between_processes(opened: Opener, stratum: str, driver: Driver, vices: Vices) -> None:
    """The first token comes once, and the prefill side's blocks are free after."""
    context = opened(stratum, ExecutorRole.CONTEXT, driver)
    decode = opened(stratum, ExecutorRole.GENERATION, driver, vices)
    context.submit(asked("r", 20, 1))
    first = run(context, PassKind.PREFILL, "r", 20, 0)
    ticket = context.take_ticket("r")
    decode.adopt(asked("r", 20, 5), ticket)
    rest: list[int] = []
    while len(rest) < 4:
        rest += run(decode, PassKind.DECODE, "r", 1, 20 + len(rest))
    context.release("r")
    assert [*first, *rest] == alone(prompt(20), 5)
    for engine in (context, decode):
        stats = engine.stats()
        assert stats.kv_blocks_free + stats.kv_blocks_cached == stats.kv_blocks_total
    assert decode.incidents[Incident.DUPLICATE_FIRST_TOKEN] == int(vices.dup_first_token)


def test_a_crash_on_abort_costs_what_it_held_and_no_more(opened: Opener) -> None:
    """Its KV never comes, so the call is certain to run when it is cancelled."""
    vices = Vices(crash_on_abort=True, late_transfer=NEVER)
    context, decode = opened("S2", ExecutorRole.CONTEXT), opened("S2", ExecutorRole.GENERATION, vices=vices)
    for request_id in ("cancelled", "beside"):
        context.submit(asked(request_id, 20, 1))
        run(context, PassKind.PREFILL, request_id, 20, 0)
        decode.adopt(asked(request_id, 20, 5), context.take_ticket(request_id))
    decode.cancel("cancelled")
    with pytest.raises(PassError, match="139") as lost:
        run(decode, PassKind.DECODE, "beside", 1, 20)
    assert lost.value.request_ids == ("beside",)
    assert decode.incidents[Incident.EXECUTOR_LOST] == decode.incidents[Incident.RESTARTED] == 1
    assert decode.stats().kv_blocks_free == decode.stats().kv_blocks_total


@pytest.mark.parametrize(("stratum", "says"), [("S0", "0.17.0"), ("S4", "1.4.0")])
@pytest.mark.parametrize("driver", list(Driver))
def test_other_lines_are_refused_with_a_remedy(
    opened: Opener, stratum: str, says: str, driver: Driver
) -> None:
    with pytest.raises(BackendUnavailable) as refused:
        opened(stratum, driver=driver)
    assert says in refused.value.reason
    assert "1.2.1" in refused.value.remedy
