"""What a traffic makes of the T-classes of an executor that packs."""

from __future__ import annotations

import pytest

from build_scripts.trtllm.class_plan import LAST_CLASS_MAX, class_use, last_class
from engines.cell_plan import Traffic, cell_s
from engines.models import known_models, load_model
from engines.trtllm_profiles import stock_classes

COST = load_model("qwen3-32b").cost


@pytest.mark.parametrize("name", sorted(known_models()))
@pytest.mark.parametrize("pass_s_max", [0.001, 0.05, 0.15, 1.0, 100.0])
def test_the_last_class_takes_no_longer_than_allowed_unless_for_the_knee(
    name: str, pass_s_max: float
) -> None:
    cost = load_model(name).cost
    tokens = last_class(cost, pass_s_max)
    lowest = max(128, cost.knee_tokens())
    assert stock_classes(tokens)[-1] == tokens
    assert tokens < lowest + 64 or cell_s(cost, tokens, 1) <= pass_s_max
    assert tokens == LAST_CLASS_MAX or cell_s(cost, tokens + 64, 1) > pass_s_max


def test_shares_are_of_passes_and_of_their_time() -> None:
    traffic = Traffic({(60, 1): 0.5, (32, 2): 0.25, (300, 1): 0.25})
    small, middle, large = class_use(traffic, COST, (64, 128, 512))
    assert (small.passes_ratio, middle.passes_ratio, large.passes_ratio) == (0.75, 0.0, 0.25)
    assert small.seconds_ratio + large.seconds_ratio == pytest.approx(1.0)
    assert large.seconds_ratio > 0.25


def test_a_pass_above_the_last_class_is_refused() -> None:
    with pytest.raises(ValueError, match="classes end at 128, but a pass has 200 tokens"):
        class_use(Traffic({(100, 2): 1.0}), COST, (64, 128))
