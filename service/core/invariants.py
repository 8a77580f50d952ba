"""What must hold between any two events, as one check for tests and for debug runs of the simulator.

Conservation: submitted = ended + live. Place: every live request waits in the queue, is in exactly one pass,
or decodes between steps. Memory: promises never exceed the blocks, and belong to live requests or to passes
that run unheard. Passes: no request twice, none larger than a profile. Turns: no free instance is forgotten.
"""

from __future__ import annotations

from collections import Counter

from service.core.lifecycle import RequestState
from service.core.scheduler import PrefillScheduler
from service.core.types import Lane


def check(scheduler: PrefillScheduler) -> None:
    """Raise AssertionError naming the first law that is broken."""
    ended = sum(scheduler.outcomes.values())
    assert scheduler.submitted == ended + len(scheduler.live), "conservation: a request was lost or doubled"
    _check_places(scheduler)
    _check_memory(scheduler)
    for lane in Lane:
        waiting = [t for t in scheduler.policy.waiting() if t.lane is lane]
        load = (len(waiting), sum(t.remaining for t in waiting))
        assert scheduler.policy.lane_load(lane) == load, f"load of the {lane} lane is miscounted"


def _check_places(scheduler: PrefillScheduler) -> None:
    waiting = Counter(t.request_id for t in scheduler.policy.waiting())
    assert all(n == 1 for n in waiting.values()), "a request waits twice"
    in_pass: Counter[str] = Counter()
    for instance in scheduler.instances.values():
        assert instance.running is not None or scheduler.turns.will_ask(instance), (
            "a free instance is forgotten"
        )
        assert instance.running is not None or instance.staged is None, "staged behind nothing"
        for flight in (instance.running, instance.staged):
            if flight is None:
                continue
            ids = [item.request_id for item in flight.pass_.items]
            assert ids, "an empty pass"
            assert len(set(ids)) == len(ids), "a request twice in one pass"
            assert len(ids) <= instance.requests_max, "more requests in a pass than the engine takes"
            sizes = [(item.new_tokens, item.history) for item in flight.pass_.items]
            assert instance.spec.profiles.executed(sizes) is not None, "a pass that no profile takes"
            in_pass.update(i for i in ids if i in scheduler.live)
    assert all(n == 1 for n in in_pass.values()), "a request in two passes"
    for request_id, tracked in scheduler.live.items():
        decoding = tracked.state is RequestState.DECODING
        places = waiting[request_id] + (in_pass[request_id] if not decoding else 1)
        assert places == 1, f"{request_id} ({tracked.state}) is in {places} places"
    assert set(waiting) <= set(scheduler.live), "an ended request waits"


def _check_memory(scheduler: PrefillScheduler) -> None:
    for instance in scheduler.instances.values():
        kv = instance.kv
        assert 0 <= kv.blocks_reserved <= kv.blocks_total, "KV promised beyond the blocks that exist"
        for tracked in scheduler.live.values():
            here = tracked.instance_id == instance.instance_id
            assert kv.holds(tracked.request_id) == here, f"{tracked.request_id}: KV promise out of step"
        assert set(instance.partial) | set(instance.decode.running) <= set(scheduler.live)
