"""The laws of the core in every case of the quick suite, under every policy, at and beyond what it can do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.core import invariants
from service.core.scheduler import PrefillScheduler
from service.core.types import Command, Outcome
from service.policies import POLICIES, make_controller, make_scheduler
from service.sim.case import Case
from service.sim.kernel import run
from service.sim.run_length import Load
from service.sim.sources import make_source
from service.sim.suite import load_suite
from service.sim.traces import MissingTrace

QUICK = load_suite("quick")
REQUESTS = 250
EVERY = 25  # polls; a check looks at everything that is live


def checked(scheduler: PrefillScheduler) -> PrefillScheduler:
    """The same scheduler, its books looked at as it goes."""
    poll: Callable[[float], tuple[Command, ...]] = scheduler.poll
    polls = 0

    def polled(now_s: float) -> tuple[Command, ...]:
        nonlocal polls
        commands = poll(now_s)
        polls += 1
        if polls % EVERY == 0:
            invariants.check(scheduler)
        return commands

    scheduler.poll = polled  # type: ignore[method-assign]
    return scheduler


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.7, 1.3])
@pytest.mark.parametrize("case", QUICK.cases, ids=lambda case: case.name)
def test_the_books_balance_in_every_case_under_every_policy(case: Case, load: float) -> None:
    try:
        rate = load * Load(case, QUICK.settings.metric, 1).capacity_per_s
    except MissingTrace as missing:
        pytest.skip(str(missing))
    for policy in POLICIES:
        settings = case.scheduler_settings()
        scheduler = checked(make_scheduler(policy, settings))
        source = make_source(
            case.workload, rate_per_s=rate, seed=1, targets=case.targets(), requests_max=REQUESTS
        )
        controller = make_controller(policy, settings)
        result = run(scheduler, case.sim_instances(), source, controller=controller, keep_log=False)
        invariants.check(scheduler)
        assert not scheduler.live, policy
        ended = [record.outcome for record in result.records.values()]
        assert len(ended) == REQUESTS, policy
        assert None not in ended, policy
        assert sum(scheduler.outcomes.values()) == REQUESTS, policy
        assert set(ended) <= {Outcome.COMPLETED, Outcome.REJECTED_CAPACITY}, policy
