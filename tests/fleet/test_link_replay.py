"""A link that survives its streams: nothing lost, nothing twice, and one scheduler at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.fleet.health import LinkSettings
from service.fleet.link import Caller, Claim, Fence, Inbox, LinkBroken, Outbox

# What happens between two ends: a message is sent, k messages of the wire arrive, an acknowledgement crosses,
# or the stream breaks (all that is on the wire is lost) and the next one begins.
STEPS = st.lists(
    st.one_of(
        st.just(("send",)),
        st.tuples(st.just("arrive"), st.integers(1, 5)),
        st.just(("acknowledge",)),
        st.just(("break",)),
    ),
    max_size=60,
)


@given(STEPS)
def test_everything_arrives_once_and_in_order_whatever_breaks(steps: list[tuple[object, ...]]) -> None:
    outbox: Outbox[int] = Outbox()
    inbox, wire, taken, sent = Inbox(), [], [], 0

    def arrive(count: int) -> None:
        for _ in range(min(count, len(wire))):
            number = wire.pop(0)
            if inbox.take(number):
                taken.append(number)

    for step in [*steps, ("break",), ("arrive", 10_000), ("acknowledge",)]:
        match step:
            case ("send",):
                sent += 1
                wire.append(outbox.add(lambda number: number))
            case ("arrive", int(count)):
                arrive(count)
            case ("acknowledge",):
                outbox.acknowledge(inbox.last)
            case _:
                wire[:] = outbox.after(inbox.last)
        assert taken == list(range(1, len(taken) + 1))
    assert len(taken) == sent
    assert len(outbox) == 0


@given(st.lists(st.integers(1, 6), max_size=40))
def test_a_number_is_taken_once_and_never_before_the_one_in_front(numbers: list[int]) -> None:
    inbox, taken = Inbox(), []
    for number in numbers:
        if number > inbox.last + 1:
            with pytest.raises(LinkBroken, match=f"{number} came"):
                inbox.take(number)
        elif inbox.take(number):
            taken.append(number)
    assert taken == list(range(1, len(taken) + 1))


def test_an_outbox_is_bounded_and_knows_what_it_never_sent_and_what_is_gone() -> None:
    outbox: Outbox[int] = Outbox(limit=3)
    for _ in range(3):
        outbox.add(lambda number: number)
    with pytest.raises(LinkBroken, match="3 messages are not acknowledged"):
        outbox.add(lambda number: number)
    with pytest.raises(LinkBroken, match="message 4 is acknowledged"):
        outbox.acknowledge(4)
    outbox.acknowledge(2)
    assert outbox.add(lambda number: number) == 4
    with pytest.raises(LinkBroken, match="messages 2 to 2 were"):
        outbox.after(1)
    assert outbox.after(3) == (4,)


CALLERS = st.builds(
    Caller, st.sampled_from("ab"), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans()
)


@given(st.lists(CALLERS, max_size=25))
def test_only_the_highest_caller_is_obeyed(callers: list[Caller]) -> None:
    """Epoch first, then incarnation, then attempt; an epoch belongs to who brought it first."""
    fence = Fence()
    highest, owner = (0, 0, 0), ""
    for caller in callers:
        claim, why = fence.claim(caller)
        place = (caller.epoch, caller.incarnation, caller.attempt)
        fair = caller.epoch > highest[0] or (caller.scheduler_id == owner and place > highest)
        assert (claim is not Claim.STALE) == fair
        assert bool(why) == (claim is Claim.STALE)
        if claim is Claim.RESUME:
            assert caller.resume
            assert place[:2] == highest[:2]
        if fair:
            assert (claim is Claim.RESUME) == (caller.resume and place[:2] == highest[:2])
            highest, owner = place, caller.scheduler_id
        assert fence.epoch == highest[0]


@given(
    st.lists(st.tuples(CALLERS, st.sampled_from("xy"), st.sampled_from("xy"), st.integers(0, 3)), max_size=25)
)
def test_a_worker_in_several_shards_keeps_each_apart(
    history: list[tuple[Caller, str, str, int]],
) -> None:
    """Whoever is of another shard is refused and changes nothing; a shard's epochs outlast the absence."""
    fence, alone, floors = Fence(), {"x": Fence(), "y": Fence()}, {"x": 0, "y": 0}
    for caller, said, shard, floor in history:
        fence.move(shard, floor)
        floors[shard] = max(floors[shard], floor)
        claim, _ = fence.claim(replace(caller, shard=said))
        if said != shard or caller.epoch < floors[shard]:
            assert claim is Claim.STALE
        else:
            assert claim is alone[shard].claim(caller)[0]
        assert fence.epoch == max(floors[shard], alone[shard].epoch)
        assert fence.foreign(replace(caller, shard=said)) == (said != shard)
        assert not fence.foreign(caller)  # of a release that does not say


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"silence_s": 0.1}, "silence_s"),
        ({"orphan_s": 1.0}, "orphan_s"),
        ({"backoff_s_min": 0.0}, "backoff_s_max"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LinkSettings(**changes)  # type: ignore[arg-type]
