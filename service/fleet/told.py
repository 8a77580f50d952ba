"""What a process tells the fleet of itself and changes while it runs: facts of its membership.

Written one after the other, the newest only: a service that is slow or away delays what others see and never
what the process does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from service.fleet.membership import Facts, Lease, MembershipError

log = logging.getLogger(__name__)


class Told:
    def __init__(self, facts: Facts) -> None:
        self._facts: dict[str, Any] = dict(facts)
        self._changed = asyncio.Event()

    @property
    def facts(self) -> Facts:
        return dict(self._facts)

    def tell(self, **facts: Any) -> None:
        """Set facts; None takes one away. All of a call are seen together."""
        self._facts.update(facts)
        self._facts = {name: value for name, value in self._facts.items() if value is not None}
        self._changed.set()

    async def keep(self, lease: Lease) -> None:
        """Write what changes; ends by cancellation. A lease writes with its next renewal what could not be
        written at once."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await lease.update(facts=self.facts)
            except MembershipError as error:
                log.warning("facts could not be told: %s", error)
