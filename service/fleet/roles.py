"""How a worker follows its assignment: membership says which role it is to have, the worker carries it out
and says so. With one engine for both lanes, the default, that is a label: the scheduler plans by it.

Level-triggered: it looks at what is wanted now, not at what changed. A step that fails leaves the role as it
was, unreported, and is tried again with the next look; the controller takes back what takes too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from service.core.types import Role
from service.fleet.membership import Lease, Membership, MembershipError

log = logging.getLogger(__name__)

CarryOut = Callable[[Role], Awaitable[None]]  # raises what keeps the instance from the role


async def follow_assignment(membership: Membership, lease: Lease, role: Role, carry_out: CarryOut) -> None:
    """Keep to what is wanted; ends with membership or by cancellation. role: that it starts with."""
    done = 0  # number of the assignment that was carried out
    name = lease.member.member_id
    async for snapshot in membership.watch():
        wanted = snapshot.assignments.get(name)
        if wanted is None or wanted.number == done:
            continue
        try:
            if wanted.role is not role:
                await carry_out(wanted.role)
                log.info("role %s, was %s: %s", wanted.role, role, wanted.reason)
                role = wanted.role
            await lease.report(role, wanted.number)
            done = wanted.number
        except MembershipError as error:
            log.warning("role %s could not be reported: %s", role, error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("role %s could not be taken; it stays %s", wanted.role, role)
