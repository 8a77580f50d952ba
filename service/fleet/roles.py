"""How a worker follows its assignment: membership says which role it is to have, the worker carries it out
and says so. With one engine for both lanes, the default, that is a label: the scheduler plans by it. Where
roles have engines of their own it takes a while (`role_move`).

Level-triggered: it looks at what is wanted now, not at what changed. A role that can't be had is reported as
answered, with the role that the worker has in its place, and not tried again before somebody wants it anew.
A step that fails otherwise leaves the role as it was, unreported, and is tried again with the next look; the
controller takes back what takes too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from service.core.types import Role
from service.fleet.membership import Assignment, Lease, Membership, MembershipError

log = logging.getLogger(__name__)

# Returns the role that the worker has then: another one than was wanted where something else is by now.
CarryOut = Callable[[Assignment], Awaitable[Role]]


class RoleRefused(Exception):  # noqa: N818 - what happened
    """The worker can't have the role; the message says why. It has the one that it had."""


async def follow_assignment(membership: Membership, lease: Lease, role: Role, carry_out: CarryOut) -> None:
    """Keep to what is wanted; ends with membership or by cancellation. role: that it starts with."""
    done = 0  # number of the assignment that was answered
    name = lease.member.member_id
    async for snapshot in membership.watch():
        wanted = snapshot.assignments.get(name)
        if wanted is None or wanted.number == done:
            continue
        try:
            if wanted.role is not role:
                before, role = role, await carry_out(wanted)
                if role is not wanted.role:
                    continue
                log.info("role %s, was %s: %s", role, before, wanted.reason)
            await lease.report(role, wanted.number)
            done = wanted.number
        except MembershipError as error:
            log.warning("role %s could not be reported: %s", role, error)
        except RoleRefused as error:
            log.error("role %s can't be had, it stays %s: %s", wanted.role, role, error)
            done = wanted.number
            await _report(lease, role, done)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("role %s could not be taken; it stays %s", wanted.role, role)


async def _report(lease: Lease, role: Role, number: int) -> None:
    """Where membership is away it is written once that is back."""
    try:
        await lease.report(role, number)
    except MembershipError as error:
        log.warning("role %s could not be reported: %s", role, error)
