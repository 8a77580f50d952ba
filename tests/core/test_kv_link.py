"""Laws of the hand-over link: bytes are conserved, a budget is never exceeded, it idles only when empty,
equals go in order, none starves, and what is streamed is never later."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.core.kv_link import KvLink, LinkSettings, Transfer, peak_bytes_per_s

MEGA = 1_000_000
LINKS = st.builds(
    LinkSettings,
    st.sampled_from([1e8, 1e9, 1e10]),
    st.sampled_from([1.0, 0.5, 0.2]),
    st.sampled_from([0.0, 1.0, 4.0, 1e6]),
    st.sampled_from([MEGA, 8 * MEGA, 10**12]),
)


@dataclass(frozen=True)
class Prompt:
    """Pieces that become ready one after the other: (gap before it in seconds, bytes)."""

    start_s: float
    pieces: tuple[tuple[float, int], ...]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.pieces)


PIECES = st.lists(
    st.tuples(st.sampled_from([0.001, 0.01, 0.1]), st.integers(1, 50 * MEGA)), min_size=1, max_size=4
)
PROMPTS = st.lists(st.builds(Prompt, st.floats(0.0, 0.3), PIECES.map(tuple)), min_size=1, max_size=10)


def sent(
    settings: LinkSettings, prompts: list[Prompt], *, streamed: bool = True
) -> tuple[KvLink, dict[str, Transfer]]:
    """All of them over a fresh link; streamed, or each whole when its last piece is ready."""
    offers: list[tuple[float, int, int, bool]] = []  # when, of which, bytes, more to come
    for number, prompt in enumerate(prompts):
        at_s, last = prompt.start_s, len(prompt.pieces) - 1
        for index, (gap_s, size) in enumerate(prompt.pieces):
            at_s += gap_s
            if streamed:
                offers.append((at_s, number, size, index < last))
        if not streamed:
            offers.append((at_s, number, prompt.size_bytes, False))
    link = KvLink(settings)
    for at_s, number, size, more in sorted(offers):
        link.offer(f"r{number}", size, at_s, of_bytes=prompts[number].size_bytes, more=more)
    arrived = {t.request_id: t for t in link.advance(math.inf)}
    assert link.next_s is None
    return link, arrived


@given(settings=LINKS, prompts=PROMPTS, streamed=st.booleans())
def test_bytes_are_conserved_and_all_arrives(
    settings: LinkSettings, prompts: list[Prompt], streamed: bool
) -> None:
    link, arrived = sent(settings, prompts, streamed=streamed)
    total = sum(prompt.size_bytes for prompt in prompts)
    assert {name: t.size_bytes for name, t in arrived.items()} == {
        f"r{number}": prompt.size_bytes for number, prompt in enumerate(prompts)
    }
    assert link.bytes_carried == total
    assert link.waiting_bytes == 0
    busy_s = sum(end_s - start_s for start_s, end_s in link.busy)
    assert math.isclose(busy_s * settings.pull_bytes_per_s, total, rel_tol=1e-6)
    for transfer in arrived.values():
        alone_s = transfer.size_bytes / settings.pull_bytes_per_s
        assert streamed or transfer.delay_s >= alone_s * (1.0 - 1e-6) - 1e-9


@given(settings=LINKS, prompts=PROMPTS, over_s=st.floats(0.001, 1.0))
def test_no_window_carries_more_than_the_budget(
    settings: LinkSettings, prompts: list[Prompt], over_s: float
) -> None:
    """And no window carries more than the one that is called the peak."""
    link, _ = sent(settings, prompts)
    peak = peak_bytes_per_s(link, over_s)
    assert 0.0 < peak <= settings.pull_bytes_per_s * (1.0 + 1e-6)
    for from_s in (moment for start_s, end_s in link.busy for moment in (start_s, end_s - over_s)):
        inside_s = sum(max(0.0, min(to, from_s + over_s) - max(begin, from_s)) for begin, to in link.busy)
        assert inside_s * settings.pull_bytes_per_s <= peak * over_s * (1.0 + 1e-6)


@given(settings=LINKS, prompts=PROMPTS, streamed=st.booleans())
def test_it_is_busy_exactly_while_something_waits(
    settings: LinkSettings, prompts: list[Prompt], streamed: bool
) -> None:
    """Order and granule change who goes first, never when the link has carried how much."""
    link, _ = sent(settings, prompts, streamed=streamed)
    plain, _ = sent(replace(settings, stretch=0.0, granule_bytes=10**12), prompts, streamed=streamed)
    assert len(link.busy) == len(plain.busy)
    for (start_s, end_s), (other_start_s, other_end_s) in zip(link.busy, plain.busy, strict=True):
        assert math.isclose(start_s, other_start_s, abs_tol=1e-9)
        assert math.isclose(end_s, other_end_s, rel_tol=1e-9, abs_tol=1e-9)
    assert all(later > earlier for (_, earlier), (later, _) in pairwise(link.busy))


@given(settings=LINKS, prompts=PROMPTS)
def test_streaming_makes_nobody_later_by_more_than_a_granule_each(
    settings: LinkSettings, prompts: list[Prompt]
) -> None:
    """Of all prompts; and what ends last of all is no later at all."""
    streamed, whole = (sent(settings, prompts, streamed=s)[1] for s in (True, False))
    granule_s = settings.granule_bytes / settings.pull_bytes_per_s
    for name, transfer in streamed.items():
        assert transfer.offered_s == whole[name].offered_s
        assert transfer.end_s <= whole[name].end_s + len(prompts) * granule_s + 1e-9
    ends_s = [max(t.end_s for t in each.values()) for each in (streamed, whole)]
    assert ends_s[0] <= ends_s[1] + 1e-9


@given(settings=LINKS, prompt=st.builds(Prompt, st.just(0.0), PIECES.map(tuple)))
def test_alone_a_prompt_that_streams_is_never_later(settings: LinkSettings, prompt: Prompt) -> None:
    streamed, whole = (sent(settings, [prompt], streamed=s)[1]["r0"] for s in (True, False))
    assert streamed.end_s <= whole.end_s + 1e-9


@given(
    settings=LINKS,
    size=st.integers(1, 50 * MEGA),
    times=st.lists(st.floats(0.0, 0.3), min_size=2, max_size=10),
)
def test_equals_go_in_the_order_in_which_they_came(
    settings: LinkSettings, size: int, times: list[float]
) -> None:
    _, arrived = sent(settings, [Prompt(time_s, ((0.0, size),)) for time_s in sorted(times)])
    assert list(arrived) == [f"r{number}" for number in range(len(times))]


@given(settings=LINKS, prompts=PROMPTS)
def test_none_waits_for_what_was_offered_after_it_was_needed(
    settings: LinkSettings, prompts: list[Prompt]
) -> None:
    """So what lies before a pull is what was offered by then, and a granule."""
    _, arrived = sent(settings, prompts, streamed=False)
    for transfer in arrived.values():
        rate = settings.pull_bytes_per_s
        needed_s = transfer.offered_s + settings.stretch * transfer.size_bytes / rate
        before = sum(t.size_bytes for t in arrived.values() if t.offered_s <= needed_s)
        assert transfer.end_s <= max(needed_s, transfer.offered_s) + before / rate * (1.0 + 1e-6) + 1e-9


@given(settings=LINKS, prompts=PROMPTS, factor=st.sampled_from([2.0, 5.0]))
def test_a_larger_budget_ends_nothing_later(
    settings: LinkSettings, prompts: list[Prompt], factor: float
) -> None:
    """First come, first served."""
    slow = replace(settings, stretch=0.0, budget_ratio=0.2)
    fast = replace(slow, budget_ratio=factor * 0.2)
    late, early = (sent(s, prompts, streamed=False)[1] for s in (slow, fast))
    assert all(early[name].end_s <= late[name].end_s + 1e-9 for name in late)


def test_a_short_prompt_passes_a_long_one_after_a_granule() -> None:
    """2 GB are under way when 20 MB come: first come first served they wait, by need one granule."""
    link = LinkSettings(10e9, 1.0, stretch=1.0, granule_bytes=10 * MEGA)
    prompts = [Prompt(0.0, ((0.0, 2000 * MEGA),)), Prompt(0.0505, ((0.0, 20 * MEGA),))]
    by_need, fifo = (sent(s, prompts)[1] for s in (link, replace(link, stretch=0.0)))
    assert by_need["r1"].end_s == pytest.approx(0.051 + 0.002)
    assert fifo["r1"].end_s == pytest.approx(0.202)
    assert by_need["r0"].end_s == pytest.approx(0.202)


def test_what_is_dropped_leaves_the_link_after_its_granule() -> None:
    link = KvLink(LinkSettings(1e9, 1.0, stretch=0.0, granule_bytes=10 * MEGA))
    link.offer("a", 100 * MEGA, 0.0)
    link.offer("b", 50 * MEGA, 0.0)
    link.offer("c", 10 * MEGA, 0.0)
    link.drop("a", 0.015)
    link.drop("b", 0.016)
    link.drop("unknown", 0.016)
    assert [(t.request_id, t.end_s) for t in link.advance(1.0)] == [("c", pytest.approx(0.03))]
    assert link.bytes_carried == 30 * MEGA
    assert link.waiting_bytes == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes_per_s", 0.0),
        ("budget_ratio", 0.0),
        ("budget_ratio", 1.5),
        ("stretch", math.inf),
        ("granule_bytes", 0),
    ],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        LinkSettings(**{"bytes_per_s": 1e9, field: value})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size_bytes"):
        KvLink(LinkSettings(1e9)).offer("r", 0, 0.0)
    with pytest.raises(ValueError, match="over_s"):
        peak_bytes_per_s(KvLink(LinkSettings(1e9)), 0.0)
