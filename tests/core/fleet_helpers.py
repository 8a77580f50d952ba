"""A scheduler over several instances, driven by hand: passes end when the test says so."""

from __future__ import annotations

from engines.types import BlocksStored, FinishReason, ItemResult, Pass, PassKind, PassResult
from service.core.scheduler import PrefillScheduler
from service.core.settings import SchedulerSettings
from service.core.types import (
    Dispatch,
    Idle,
    InstanceDown,
    InstanceSpec,
    InstanceUp,
    KvChanged,
    PassFinished,
    PassStarted,
    Request,
    Role,
    RoleChanged,
    Submit,
    WaitUntil,
)
from service.policies import make_scheduler


class Fleet:
    """`running` is what each instance runs; `started` when each request was first dispatched, and where."""

    def __init__(
        self,
        specs: list[InstanceSpec],
        roles: dict[str, Role] | None = None,
        knobs: SchedulerSettings | None = None,
        policy: str = "plaserve",
    ) -> None:
        self.scheduler: PrefillScheduler = make_scheduler(policy, knobs or SchedulerSettings())
        self.now_s = 0.0
        self.running: dict[str, Pass] = {}
        self.started: dict[str, tuple[float, str]] = {}
        self.prompts: dict[str, int] = {}
        self.wake_s: float | None = None
        for spec in specs:
            self.scheduler.on_event(InstanceUp(spec), 0.0)
        for name, role in (roles or {}).items():
            self.scheduler.on_event(RoleChanged(name, role), 0.0)
        self.poll()

    def submit(self, *requests: Request) -> None:
        """All at this instant, polled once."""
        for request in requests:
            self.prompts[request.request_id] = request.prompt_tokens
            self.scheduler.on_event(Submit(request), self.now_s)
        self.poll()

    def caches(self, name: str, blocks: tuple[int, ...]) -> None:
        self.scheduler.on_event(KvChanged(name, (BlocksStored(blocks),)), self.now_s)
        self.poll()

    def role(self, name: str, role: Role) -> None:
        self.scheduler.on_event(RoleChanged(name, role), self.now_s)
        self.poll()

    def down(self, name: str) -> None:
        self.running.pop(name, None)
        self.scheduler.on_event(InstanceDown(name), self.now_s)
        self.poll()

    def finish(self, name: str, at_s: float | None = None) -> None:
        """The running pass ends, when it was predicted to if no time is given; prompts that are done end."""
        instance, pass_ = self.scheduler.instances[name], self.running.pop(name)
        assert instance.running is not None
        self.now_s = max(self.now_s, instance.running.end_s if at_s is None else at_s)
        items = []
        for item in pass_.items:
            reached = item.history + item.new_tokens
            done = reached == self.prompts[item.request_id]
            finish = FinishReason.LENGTH if done else None
            token = 7 if done else None
            items.append(ItemResult(item.request_id, reached, item.new_tokens, token=token, finish=finish))
        result = PassResult(pass_.pass_id, PassKind.PREFILL, tuple(items), pass_.tokens, 0, 0.01)
        self.scheduler.on_event(PassFinished(name, result), self.now_s)
        self.poll()

    def wait_until(self, at_s: float) -> None:
        """Time passes; the scheduler is woken when it asked to be."""
        while self.wake_s is not None and self.wake_s <= at_s:
            self.now_s = self.wake_s
            self.poll()
        self.now_s = at_s
        self.poll()

    def run_out(self, until_s: float = 1e3) -> None:
        """Passes end as predicted, in order, until nothing runs and nobody is to be woken."""
        while self.now_s < until_s:
            flights = {name: self.scheduler.instances[name].running for name in self.running}
            ends = sorted((f.end_s, name) for name, f in flights.items() if f is not None)
            if self.wake_s is not None and (not ends or self.wake_s < ends[0][0]):
                self.now_s = self.wake_s
                self.poll()
            elif ends:
                self.finish(ends[0][1])
            else:
                return

    def where(self, request_id: str) -> str | None:
        """On which instance the request was started; None: it waits."""
        return self.started[request_id][1] if request_id in self.started else None

    def poll(self) -> None:
        again = True
        while again:
            again = False
            for command in self.scheduler.poll(self.now_s):
                match command:
                    case Dispatch(name, pass_, _):
                        self.running[name] = pass_
                        for item in pass_.items:
                            self.started.setdefault(item.request_id, (self.now_s, name))
                        self.scheduler.on_event(PassStarted(name, pass_.pass_id), self.now_s)
                        again = True
                    case WaitUntil(time_s, _):
                        assert time_s > self.now_s, "a wake-up in the past would spin"
                        self.wake_s = time_s
                    case Idle():
                        self.wake_s = None
