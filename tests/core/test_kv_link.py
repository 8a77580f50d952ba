"""Laws of the hand-over link: bytes are conserved, order is kept, a budget is never exceeded."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.kv_link import KvLink, LinkSettings, Transfer, peak_bytes_per_s

OFFERS = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 10**9)), min_size=1, max_size=12)
LINKS = st.builds(LinkSettings, st.floats(1e6, 1e11), st.floats(0.0, 0.1), st.sampled_from([1.0, 0.5, 0.1]))


def sent(settings: LinkSettings, offers: list[tuple[float, int]]) -> tuple[Transfer, ...]:
    link = KvLink(settings)
    return tuple(link.offer(f"r{n}", size, now_s) for n, (now_s, size) in enumerate(sorted(offers)))


@given(settings=LINKS, offers=OFFERS)
def test_nothing_is_faster_than_the_link_and_all_arrives(
    settings: LinkSettings, offers: list[tuple[float, int]]
) -> None:
    link, times = KvLink(settings), sorted(offers)
    planned = [link.offer(f"r{n}", size, now_s) for n, (now_s, size) in enumerate(times)]
    assert link.bytes_offered == sum(size for _, size in offers)
    for earlier, later in pairwise(planned):
        assert later.start_s >= earlier.end_s
    for transfer in planned:
        assert transfer.start_s >= transfer.offered_s + settings.latency_s
        assert math.isclose(
            transfer.end_s - transfer.start_s, transfer.size_bytes / settings.pull_bytes_per_s, rel_tol=1e-6,
            abs_tol=1e-9,
        )  # fmt: skip
    assert link.arrived(planned[-1].end_s) == tuple(planned)
    assert link.arrived(math.inf) == ()
    assert link.waiting_bytes(planned[-1].end_s) == 0
    assert link.waiting_bytes_max <= link.bytes_offered


@given(settings=LINKS, offers=OFFERS, factor=st.floats(1.0, 10.0))
def test_a_faster_link_ends_nothing_later(
    settings: LinkSettings, offers: list[tuple[float, int]], factor: float
) -> None:
    faster = replace(settings, bytes_per_s=factor * settings.bytes_per_s)
    for slow, fast in zip(sent(settings, offers), sent(faster, offers), strict=True):
        assert fast.end_s <= slow.end_s + 1e-9


@given(settings=LINKS, offers=OFFERS, over_s=st.floats(0.001, 1.0))
def test_a_budget_holds_over_any_stretch(
    settings: LinkSettings, offers: list[tuple[float, int]], over_s: float
) -> None:
    peak = peak_bytes_per_s(sent(settings, offers), over_s)
    assert 0.0 < peak <= settings.pull_bytes_per_s * (1.0 + 1e-6)


def test_a_burst_is_flattened_by_pacing_and_takes_longer() -> None:
    """Eight requests of 1,000 tokens at 256 KiB a token end in one pass."""
    burst = [(0.0, 1000 * 262_144)] * 8
    link = LinkSettings(bytes_per_s=25e9)
    free, paced = sent(link, burst), sent(replace(link, budget_ratio=0.25), burst)
    assert peak_bytes_per_s(paced, 0.01) == pytest.approx(peak_bytes_per_s(free, 0.01) / 4.0)
    assert paced[-1].end_s == pytest.approx(4.0 * free[-1].end_s)
    assert free[1].waited_s > 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes_per_s", 0.0), ("latency_s", -1.0), ("budget_ratio", 0.0), ("budget_ratio", 1.5)],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        LinkSettings(**{"bytes_per_s": 1e9, field: value})
    with pytest.raises(ValueError, match="size_bytes"):
        KvLink(LinkSettings(1e9)).offer("r", 0, 0.0)
    with pytest.raises(ValueError, match="over_s"):
        peak_bytes_per_s((), 0.0)
