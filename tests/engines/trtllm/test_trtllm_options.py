"""Every option is written out, and spelled as the loaded package spells it."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

import pytest
from fake_trtllm import BLOCK, Open, Use, call, config, forget_transport, strata

from engines.executor.types import (
    BackendUnavailable,
    ExecutorRole,
)
from engines.trtllm_child.config import Driver
from engines.trtllm_child.executor_driver import ExecutorDriver, executor_config
from engines.trtllm_child.spelling import accepts, engine_spelling, kv_cache_type, only, torch_spelling
from engines.trtllm_child.torch_driver import BATCH_WAIT_MS, llm_arguments


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
    assert told.enable_chunked_context is True
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
    forget_transport(monkeypatch)
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
    assert told["enable_chunked_prefill"] is True
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
