"""Shards that come and go, for half a minute: real processes, real etcd."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_fleet_demo import still_running

from service.bench.etcd import MISSING, find_etcd
from service.bench.fleet_plan import DemoSettings
from service.bench.fleet_shards import FIRST, RETIRED, THIRD, WORKERS_EACH, run_shards, to_json
from service.bench.loadgen import Ending

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_etcd() is None, reason=MISSING)]


async def test_a_shard_comes_and_one_goes_and_every_request_has_one_end(tmp_path: Path) -> None:
    settings = DemoSettings(40.0, len(FIRST) * WORKERS_EACH, phases=(("chats", 1.0, 0.98),))
    run = await run_shards(settings, tmp_path, print)
    assert run.faults == []
    assert len(run.seen) == len(run.plan)
    assert sum(each.ending is Ending.COMPLETED for each in run.seen) > 0.95 * len(run.plan)
    assert [sizes for _, sizes in run.workers][-1] == {FIRST[0]: 3, THIRD: 3}
    assert RETIRED in {sizes for _, at in run.workers for sizes in at}
    assert {reason for *_, reason in to_json(run)["moves"]} == {"balance", "retired"}
    assert still_running(str(tmp_path)) == []
