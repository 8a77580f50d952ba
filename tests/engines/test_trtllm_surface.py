"""The fake tensorrt_llm has the interface that was recorded and no more, so that a wrong name fails on it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.executor_fakes.driving import alone, prompt
from tests.executor_fakes.package import VARIABLE, environment, write_engine, write_package
from tests.executor_fakes.skin.classes import table
from tests.executor_fakes.skin.entry import modules, surface, symbols
from tests.executor_fakes.skin.profiles import MalformedProfilesError, clipped_tokens, token_ranges
from tests.executor_fakes.vices import Vices

ENGINE_STRATA = ("S1", "S2", "S3")
BINDINGS = "tensorrt_llm.bindings.executor"
RECORDED = Path(__file__).parents[3] / "shared" / "trtllm_api" / "surface.json"


def named(entry: dict[str, Any]) -> str:
    return f"{entry['module']}.{entry['name']}-{'-'.join(entry['strata'])}"


# --- the table against what was recorded ---


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, Any]]:
    if not RECORDED.exists():
        pytest.skip(f"{RECORDED} is not here")
    return list(json.loads(RECORDED.read_text(encoding="utf-8"))["symbols"])


@pytest.mark.parametrize("entry", [e for e in table()["symbols"] if e["recorded"]], ids=named)
def test_every_name_was_recorded(entry: dict[str, Any], recorded: list[dict[str, Any]]) -> None:
    names = [entry["name"], entry.get("recorded_in", entry["name"])]
    if entry["name"] == "TorchLlmArgs":
        names.append("BaseLlmArgs")
    found = [
        symbol
        for symbol in recorded
        if symbol["stratum"] in entry["recorded"]
        and symbol["module"] == entry["module"]
        and symbol["name"] in names
    ]
    assert found
    known: dict[str, set[str]] = {}  # parameter -> defaults
    others: set[str] = set()
    for symbol in found:
        for param in [*symbol.get("params", ()), *symbol.get("fields", ())]:
            known.setdefault(param["name"].lstrip("_"), set()).add(str(param["default"]))
        others |= {*symbol.get("values", ()), *symbol.get("properties", ()), *symbol.get("attributes", ())}
        for members in [*symbol.get("nested", {}).values(), *symbol.get("data_types", {}).values()]:
            others |= set(members)
    for name, how, default in entry.get("params", ()):
        assert name.lstrip("_") in known
        assert how == "var" or default == "required" or default in known[name.lstrip("_")]
    assert set(entry.get("members", ())) <= others
    assert set(entry.get("properties", ())) <= others | known.keys()


def test_the_keys_of_statistics_were_recorded(recorded: list[dict[str, Any]]) -> None:
    for name, keys in table()["stats_keys"].items():
        [symbol] = [s for s in recorded if (s["name"], s["stratum"]) == (name, "S3")]
        assert keys == symbol["json_keys"]


# --- classes take what was recorded and nothing else ---


@pytest.mark.parametrize("stratum", ENGINE_STRATA)
def test_bindings_refuse_another_keyword(stratum: str) -> None:
    names = symbols(stratum, BINDINGS)
    for entry in surface(stratum).entries:
        if entry["kind"] != "binding" or not entry.get("params") or "nested_in" in entry:
            continue
        made = {name: None for name, _, default in entry["params"] if default == "required"}
        cls = names[entry["name"]]
        cls(**made)
        with pytest.raises(TypeError, match="no_such"):
            cls(**made, no_such=1)
        keywords = [name for name, how, _ in entry["params"] if how == "keyword"]
        if keywords:
            with pytest.raises(TypeError, match="positional"):
                cls(*[None] * (len(entry["params"]) - len(keywords) + 1))
        if not entry.get("dynamic"):
            with pytest.raises(AttributeError, match="no_such"):
                cls(**made).no_such = 1
        assert all(name in (cls.__init__.__doc__ or "") for name, _, _ in entry["params"])


@pytest.mark.parametrize("stratum", ENGINE_STRATA)
def test_configurations_refuse_another_key(stratum: str) -> None:
    for module in ("tensorrt_llm.llmapi", "tensorrt_llm.llmapi.llm_args"):
        for name, cls in surface(stratum).classes[module].items():
            if hasattr(cls, "model_fields"):
                with pytest.raises(ValueError, match="no_such"):
                    cls(no_such=1)
                assert name == cls.__name__
    api = symbols(stratum, "tensorrt_llm.llmapi")
    with pytest.raises(TypeError, match="positional"):
        api["SamplingParams"](5)
    with pytest.raises(TypeError, match="no_such"):
        api["DisaggregatedParams"](no_such=1)


@pytest.mark.parametrize("stratum", ENGINE_STRATA)
def test_enums_have_the_recorded_members(stratum: str) -> None:
    for entry in surface(stratum).entries:
        if entry["kind"] == "enum":
            cls = surface(stratum).classes[entry["module"]][entry["name"]]
            assert [member.name for member in cls] == entry["members"]


def test_what_differs_between_strata() -> None:
    args = {
        s: surface(s).classes["tensorrt_llm.llmapi"]["TorchCompileConfig"].model_fields for s in ENGINE_STRATA
    }
    assert ["capture_num_tokens" in args[s] for s in ENGINE_STRATA] == [False, True, True]
    assert [f"{BINDINGS}.kv_cache" in modules(s) for s in ENGINE_STRATA] == [False, False, True]
    assert ["tensorrt_llm.llmapi.kv_cache_type" in modules(s) for s in ENGINE_STRATA] == [False, True, True]
    assert ["auto_parallel_config" in vars(symbols(s, "tensorrt_llm.builder")["BuildConfig"]())
            for s in ENGINE_STRATA] == [True, False, False]  # fmt: skip
    assert "Executor" not in symbols("S4", BINDINGS)
    assert "tensorrt_llm.builder" not in modules("S4")
    assert "tensorrt" not in modules("S4")


# --- the executor ---


@pytest.fixture
def engine_dir(tmp_path: Path) -> Path:
    return write_engine(tmp_path / "engine", block_tokens=8, requests=4, pass_tokens=64, context_tokens=192)


def opened(engine_dir: Path, stratum: str = "S2", **cache: Any) -> tuple[dict[str, Any], Any]:
    names = symbols(stratum, BINDINGS)
    config = names["ExecutorConfig"](
        kv_cache_config=names["KvCacheConfig"](max_tokens=24 * 8, event_buffer_max_size=100, **cache)
    )
    return names, names["Executor"](str(engine_dir), names["ModelType"].DECODER_ONLY, config)


def asked(names: dict[str, Any], **other: Any) -> Any:
    output = names["OutputConfig"](exclude_input_from_output=True, return_perf_metrics=True)
    return names["Request"](list(prompt(9)), 3, **{"output_config": output, "end_id": -1, **other})


@pytest.mark.parametrize("stratum", ENGINE_STRATA)
def test_the_executor_answers_in_objects(engine_dir: Path, stratum: str) -> None:
    names, executor = opened(engine_dir, stratum)
    [request_id] = executor.enqueue_requests([asked(names)])
    [response] = executor.await_responses(request_id, timedelta(seconds=5))
    result = response.result
    assert not response.has_error()
    assert (response.request_id, result.is_final) == (request_id, True)
    assert result.output_token_ids == [alone(prompt(9), 3)]
    assert result.finish_reasons == [names["FinishReason"].LENGTH]
    assert result.request_perf_metrics.kv_cache_metrics.num_reused_blocks == 0
    with pytest.raises(AssertionError, match="would hang"):
        executor.await_responses(request_id)
    assert executor.await_responses(timeout=timedelta(0)) == []
    stats = [json.loads(each.to_json_str()) for each in executor.get_latest_iteration_stats()]
    assert [each["iter"] for each in stats] == [1, 2, 3]
    assert executor.get_latest_iteration_stats() == []
    optional = {"crossKvCacheStats", "staticBatchingStats"}
    keys = table()["stats_keys"]
    assert set(stats[0]) == set(keys["IterationStats"]) - optional
    assert set(stats[0]["inflightBatchingStats"]) == set(keys["InflightBatchingStats"])
    assert set(stats[0]["kvCacheStats"]) == set(keys["KvCacheStats"])
    events = executor.get_kv_cache_event_manager().get_latest_events(0.0)
    assert [each.event_id for each in events] == [0, 1]
    assert [token.token_id for token in events[1].data.blocks[0].tokens] == list(prompt(8))
    executor.shutdown()


def test_what_does_not_stream_holds_the_prompt_unless_it_is_excluded(engine_dir: Path) -> None:
    names, executor = opened(engine_dir)
    executor.enqueue_requests([asked(names, output_config=names["OutputConfig"]())])
    [response] = executor.await_responses(timedelta(seconds=5))
    assert response.result.output_token_ids == [[*prompt(9), *alone(prompt(9), 3)]]
    assert response.result.request_perf_metrics is None
    executor.shutdown()


def test_wrong_calls_are_refused(engine_dir: Path) -> None:
    names, executor = opened(engine_dir)
    with pytest.raises(TypeError, match="timeout"):
        executor.await_responses(timeout=0.5)
    with pytest.raises(TypeError, match="Request"):
        executor.enqueue_requests([list(prompt(9))])
    with pytest.raises(TypeError, match="executor_config"):
        names["Executor"](str(engine_dir), names["ModelType"].DECODER_ONLY)
    with pytest.raises(RuntimeError, match="cache_transceiver_config"):
        executor.enqueue_request(asked(names, type=names["RequestType"].REQUEST_TYPE_CONTEXT_ONLY))
    executor.shutdown()


def test_prompts_are_short_without_chunked_context(engine_dir: Path) -> None:
    """However much of them is cached: the limit is max_num_tokens."""
    names, executor = opened(engine_dir)
    output = names["OutputConfig"]()
    executor.enqueue_requests(
        [names["Request"](list(prompt(size)), 1, output_config=output) for size in (64, 65)]
    )
    said: list[Any] = []
    while len(said) < 2:
        said += executor.await_responses(timedelta(seconds=5))
    errors = [each.error_msg for each in sorted(said, key=lambda each: each.request_id)]
    assert errors[0] is None
    assert "exceeds maximum input length (64)" in errors[1]
    executor.shutdown()


def test_vices_come_from_the_environment(engine_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, environment(engine_dir, Vices(duplicate_final=True))[VARIABLE])
    names, executor = opened(engine_dir)
    executor.enqueue_requests([asked(names)])
    assert [each.result.is_final for each in executor.await_responses(timedelta(seconds=5))] == [True, True]
    executor.shutdown()


def test_hand_over_goes_through_files_between_processes(
    engine_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, environment(engine_dir, exchange=str(tmp_path))[VARIABLE])
    names = symbols("S2", BINDINGS)
    transceiver = names["CacheTransceiverConfig"](
        backend=names["CacheTransceiverBackendType"].from_string("UCX")
    )
    config = names["ExecutorConfig"](
        kv_cache_config=names["KvCacheConfig"](max_tokens=24 * 8), cache_transceiver_config=transceiver
    )
    sides = [names["Executor"](str(engine_dir), names["ModelType"].DECODER_ONLY, config) for _ in range(2)]
    kind = names["RequestType"]
    sides[0].enqueue_requests([asked(names, type=kind.REQUEST_TYPE_CONTEXT_ONLY)])
    [offer] = sides[0].await_responses(timedelta(seconds=5))
    assert offer.result.finish_reasons == [names["FinishReason"].NOT_FINISHED]
    params = offer.result.context_phase_params
    [kept] = tmp_path.glob("fake-*")
    sides[0]._fake._everyone.clear()  # as in another process
    again = names["ContextPhaseParams"](params.first_gen_tokens, params.req_id, params.opaque_state, None)
    sides[1].enqueue_requests(
        [asked(names, type=kind.REQUEST_TYPE_GENERATION_ONLY, context_phase_params=again)]
    )
    [answer] = sides[1].await_responses(timedelta(seconds=5))
    assert answer.result.output_token_ids[0] == alone(prompt(9), 3)  # the first token too
    assert not kept.exists()
    for side in sides:
        side.shutdown()


# --- the LLM of the PyTorch backend ---


@pytest.mark.parametrize("stratum", ENGINE_STRATA)
async def test_the_llm_streams_what_it_has_so_far(stratum: str) -> None:
    package, api = symbols(stratum, "tensorrt_llm"), symbols(stratum, "tensorrt_llm.llmapi")
    llm = package["LLM"](
        "checkpoint",
        kv_cache_config=api["KvCacheConfig"](max_tokens=24 * 32, event_buffer_max_size=10),
        max_batch_size=4,
        max_num_tokens=64,
        max_seq_len=192,
        enable_iter_perf_stats=True,
    )
    params = api["SamplingParams"](end_id=-1, max_tokens=3)
    seen, parts = [], []
    async for output in llm.generate_async(list(prompt(9)), params, streaming=True):
        seen.append(list(output.outputs[0].token_ids))
        parts += output.outputs[0].token_ids_diff
    assert parts == seen[-1] == alone(prompt(9), 3)
    assert [len(each) for each in seen] == [1, 2, 3]
    whole = await llm.generate_async(list(prompt(9)), params)
    assert (whole.outputs[0].token_ids, whole.outputs[0].finish_reason) == (parts, "length")
    long = llm.generate_async(
        list(prompt(9)), api["SamplingParams"](end_id=-1, max_tokens=150), streaming=True
    )
    long.abort()
    assert (await long).outputs[0].finish_reason in ("cancelled", "length")
    with pytest.raises(TypeError, match="no_such"):
        llm.generate_async(list(prompt(9)), params, no_such=1)
    assert llm.get_stats(timeout=0.0)[0]["iter"] == 1
    assert [event["event_id"] for event in llm.get_kv_cache_events(timeout=0.0)][:1] == [0]
    await asyncio.to_thread(llm.shutdown)


# --- builds ---


@pytest.mark.parametrize("stratum", ENGINE_STRATA)
def test_a_built_engine_reads_back(stratum: str, tmp_path: Path) -> None:
    builder, models = symbols(stratum, "tensorrt_llm.builder"), symbols(stratum, "tensorrt_llm.models")
    plugins = symbols(stratum, "tensorrt_llm.plugin")["PluginConfig"]()
    plugins.multiple_profiles = True
    models["QWenForCausalLM"].from_hugging_face(str(tmp_path), dtype="bfloat16").save_checkpoint(
        tmp_path / "c"
    )
    model = models["QWenForCausalLM"].from_checkpoint(str(tmp_path / "c"))
    config = builder["BuildConfig"](
        max_num_tokens=300,
        max_batch_size=16,
        max_seq_len=512,
        plugin_config=plugins,
        output_timing_cache=None,
    )
    builder["build"](model, config).save(str(tmp_path / "e"))
    with pytest.raises(RuntimeError, match="fresh"):
        builder["build"](model, config)
    saved = json.loads((tmp_path / "e" / "config.json").read_text(encoding="utf-8"))
    assert set(saved) == {"version", "pretrained_config", "build_config"}
    assert "dry_run" not in saved["build_config"]
    assert saved["build_config"]["plugin_config"]["gpt_attention_plugin"] == "bfloat16"
    trt = symbols(stratum, "tensorrt")
    plan = (tmp_path / "e" / "rank0.engine").read_bytes()
    engine = trt["Runtime"](trt["Logger"](trt["Logger"].WARNING)).deserialize_cuda_engine(plan)
    shapes = [
        engine.get_tensor_profile_shape("input_ids", i) for i in range(engine.num_optimization_profiles)
    ]
    assert [(low[0], most[0]) for low, _, most in shapes] == [(1, 64), (64, 128), (128, 256), (256, 300)]
    other = symbols("S0", "tensorrt")
    assert other["Runtime"](other["Logger"]()).deserialize_cuda_engine(plan) is None


@given(tokens=st.integers(65, 16_384))
def test_profiles_cover_every_size_once(tokens: int) -> None:
    ranges = token_ranges(tokens, 64, None, multiple=True)
    assert (ranges[0][0], ranges[-1][2]) == (1, tokens)
    assert all(low[2] == high[0] for low, high in pairwise(ranges))
    assert all(low < opt == most for low, opt, most in ranges)


def test_profiles_that_can_not_be_built() -> None:
    with pytest.raises(MalformedProfilesError):
        token_ranges(64, 64, None, multiple=True)
    assert token_ranges(64, 8, None, multiple=False) == [(1, 8, 64)]
    assert clipped_tokens(8192, 128, 4, 32) == 512
    assert clipped_tokens(8, 128, 4, 32) == 32


# --- the package on disk ---


@pytest.mark.parametrize("stratum", ["S0", *ENGINE_STRATA, "S4"])
def test_another_interpreter_imports_it(stratum: str, tmp_path: Path) -> None:
    write_package(tmp_path, stratum)
    ask = """
import importlib, json, sys
from importlib import metadata
for module in json.loads(sys.argv[1]):
    importlib.import_module(module)
import tensorrt_llm
print(json.dumps([tensorrt_llm.__version__, metadata.version("tensorrt_llm"), "tests" in sys.modules]))
"""
    command = [sys.executable, "-S", "-P", "-c", ask, json.dumps(modules(stratum))]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    version = surface(stratum).version
    assert json.loads(done.stdout) == [version, version, False]
