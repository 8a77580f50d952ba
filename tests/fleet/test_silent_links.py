"""Connections that stay open and reach nobody any more, as behind a cut: they are given up and made anew."""

from __future__ import annotations

import grpc.aio
from etcd_relay import Relay
from test_processes import Place, books, fleet, read, submit, until

from service.core.types import Outcome
from service.fleet.place import ALIVE


async def test_a_front_end_finds_back_to_a_scheduler_that_it_was_cut_off_from() -> None:
    """The same one leads all the time, so membership has no news."""
    async with fleet(workers=1, schedulers=1, front_ends=0) as made:
        scheduler = made.schedulers["sched0"]
        relay = Relay(int(scheduler.address.rpartition(":")[2]))
        await relay.open()

        def opener(address: str) -> grpc.aio.Channel:
            target = relay.endpoint if address == scheduler.address else address
            options = (("grpc.use_local_subchannel_pool", 1), *ALIVE)
            return grpc.aio.insecure_channel(target, options=options)

        made.place = lambda name: Place(name, "s", "127.0.0.1:0", opener)  # type: ignore[method-assign]
        front_end = await made.front_end("fe0")
        await until(lambda: front_end.runtime.welcome is not None)
        assert (await read(submit(front_end, "before")))[1].outcome is Outcome.COMPLETED
        relay.swallow()
        tokens, record = await read(submit(front_end, "after", answer=4))
        assert (record.outcome, len(tokens)) == (Outcome.COMPLETED, 4)
        books(made)
        assert scheduler.reigns == 1
        await relay.cut()
