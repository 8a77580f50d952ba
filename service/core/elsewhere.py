"""A pass that failed is run again elsewhere: a request that must begin anew is kept from the instance that
failed it, while another one that takes new requests, prefers its lane and has room could have it.

Whatever failed there may fail again, and a request has one more try. Where nobody else can take it, or nobody
else can any more, it is anybody's: better there than nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from service.core.lifecycle import RequestState
from service.core.policy import Instance
from service.core.pools import has_room, serves
from service.core.tracked import Tracked


class Elsewhere:
    """Writes `Tracked.avoids` and `Instance.avoided`. instances: those that are up, the scheduler's.
    touch: told of an instance that is to be asked anew."""

    def __init__(self, instances: Mapping[str, Instance], touch: Callable[[Instance], None]) -> None:
        self._instances = instances
        self._touch = touch
        self._kept: set[Tracked] = set()  # few: those that failed and have not begun again

    def failed(self, tracked: Tracked, instance: Instance) -> None:
        """`tracked` lost its KV in a pass there and is bound to nobody now. Before it is queued again."""
        if self._another(tracked, instance.instance_id):
            tracked.avoids = instance.instance_id
            self._kept.add(tracked)
            instance.avoided = True

    def look(self) -> None:
        """Something began or ended, an instance came, left or changed: who has no other any more is
        anybody's. Before policies place anew."""
        if not self._kept:
            return
        before = {tracked.avoids for tracked in self._kept}
        for tracked in list(self._kept):
            if not self._waits(tracked) or not self._another(tracked, tracked.avoids or ""):
                tracked.avoids = None
                self._kept.remove(tracked)
        for avoided in before.difference(tracked.avoids for tracked in self._kept):
            instance = self._instances.get(avoided or "")
            if instance is not None:
                instance.avoided = False
                self._touch(instance)

    def _another(self, tracked: Tracked, failed_on: str) -> bool:
        """Whether one that has room could have it. Not where the one that failed is gone: what comes back
        under its name is another one."""
        return failed_on in self._instances and any(
            has_room(instance, tracked) and serves(instance, tracked.lane)
            for name, instance in self._instances.items()
            if name != failed_on
        )

    def _waits(self, tracked: Tracked) -> bool:
        return tracked.state is not RequestState.ENDED and tracked.instance_id is None
