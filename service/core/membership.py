"""Who is up, what each instance is labelled, and who takes new requests: the events about instances.

What becomes of the requests of an instance that is gone is the scheduler's business.
"""

from __future__ import annotations

from collections.abc import Callable

from engines.types import PassResult
from service.core.correction import Corrections
from service.core.intake import Intake
from service.core.lifecycle import InstanceState
from service.core.outlier import Outliers
from service.core.policy import InFlight, Instance, KeepsPrices, PlacesAnew, PrefillPolicy
from service.core.prefix_index import PrefixTable
from service.core.settings import SchedulerSettings
from service.core.turns import Turns
from service.core.types import InstanceDraining, InstanceResumed, InstanceUp, KvChanged, RoleChanged


class Membership:
    """Keeps `instances`, `outliers` and the prefix table of a scheduler. `changed`: told when fewer take new
    requests, or other ones than before, ahead of the policy."""

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: PrefillPolicy,
        turns: Turns,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.instances: dict[str, Instance] = {}
        self.outliers = Outliers(settings)
        self._corrections = Corrections(settings)
        self.intake = Intake(settings, self.instances, prefixes := PrefixTable())
        self._settings = settings
        self._policy = policy
        self._turns = turns
        self._changed = changed
        self._prefixes = prefixes
        self._places = 0  # given to instances so far

    def up(self, event: InstanceUp, now_s: float) -> None:
        """Raises ValueError for an id that is up already."""
        instance_id = event.spec.instance_id
        if instance_id in self.instances:
            raise ValueError(f"instance {instance_id} is already up")
        self._places += 1
        instance = Instance(event.spec, self._settings, self._places, self._prefixes)
        self.instances[instance_id] = instance
        self._corrections.joined(instance)
        self.intake.changed()
        self._turns.touch(instance)
        self.outliers.joined(instance)
        self._policy.instance_up(instance, now_s)

    def down(self, instance_id: str, now_s: float) -> Instance | None:
        """The instance that is gone; None if it was not up."""
        instance = self.instances.pop(instance_id, None)
        if instance is None:
            return None
        instance.prefix.forget()
        self.intake.changed()
        self._turns.left(instance)
        self._leaves(instance)
        self._corrections.left(instance)
        self._changed()
        self._policy.instance_down(instance, now_s)
        return instance

    def ran(self, instance: Instance, flight: InFlight, result: PassResult, now_s: float) -> None:
        """A pass is over: how long it took says something of its instance, and of the cost model."""
        if self.outliers.ran(instance, flight, result, now_s):
            self.closed(instance, now_s)
        repriced = self._corrections.ran(instance, flight.pass_, result)
        if repriced:
            self.intake.changed()
            if isinstance(self._policy, KeepsPrices):
                for other in repriced:
                    self._policy.repriced(other)

    def draining(self, event: InstanceDraining, now_s: float) -> None:
        instance = self.instances.get(event.instance_id)
        if instance is not None and instance.state is InstanceState.UP:
            instance.drain()
            self._turns.touch(instance)
            self._leaves(instance)
            self.closed(instance, now_s)

    def resumed(self, event: InstanceResumed, now_s: float) -> None:
        instance = self.instances.get(event.instance_id)
        if instance is not None and instance.state is InstanceState.DRAINING:
            instance.resume()
            self.outliers.joined(instance)
            self._turns.touch(instance)

    def closed(self, instance: Instance, now_s: float) -> None:
        """The instance takes nothing new, for a while (`outlier`) or until it leaves."""
        self._changed()
        if isinstance(self._policy, PlacesAnew):
            self._policy.closed(instance, now_s)

    def role_changed(self, event: RoleChanged, now_s: float) -> None:
        instance = self.instances.get(event.instance_id)
        if instance is not None:
            instance.role = event.role
            self._changed()
            self._turns.touch(instance)

    def kv_changed(self, event: KvChanged, now_s: float) -> None:
        if event.instance_id in self.instances:
            self.instances[event.instance_id].prefix.apply(event.events)

    def _leaves(self, instance: Instance) -> None:
        for needed in self.outliers.left(instance):
            self._turns.touch(needed)
