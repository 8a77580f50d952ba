"""Simulated engines of a known model, and short ways to run passes on them."""

from __future__ import annotations

from engines.models import load_model
from engines.simulated import SimulatedModel
from engines.simulated_settings import (
    Behaviour,
    engine_setting,
)
from engines.types import Pass, PassItem, PassKind, PassResult

BLOCK = 32
MODEL = load_model("qwen3-32b")
LAYERS = engine_setting(MODEL, "packed")[0].layer_blocks_max


def engine(kind: str = "packed", behaviour: Behaviour | None = None, **wishes: object) -> SimulatedModel:
    return SimulatedModel(*engine_setting(MODEL, kind, **wishes), behaviour)  # type: ignore[arg-type]


def prefill_of(*items: tuple[str, int, int], layer: int = 0, layers: int = 1) -> Pass:
    return Pass(1, PassKind.PREFILL, tuple(PassItem(*item) for item in items), layer, layers)


def run(model: SimulatedModel, *items: tuple[str, int, int], layer: int = 0, layers: int = 1) -> PassResult:
    model.begin(prefill_of(*items, layer=layer, layers=layers))
    return model.finish()


def decode(model: SimulatedModel, *items: tuple[str, int]) -> PassResult:
    model.begin(Pass(1, PassKind.DECODE, tuple(PassItem(i, 1, past) for i, past in items)))
    return model.finish()


def held_blocks(model: SimulatedModel) -> int:
    stats = model.stats()
    return stats.kv_blocks_total - stats.kv_blocks_free - stats.kv_blocks_cached
