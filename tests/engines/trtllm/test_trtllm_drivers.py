"""Both drivers against the recorded surface of each stratum that 1.2.1 may have, and what they must say.

The fakes take exactly the recorded parameters, so a keyword that a stratum lacks fails here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from executor_fakes import package
from executor_fakes.vices import VIRTUOUS, Vices

from engines import trtllm, trtllm_torch
from engines.executor.types import (
    Answer,
    BackendUnavailable,
    CacheStored,
    Call,
    CallKind,
    Ending,
    ExecutorRole,
    ExecutorSettings,
    Iteration,
    Report,
)
from engines.trtllm_child.config import ChildConfig, Driver
from engines.trtllm_child.driver import ChildDriver, warm_up
from engines.trtllm_child.executor_driver import ExecutorDriver, executor_config
from engines.trtllm_child.main import load
from engines.trtllm_child.spelling import accepts, engine_spelling, kv_cache_type, only, torch_spelling
from engines.trtllm_child.torch_driver import BATCH_WAIT_MS, TorchDriver, llm_arguments
from engines.types import EngineRequest, Padding, Pass, PassItem, PassKind, Sampling

STRATA = ("S1", "S2", "S3")
BLOCK = 32
Use = Callable[..., ModuleType]
Open = Callable[..., ChildDriver]


def config(driver: Driver = Driver.ENGINE, **changes: Any) -> ChildConfig:
    made = ChildConfig(
        driver=driver,
        model_dir="",
        version="1.2.1",
        role=ExecutorRole.BOTH,
        requests_max=8,
        pass_tokens_max=1_024,
        context_tokens_max=2_048,
        block_tokens=BLOCK,
        kv_blocks=128,
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("fakes")
    package.write_engine(
        root / "engine", block_tokens=BLOCK, requests=8, pass_tokens=1_024, context_tokens=2_048
    )

    def written(stratum: str) -> Path:
        directory = root / stratum
        return directory if directory.exists() else package.write_package(directory, stratum)

    return written


def _forget_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset, and unset again after the test, since a driver sets it."""
    for name in ("TRTLLM_USE_UCX_KVCACHE", "TRTLLM_USE_NIXL_KVCACHE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _purge() -> None:
    for name in [
        n for n in sys.modules if n.partition(".")[0] in ("tensorrt_llm", "tensorrt", package.LOADER)
    ]:
        del sys.modules[name]


@pytest.fixture
def use(packages: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Make `tensorrt_llm` that of a stratum, in this process; gives its bindings."""

    def use(stratum: str, vices: Vices = VIRTUOUS, **options: Any) -> Any:
        _purge()
        directory = packages(stratum)
        monkeypatch.syspath_prepend(str(directory))
        for name, value in package.environment(directory, vices, **options).items():
            if name != "PYTHONPATH":
                monkeypatch.setenv(name, value)
        return importlib.import_module("tensorrt_llm.bindings.executor")

    yield use
    _purge()


@pytest.fixture
def open_driver(use: Use, packages: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    opened: list[ChildDriver] = []
    _forget_transport(monkeypatch)

    def open_driver(stratum: str, driver: Driver, vices: Vices = VIRTUOUS, **changes: Any) -> ChildDriver:
        options = {name: changes.pop(name) for name in ("exchange", "stop_after") if name in changes}
        use(stratum, vices, **options)
        made = config(driver, model_dir=str(packages(stratum).parent / "engine"), **changes)
        opened.append(load(made))
        warm_up(opened[-1], made)
        return opened[-1]

    yield open_driver
    for driver in opened:
        driver.shutdown()


def hear(driver: ChildDriver, finals: int, timeout_s: float = 10.0) -> list[Report]:
    heard: list[Report] = []
    deadline = time.monotonic() + timeout_s
    while sum(isinstance(r, Answer) and r.final for r in heard) < finals:
        assert time.monotonic() < deadline, heard
        said = driver.poll(0.02)
        assert said.skipped == 0
        heard += said.reports
    return heard + list(driver.poll(0.05).reports)


def answers(heard: list[Report], call_id: str) -> list[Answer]:
    return [report for report in heard if isinstance(report, Answer) and report.call_id == call_id]


def tokens(heard: list[Report], call_id: str) -> list[int]:
    return [token for answer in answers(heard, call_id) for token in answer.tokens]


def call(name: str, prompt: int = 100, most: int = 4, **more: Any) -> Call:
    kind = more.pop("kind", CallKind.GENERATE)
    return Call(name, kind, tuple(range(prompt)), most, **more)


both = pytest.mark.parametrize("driver", list(Driver))
strata = pytest.mark.parametrize("stratum", STRATA)


@both
@strata
def test_a_pass_is_answered_to_its_end(open_driver: Open, stratum: str, driver: Driver) -> None:
    """Greedy, sampled, ranked, with and without an end token: each keyword of a request, in each stratum."""
    open_ = open_driver(stratum, driver)
    calls = [
        call("greedy", end_id=96),
        call("ranked", 70, 1, priority=80),
        call("warm", 40, 3, sampling=Sampling(temperature=0.7, top_p=0.9, top_k=40, seed=-3)),
    ]
    assert not open_.enqueue(calls)
    heard = hear(open_, 3)
    for each in calls:
        assert len(tokens(heard, each.call_id)) == each.max_tokens
        assert [a.ending for a in answers(heard, each.call_id) if a.final] == [Ending.LENGTH]
        assert all(a.error is None for a in answers(heard, each.call_id))
    ran = [report for report in heard if isinstance(report, Iteration)]
    assert sum(iteration.context_requests for iteration in ran) == 3
    assert all(iteration.kv_blocks_total == 128 for iteration in ran)


@both
@strata
def test_reuse_is_told_in_whole_blocks(open_driver: Open, stratum: str, driver: Driver) -> None:
    open_ = open_driver(stratum, driver)
    open_.enqueue([call("first", 100, 1)])
    first = hear(open_, 1)
    open_.enqueue([call("second", 100, 1)])
    second = hear(open_, 1)
    assert answers(first, "first")[-1].reused_tokens == 0
    assert answers(second, "second")[-1].reused_tokens == 96
    stored = [r for r in first if isinstance(r, CacheStored)]
    blocks = [block for report in stored for _, block in report.blocks]
    assert blocks[:3] == [tuple(range(n, n + BLOCK)) for n in (0, 32, 64)]


@both
@strata
def test_an_end_token_ends_it(open_driver: Open, stratum: str, driver: Driver) -> None:
    open_ = open_driver(stratum, driver, stop_after=2)
    open_.enqueue([call("a", 40, 9, end_id=96), call("b", 41, 9)])
    heard = hear(open_, 2)
    assert answers(heard, "a")[-1].ending is Ending.END_ID
    assert answers(heard, "b")[-1].ending is Ending.LENGTH
    assert len(tokens(heard, "b")) == 9


@both
@strata
def test_a_hand_over_goes_on_where_it_was(
    open_driver: Open, stratum: str, driver: Driver, tmp_path: Path
) -> None:
    """The two sides together say what one executor says alone; the ticket is opaque and goes both ways."""
    options = {"exchange": str(tmp_path), "transceiver": "UCX"}
    prefill = open_driver(stratum, driver, role=ExecutorRole.CONTEXT, **options)
    decode = open_driver(stratum, driver, role=ExecutorRole.GENERATION, **options)
    prefill.enqueue([call("p", 100, 5, kind=CallKind.CONTEXT_ONLY)])
    final = answers(hear(prefill, 1), "p")[-1]
    assert final.ending is Ending.NOT_FINISHED
    ticket = final.ticket
    assert ticket is not None
    assert len(ticket.first_gen_tokens) == 1
    assert ticket.block_tokens == BLOCK
    decode.enqueue([call("d", 100, 5, kind=CallKind.GENERATION_ONLY, ticket=ticket)])
    late = tokens(hear(decode, 1), "d")
    decode.enqueue([call("alone", 100, 5)])
    alone = tokens(hear(decode, 1), "alone")
    assert [*ticket.first_gen_tokens, *late] == alone


@both
def test_a_generation_only_call_without_a_ticket_is_refused(open_driver: Open, driver: Driver) -> None:
    open_ = open_driver("S2", driver, transceiver="UCX", role=ExecutorRole.GENERATION)
    refused = list(open_.enqueue([call("d", kind=CallKind.GENERATION_ONLY)]))
    [answer] = refused or [r for r in hear(open_, 1) if isinstance(r, Answer)]
    assert answer.final
    assert "needs a ticket" in (answer.error or "")


@both
def test_an_error_ends_one_call(open_driver: Open, driver: Driver) -> None:
    open_ = open_driver("S3", driver, Vices(error_response=3))
    open_.enqueue([call("a", 40), call("b", 41)])  # requests 2 and 3: the first one was the warm-up
    heard = hear(open_, 2)
    failed = {name: answers(heard, name)[-1].error for name in ("a", "b")}
    assert failed["a"] is None
    assert failed["b"]


@both
def test_a_cancelled_call_is_over_and_unknown_ids_are_ignored(open_driver: Open, driver: Driver) -> None:
    open_ = open_driver("S2", driver)
    open_.cancel("never heard of")
    open_.enqueue([call("a", 40, 1_900)])  # it may be done before it is cancelled
    open_.cancel("a")
    heard = hear(open_, 1)
    assert [answer.final for answer in answers(heard, "a")].count(True) == 1
    assert answers(heard, "a")[-1].ending in (Ending.CANCELLED, Ending.LENGTH)
    open_.cancel("a")


def test_a_last_response_that_comes_twice_is_told_once(open_driver: Open) -> None:
    open_ = open_driver("S1", Driver.ENGINE, Vices(duplicate_final=True))
    open_.enqueue([call("a")])
    heard = hear(open_, 1) + list(open_.poll(0.1).reports)
    assert sum(answer.final for answer in answers(heard, "a")) == 1


# --- every option is written out ---


@strata
def test_the_executor_is_told_everything(use: Use, stratum: str) -> None:
    trt = use(stratum)
    made = config(pass_tokens_max=900, kv_blocks=77, event_buffer=5, stats_iterations=6)
    told = executor_config(trt, engine_spelling(trt), made)
    cache = told.kv_cache_config
    assert (cache.enable_block_reuse, cache.enable_partial_reuse, cache.copy_on_partial_reuse) == (
        True,
        False,
        False,
    )
    assert (cache.max_tokens, cache.free_gpu_memory_fraction) == (77 * BLOCK, None)
    assert cache.event_buffer_max_size == 5
    assert told.enable_chunked_context is False
    assert (told.max_batch_size, told.max_num_tokens, told.max_beam_width) == (8, 900, 1)
    assert (told.iter_stats_max_iterations, told.request_stats_max_iterations) == (6, 0)
    assert told.batching_type is trt.BatchingType.INFLIGHT
    policy = told.scheduler_config.capacity_scheduler_policy
    assert policy is trt.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    assert told.extended_runtime_perf_knob_config.cuda_graph_mode is False
    assert told.cache_transceiver_config is None, "only where KV is handed over"


@pytest.mark.parametrize(
    ("stratum", "spelled"),
    [
        ("S1", {"max_num_tokens": 2_048}),
        ("S2", {"max_tokens_in_buffer": 2_048}),
        ("S3", {"max_tokens_in_buffer": 2_048, "kv_transfer_timeout_ms": 5_000}),
    ],
)
def test_hand_over_is_spelled_as_the_stratum_does(
    use: Use, stratum: str, spelled: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _forget_transport(monkeypatch)
    trt = use(stratum)
    told = executor_config(trt, engine_spelling(trt), config(transceiver="NIXL")).cache_transceiver_config
    for name, value in spelled.items():
        assert getattr(told, name) == value
    if "max_num_tokens" in spelled:
        assert os.environ["TRTLLM_USE_NIXL_KVCACHE"] == "1"
    else:
        assert told.backend.name == "NIXL"
        assert "TRTLLM_USE_NIXL_KVCACHE" not in os.environ


@pytest.mark.parametrize("role", list(ExecutorRole))
@strata
def test_the_llm_is_told_everything(use: Use, stratum: str, role: ExecutorRole) -> None:
    use(stratum)
    captures = (64, 1_024) if stratum != "S1" else ()
    told = llm_arguments(config(Driver.TORCH, role=role, capture_tokens=captures, transceiver="UCX"))
    assert told["skip_tokenizer_init"] is True
    assert told["enable_chunked_prefill"] is False
    assert told["disable_overlap_scheduler"] is (role is ExecutorRole.CONTEXT)
    assert (told["cuda_graph_config"] is None) is (role is ExecutorRole.CONTEXT)
    assert told["kv_cache_config"].max_tokens == 128 * BLOCK
    assert told["kv_cache_config"].enable_partial_reuse is False
    assert told["cache_transceiver_config"].backend in ("UCX", "ucx")
    assert told["cache_transceiver_config"].max_tokens_in_buffer == 2_048
    if stratum == "S1":
        assert "batch_wait_timeout_ms" not in told
        assert told["torch_compile_config"] is None
    else:
        assert told["batch_wait_timeout_ms"] == BATCH_WAIT_MS
        assert told["cache_transceiver_config"].kv_transfer_timeout_ms == 5_000
        assert told["torch_compile_config"].capture_num_tokens == [64, 1_024]
        assert told["torch_compile_config"].enable_piecewise_cuda_graph is True
        assert told["kv_cache_config"].tokens_per_block == BLOCK


@pytest.mark.parametrize("known", [("UCX", "NIXL"), ("ucx", "nixl")])
def test_the_case_of_a_transport_is_that_of_the_package(known: tuple[str, ...]) -> None:
    """The fakes take any text; pydantic and the enum of the bindings take their own spelling alone."""

    class Config:
        def __init__(self, backend: str, max_tokens_in_buffer: int) -> None:
            if backend not in known:
                raise ValueError(f"Input should be one of {known}")
            self.backend = backend

    api = SimpleNamespace(CacheTransceiverConfig=Config, TorchCompileConfig=Config, KvCacheConfig=Config)
    told = torch_spelling(api, SimpleNamespace()).transceiver("NIXL", 1, 1)
    assert told.backend == known[1]


def test_sizes_that_can_not_be_captured_are_refused(use: Use) -> None:
    use("S1")
    with pytest.raises(BackendUnavailable, match="leave capture_tokens empty"):
        llm_arguments(config(Driver.TORCH, capture_tokens=(64, 1_024)))


@strata
def test_the_build_finds_the_kv_cache_type(use: Use, stratum: str) -> None:
    use(stratum)
    assert kv_cache_type().PAGED


@strata
def test_the_fakes_refuse_what_is_not_recorded(use: Use, stratum: str) -> None:
    """Else the tests above would prove nothing."""
    trt = use(stratum)
    with pytest.raises(TypeError, match="unexpected keyword"):
        trt.Request(input_token_ids=[1], max_tokens=1, request_type=None)
    with pytest.raises(TypeError, match="unexpected keyword"):
        trt.ExecutorConfig(max_token_num=1)
    llm = importlib.import_module("tensorrt_llm").LLM
    with pytest.raises(ValueError, match="not permitted"):
        llm(model="m", capture_num_tokens=[1])


def test_a_planted_wrong_keyword_fails(open_driver: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that names the type of a request by its property's name has every call refused."""
    open_ = open_driver("S2", Driver.ENGINE)
    assert isinstance(open_, ExecutorDriver)
    real = open_._trt.Request
    monkeypatch.setattr(
        open_._trt, "Request", lambda *, type, **rest: real(request_type=type, **rest), raising=True
    )
    [answer] = open_.enqueue([call("a")])
    assert "unexpected keyword argument 'request_type'" in (answer.error or "")


def test_keywords_are_found_in_a_signature_a_docstring_or_the_fields() -> None:
    class Words:
        def __init__(self, *args: object, **rest: object) -> None:
            """__init__(self, one: int, *, two: object = 3) -> None"""

    class Fields:
        model_fields = {"three": None}  # noqa: RUF012

    def function(four: int) -> None: ...

    class Properties:
        five = property(lambda self: 1)

        def __init__(self, *args: object, **rest: object) -> None: ...

    assert [accepts(Words, name) for name in ("one", "two", "self_", "three")] == [True, True, False, False]
    assert only(Fields, three=1, four=2) == {"three": 1}
    assert only(function, three=1, four=2) == {"four": 2}
    assert only(Properties, five=1, six=2) == {"five": 1}


# --- the whole way: engine, link, child, driver, fake ---

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


def test_what_the_environment_says_of_the_fakes_is_json(packages: Callable[[str], Path]) -> None:
    told = package.environment(packages("S1"), Vices(hang=3))
    assert json.loads(told["PLASERVE_FAKE"])["vices"]["hang"] == 3
    assert isinstance(TorchDriver, type)
