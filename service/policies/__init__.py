"""The policies by name: ours and the peers', behind one interface (`service.core.policy.PrefillPolicy`).

A policy is named with its knobs, `fcfs:budget_tokens=512,itl_bound_s=0.1`: fields of `SchedulerSettings`, or
of the policy's own `Knobs`. All run under the same scheduler, admission, decode rule and predicted times.
"""

from __future__ import annotations

from service.policies.registry import POLICIES, PolicyKind, make_controller, make_scheduler, parse

__all__ = ["POLICIES", "PolicyKind", "make_controller", "make_scheduler", "parse"]
