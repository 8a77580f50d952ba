"""The whole way: engine, link, child, driver and a fake tensorrt_llm; and what the adapters refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from executor_fakes import package
from fake_trtllm import Use, both, config, strata

from engines import trtllm, trtllm_torch
from engines.executor.types import (
    BackendUnavailable,
    ExecutorRole,
    ExecutorSettings,
)
from engines.trtllm_child.config import Driver
from engines.trtllm_child.spelling import engine_spelling
from engines.types import EngineRequest, Padding, Pass, PassItem, PassKind

LONG = tuple(range(300))


@both
@strata
def test_an_engine_runs_over_a_child(packages: Callable[[str], Path], stratum: str, driver: Driver) -> None:
    directory = packages(stratum)
    captures = trtllm_torch.torch_classes(1_024) if driver is Driver.TORCH and stratum != "S1" else ()
    made = config(driver, model_dir=str(directory.parent / "engine"), capture_tokens=captures)
    backend = trtllm if driver is Driver.ENGINE else trtllm_torch
    engine = backend.open_engine(
        made,
        Path(sys.executable),
        ExecutorSettings(),
        start_timeout_s=30.0,
        environment=package.environment(directory),
    )
    try:
        assert engine.capabilities.kv_blocks_total == 128
        engine.submit(EngineRequest("a", LONG, 3))
        first = engine.execute(Pass(1, PassKind.PREFILL, (PassItem("a", 256, 0),)))
        assert [(item.position, item.token) for item in first.items] == [(256, None)]
        second = engine.execute(Pass(2, PassKind.PREFILL, (PassItem("a", 44, 256),)))
        assert (second.items[0].position, second.items[0].computed) == (300, 44)
        got = [item.token for item in second.items]
        number = 2
        while len(got) < 3:
            number += 1
            step = engine.execute(Pass(number, PassKind.DECODE, (PassItem("a", 1, 299 + len(got)),)))
            got += [item.token for item in step.items]
        assert None not in got
        assert not dict(engine.stats().incidents)
    finally:
        engine.close()


@pytest.mark.parametrize("stratum", ["S0", "S4"])
@both
def test_strata_that_are_not_driven_say_so(
    packages: Callable[[str], Path], stratum: str, driver: Driver
) -> None:
    directory = packages(stratum)
    backend = trtllm if driver is Driver.ENGINE else trtllm_torch
    with pytest.raises(BackendUnavailable) as refused:
        backend.open_engine(
            config(driver, version=None),
            Path(sys.executable),
            ExecutorSettings(),
            start_timeout_s=30.0,
            environment=package.environment(directory),
        )
    assert ("0.17.0" if stratum == "S0" else "1.4.0") in refused.value.reason


def test_a_1_2_without_the_engine_backend_is_unavailable_not_broken(use: Use) -> None:
    """Should a patch release drop it: the look at the module says so, not an AttributeError."""
    use("S3")
    with pytest.raises(BackendUnavailable, match="no engine backend"):
        engine_spelling(ModuleType("tensorrt_llm.bindings.executor"))


# --- adapters ---


def test_the_torch_backend_costs_its_captured_sizes() -> None:
    made = config(Driver.TORCH, capture_tokens=trtllm_torch.torch_classes(1_024))
    assert trtllm_torch.capabilities(made).padding is Padding.CLASS
    assert trtllm_torch.profiles(made).t_class(65) == 128
    eager = config(Driver.TORCH)
    assert trtllm_torch.capabilities(eager).padding is Padding.NOTHING


@pytest.mark.parametrize("largest", [1, 64, 65, 700, 1_024, 1_025, 1_536, 4_096, 8_192, 10_000])
def test_torch_classes_end_at_the_largest_pass_and_pad_by_half_at_most_above_128(largest: int) -> None:
    classes = trtllm_torch.torch_classes(largest)
    assert list(classes) == sorted(set(classes))
    assert classes[-1] == largest
    assert all(high <= 2 * low for low, high in pairwise(classes))
    above = [edge for edge in classes if edge >= 1_024]
    assert all(high - low <= 512 for low, high in pairwise(above))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"kv_blocks": 10}, "one request of context_tokens_max 2048 needs 64"),
        ({"role": ExecutorRole.CONTEXT}, "name one of UCX, NIXL"),
        ({"transceiver": "MPI"}, "'MPI' is not known"),
        ({"block_tokens": 0}, "block_tokens must be at least 1"),
        ({"driver": Driver.TORCH}, "use backend trtllm_torch"),
    ],
)
def test_a_bad_config_names_its_field(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        trtllm.open_engine(config(**changes), Path(sys.executable), ExecutorSettings())


def test_captures_that_do_not_reach_the_largest_pass_are_refused() -> None:
    with pytest.raises(ValueError, match="end at pass_tokens_max"):
        trtllm_torch.open_engine(
            config(Driver.TORCH, capture_tokens=(64, 128)), Path(sys.executable), ExecutorSettings()
        )
