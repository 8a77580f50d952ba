"""What a prefill policy is: a queue with an order, and a plan for one instance.

The scheduler sequences (events, lifecycle, KV, decode, deadlines); a policy only keeps the waiting requests
and says which of them, and how many tokens of each, make the next prefill pass. All policies see the same
predicted times and the same admission and decode rules, so that a comparison compares policies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from engines.cost_model import CostModel
from engines.types import Chunking, DecodeMode, Pass
from service.core.admission import request_tokens_max
from service.core.decode import DecodeRule
from service.core.kv_budget import KvBudget
from service.core.lifecycle import INSTANCE, InstanceState, step
from service.core.prefix_index import PrefixIndex, PrefixTable
from service.core.pricing import Pricer
from service.core.settings import SchedulerSettings
from service.core.tracked import Tracked
from service.core.types import DispatchNumbers, InstanceSpec, Lane, Reason, Request


@dataclass(slots=True)
class InFlight:
    """A pass on a worker. `end_s` is predicted; inf until it has started."""

    pass_: Pass
    reason: Reason
    predicted_s: float
    start_s: float = math.inf
    revoking: bool = False
    partials_begun: int = 0  # newcomers that will be in parts when it is over

    @property
    def end_s(self) -> float:
        return self.start_s + self.predicted_s


class Instance:
    """The core's view of one instance: its models, promises, cache, decode set and passes."""

    def __init__(
        self,
        spec: InstanceSpec,
        settings: SchedulerSettings,
        place: int = 0,
        prefixes: PrefixTable | None = None,
    ) -> None:
        self.spec = spec
        self.instance_id = spec.instance_id
        self.requests_max = spec.capabilities.requests_max
        self.request_tokens_max = spec.profiles.request_tokens_max  # of one request in one pass
        self.place = place  # in the order in which instances joined
        self.state = InstanceState.UP
        self.role = spec.role  # written by the scheduler at RoleChanged
        self.takes_new = True  # requests that hold nothing here yet; `outlier`, dispatcher, `drain` write it
        self.avoided = False  # somebody waits who is to be tried elsewhere; `elsewhere` writes it
        self.on_trial = False  # its next pass with new requests is the last before it is judged
        self.pricer = Pricer(spec.cost, spec.profiles)
        self.kv = KvBudget(spec.capabilities.kv_blocks_total, spec.capabilities.block_tokens)
        self.prefix = PrefixIndex(spec.capabilities.block_tokens, prefixes)
        self.decode = DecodeRule(settings, spec.capabilities, self.pricer)
        self.correction = (1.0, 1.0)  # of the spec's cost: memory, compute side; written by `correction`
        self.busy_s = 0.0  # in passes that are over; written by the scheduler
        self.running: InFlight | None = None
        self.staged: InFlight | None = None
        self.partial: dict[str, Tracked] = {}  # requests whose prefill KV lives here
        self.tokens_per_s = self._rate_at_knee()  # of prefill
        self._tokens_max = request_tokens_max(spec)
        self._decodes = spec.capabilities.decode is not DecodeMode.NONE
        self._lane_floor_tokens = settings.lane_floor_tokens
        self._short_tokens_max: dict[int, int] = {}  # by history
        self._cached: dict[str, int] = {}  # request id -> tokens, at one version of the prefix index
        self._cached_version = 0

    def _rate_at_knee(self) -> float:
        knee = self.pricer.knee_tokens
        return knee / self.pricer.alone_s([(knee, 0)])

    def reprice(self, cost: CostModel, knee_tokens: int) -> None:
        """Predict by `cost`, whose knee is `knee_tokens`, no longer by that of the spec (`correction`)."""
        self.pricer.believe(cost, knee_tokens)
        self.tokens_per_s = self._rate_at_knee()
        self._short_tokens_max.clear()

    def in_pass(self, request_id: str) -> bool:
        """Whether the request is in the running or the staged pass."""
        flights = (self.running, self.staged)
        return any(f is not None and any(i.request_id == request_id for i in f.pass_.items) for f in flights)

    def makes_it_only_unstaged(self, tracked: Tracked, now_s: float) -> bool:
        """Whether a newcomer meets its target right after the running pass, but not after the staged one."""
        if self.running is None or self.staged is None:
            return False
        end_s = max(now_s, self.running.end_s) + self.pricer.pass_s([self.item_of(tracked)])
        return end_s <= tracked.target_s < end_s + self.staged.predicted_s

    def history_of(self, tracked: Tracked) -> int:
        """H on this instance: what the request has computed here, or what the prefix cache holds of it."""
        if tracked.instance_id == self.instance_id:
            return tracked.position
        return self._cached_tokens(tracked.request) if tracked.request.block_hashes else 0

    def item_of(self, tracked: Tracked) -> tuple[int, int]:
        """(new tokens, history) of all that remains of a prompt here."""
        request = tracked.request
        if tracked.instance_id == self.instance_id:
            history = tracked.position
        else:
            history = self._cached_tokens(request) if request.block_hashes else 0
        return request.prompt_tokens - history, history

    def _cached_tokens(self, request: Request) -> int:
        """Looked up once for each version of the index: a plan asks many times."""
        if self._cached_version != self.prefix.version:
            self._cached.clear()
            self._cached_version = self.prefix.version
        known = self._cached.get(request.request_id)
        if known is None:
            known = self.prefix.cached_tokens(request.block_hashes, request.prompt_tokens)
            self._cached[request.request_id] = known
        return known

    def boundary_tokens(self, history: int) -> int:
        """L_m(H) here."""
        return self.pricer.cost.boundary_tokens(history)

    def short_tokens_max(self, history: int) -> int:
        """Largest L that counts as short here, given H cached tokens."""
        known = self._short_tokens_max.get(history)
        if known is None:
            least = max(self.boundary_tokens(history), self._lane_floor_tokens)
            known = self._short_tokens_max[history] = min(least, self.request_tokens_max)
        return known

    def chunk_tokens(self, item: tuple[int, int], limit: int) -> int:
        """How many of `item`'s new tokens one pass here can compute within `limit`; 0: none.

        All of them where they fit. An engine that chunks by block reuse can stop after full blocks only.
        """
        new_tokens, history = item
        if new_tokens <= limit:
            return new_tokens
        if self.spec.capabilities.chunking is Chunking.PREFIX_REUSE:
            block = self.spec.capabilities.block_tokens
            return max(0, (history + limit) // block * block - history)
        return limit

    def drain(self) -> None:
        """It takes nothing new from here on."""
        what = f"instance {self.instance_id}"
        self.state = step(INSTANCE, self.state, InstanceState.DRAINING, what)
        self.takes_new = self.on_trial = False

    def resume(self) -> None:
        """It stays: it takes new requests again."""
        self.state = step(INSTANCE, self.state, InstanceState.UP, f"instance {self.instance_id}")
        self.takes_new = True

    def may_take(self, tracked: Tracked) -> bool:
        """Whether the request can run here: not bound elsewhere, no larger than this instance, bound here
        already where it takes nothing new, and not one that is to be tried elsewhere."""
        if tracked.instance_id is not None:
            return tracked.instance_id == self.instance_id
        if not self.takes_new or tracked.avoids == self.instance_id:
            return False
        fits = tracked.kv_tokens_max <= self._tokens_max
        return fits and (self._decodes or tracked.request.max_new_tokens == 1)


class KvGate:
    """Which requests of one plan may start: KV for newcomers, with bounded overtaking.

    A newcomer that does not fit is passed over and smaller ones may go ahead, until it has waited past the
    ageing bound: from then on no newcomer overtakes it. A policy may keep room for one that is not asked yet.
    """

    def __init__(self, instance: Instance, settings: SchedulerSettings, now_s: float) -> None:
        self._instance = instance
        self._settings = settings
        self._now_s = now_s
        self._pending_blocks = 0
        self._closed = False
        self._closes = True
        self._kept: Tracked | None = None
        self._kept_blocks = 0
        self._partials = len(instance.partial)
        if instance.running is not None:
            self._partials += instance.running.partials_begun
        self.refused_any = False

    def has_room(self, tracked: Tracked) -> bool:
        """Whether `tracked` holds KV here, or there are blocks for it."""
        return tracked.instance_id is not None or self._instance.kv.fits(tracked.kv_tokens_max)

    def keep_room(self, newcomer: Tracked) -> None:
        """Other newcomers leave it its blocks, and if it is long a place among the prompts in parts."""
        self._kept, self._kept_blocks = newcomer, self._instance.kv.blocks_for(newcomer.kv_tokens_max)

    def pass_over(self) -> None:
        """Who has no room here waits for room elsewhere: all may overtake it."""
        self._closes = False

    def admits(self, tracked: Tracked, *, whole: bool = True) -> bool:
        """Whether `tracked` may be in a pass here now; counts its blocks as taken if so.

        `whole`: the pass finishes its prompt. A part counts against the bound on partial requests.
        """
        instance = self._instance
        if tracked.instance_id is not None or not instance.may_take(tracked):
            return tracked.instance_id == instance.instance_id
        kept, kept_blocks = self._kept, self._kept_blocks
        if tracked is kept:
            kept, kept_blocks = None, 0
        elif self._closed:
            return False
        if not whole:
            places = self._settings.partial_requests_max - (kept is not None and kept.lane is Lane.LONG)
            if self._partials >= places:
                return False
        blocks = instance.kv.blocks_for(tracked.kv_tokens_max)
        if blocks + self._pending_blocks + kept_blocks > instance.kv.blocks_free:
            self.refused_any = True
            aged = self._now_s - tracked.waiting_since_s >= self._settings.age_bound_s
            self._closed = self._closes and aged
            return False
        self._pending_blocks += blocks
        self._partials += not whole
        self._kept, self._kept_blocks = kept, kept_blocks
        return True


class PlanItem(NamedTuple):
    tracked: Tracked
    new_tokens: int
    history: int

    @property
    def size(self) -> tuple[int, int]:
        return self.new_tokens, self.history

    @property
    def is_part(self) -> bool:
        """It ends before its prompt does."""
        return self.new_tokens + self.history < self.tracked.request.prompt_tokens

    @property
    def begins_partial(self) -> bool:
        """The first part of a prompt that needs more chunks."""
        return self.tracked.position == 0 and self.is_part


@dataclass(frozen=True, slots=True)
class PassPlan:
    """The next prefill pass; `items` is not empty."""

    items: tuple[PlanItem, ...]
    reason: Reason
    predicted_s: float
    numbers: DispatchNumbers = field(default_factory=DispatchNumbers)
    layer_block: int = 0  # see engines.types.Pass
    layer_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to prefill before `until_s`, or before the next event where it is inf.

    everywhere: no other free instance would take anything either, so none need be asked.
    alike: it goes for all free instances of the same group (`pools`), as long as nobody is given a pass.
    """

    until_s: float
    reason: Reason
    everywhere: bool = False
    alike: bool = False


Plan = PassPlan | Wait | None  # None: nothing waits here


class PrefillPolicy(Protocol):
    """The waiting requests and what to run next. Methods are called by the scheduler only."""

    def instance_up(self, instance: Instance, now_s: float) -> None:
        """`instance` joined. It stays the same object, kept up to date, until `instance_down`."""

    def instance_down(self, instance: Instance, now_s: float) -> None:
        """`instance` is gone. The scheduler takes back what was bound to it next (`remove`, then `add`).
        Requests that the policy had meant for it, but without a pass yet, are its own to place anew."""

    def add(self, tracked: Tracked, now_s: float, *, arrival: bool) -> None:
        """`tracked` waits (again); `arrival`: for the first time."""

    def remove(self, tracked: Tracked) -> None:
        """It left the queue: planned, ended or lost."""

    def plan(self, instance: Instance, now_s: float) -> Plan:
        """The next prefill pass for `instance`, free from `now_s` on. Changes nothing that waits."""

    def dispatched(self, plan: PassPlan, now_s: float) -> None:
        """The plan was carried out; its requests have been removed."""

    def late(self, now_s: float) -> list[Tracked]:
        """Waiting requests whose target came out of reach since the last call."""

    def waiting(self) -> Iterator[Tracked]: ...

    def lane_load(self, lane: Lane) -> tuple[int, int]:
        """(requests, prompt tokens) waiting in a lane."""

    def window(self) -> tuple[float, int]:
        """(W in seconds, D in tokens), zeros where the policy has no window."""


@runtime_checkable
class BindsEarly(Protocol):
    """A policy that places requests on instances before their first pass."""

    def bound_to(self, instance_id: str) -> Iterator[Tracked]:
        """The waiting requests that are meant for the instance."""


@runtime_checkable
class KeepsPrices(Protocol):
    """A policy that keeps what it once worked out from the prices of an instance."""

    def repriced(self, instance: Instance) -> None:
        """The predicted times of `instance` are others from now on."""


@runtime_checkable
class PlacesAnew(Protocol):
    """A policy that means waiting requests for one instance before they begin."""

    def closed(self, instance: Instance, now_s: float) -> None:
        """`instance` takes nothing new from now on: who was meant for it and has not begun is placed anew."""
