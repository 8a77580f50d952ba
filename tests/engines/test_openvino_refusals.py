"""What the embedded engine refuses, and what happens when a forward fails or the engine is closed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("openvino")

from tiny_engine import CONFIG, PROFILES, Driver, Load, assert_greedy, prompt

from engines.base import EngineError, PassError
from engines.openvino_cpu import DEFAULT_PROFILES, REQUESTS_MAX, OpenVinoCpuEngine
from engines.profiles import Profiles
from engines.types import (
    EngineRequest,
    Layout,
    Padding,
    Pass,
    PassItem,
    PassKind,
    Sampling,
)


def request(**changes: object) -> EngineRequest:
    return replace(EngineRequest("a", (1, 2, 3), 4), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (request(token_ids=()), "token_ids"),
        (request(token_ids=(1, CONFIG.vocab)), "token_ids"),
        (request(token_ids=(-1,)), "token_ids"),
        (request(max_new_tokens=0), "max_new_tokens"),
        (request(max_new_tokens=CONFIG.context_tokens), "max_new_tokens"),
        (request(sampling=Sampling(temperature=-1.0)), "temperature"),
        (request(sampling=Sampling(temperature=float("nan"))), "temperature"),
        (request(sampling=Sampling(top_p=0.0)), "top_p"),
        (request(sampling=Sampling(top_k=-1)), "top_k"),
        (request(sampling=Sampling(seed=-1)), "seed"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_field(
    shared: OpenVinoCpuEngine, bad: EngineRequest, named: str
) -> None:
    before = shared.stats().requests_live
    with pytest.raises(ValueError, match=named):
        shared.submit(bad)
    assert shared.stats().requests_live == before


def test_a_pass_that_cannot_run_changes_nothing(load: Load) -> None:
    driver = Driver(load())
    first, long = driver.submit(prompt(1, 20), 2), driver.submit(prompt(2, 200), 2)
    many = [driver.submit([1], 1) for _ in range(REQUESTS_MAX + 1)]
    with pytest.raises(KeyError):
        driver.engine.execute(Pass(0, PassKind.PREFILL, (PassItem("unknown", 1, 0),)))
    for match, run in (
        ("no profile", lambda: driver.prefill((long, 200))),
        ("another request", lambda: driver.prefill((first, 1), (first, 1))),
        ("at least one", driver.prefill),
        ("not yet", lambda: driver.decode(first)),
        ("new_tokens", lambda: driver.prefill((first, 0))),
        ("at most", lambda: driver.prefill(*((i, 1) for i in many))),
    ):
        with pytest.raises(ValueError, match=match):
            run()
    stats = driver.engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    driver.prefill((first, 20))
    with pytest.raises(ValueError, match="already"):
        driver.prefill((first, 1))


def test_a_failing_forward_loses_the_requests_of_its_pass_only(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    driver = Driver(engine)
    lost, kept = driver.submit(prompt(1, 20), 2), driver.submit(tokens := prompt(2, 20), 2)
    with monkeypatch.context() as patch:
        patch.setattr("engines.openvino_model.PackedModel.forward", _fail)
        with pytest.raises(PassError) as caught:
            driver.prefill((lost, 20))
    assert caught.value.request_ids == (lost,)
    assert engine.stats().requests_live == 1
    assert_greedy(driver.finish(kept), tokens)


def _fail(*_: object) -> None:
    raise RuntimeError("out of memory")


def test_a_closed_engine_says_so(load: Load) -> None:
    engine = load()
    engine.submit(request())
    engine.close()
    engine.close()
    assert engine.stats().requests_live == 0
    with pytest.raises(EngineError, match="closed"):
        engine.submit(request())


# --- loading ---


def test_every_profile_is_warmed_and_measurable(tiny_bundle: Path) -> None:
    seen: list[tuple[int, int]] = []
    engine = OpenVinoCpuEngine.load(
        tiny_bundle,
        PROFILES,
        threads=1,
        kv_capacity_tokens=256,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(done, 12) for done in range(1, 13)]
    assert engine.measure(16, 96) > 0.0
    with pytest.raises(ValueError, match="no profile"):
        engine.measure(17, 96)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"precision": "int4"}, "precision"),
        ({"threads": 0}, "threads"),
        ({"kv_capacity_tokens": 8}, "kv_capacity_tokens"),
        ({"profiles": Profiles(Layout.PACKED, Padding.NOTHING, (4,))}, "profiles"),
        ({"profiles": Profiles(Layout.PACKED, Padding.CLASS, (4,), block_mask=True)}, "h_classes"),
    ],
)
def test_a_bad_option_is_refused_by_name(tiny_bundle: Path, options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OpenVinoCpuEngine.load(tiny_bundle, **options)  # type: ignore[arg-type]


def test_the_default_profiles_hold_a_2048_token_pass_over_any_history() -> None:
    for history in (0, 1, 2048, 4096):
        assert DEFAULT_PROFILES.executed([(2048, history)]) is not None
