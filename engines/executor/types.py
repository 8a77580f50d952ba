"""What is said to an executor and what it says: plain data, and the link that carries it.

A *call* is one request as the executor sees it. A prompt that is computed in parts is one call a part: an
ordinary call for the first k full blocks with one output token, found again by block reuse, and at the end
the real one. A pass is the calls that one `enqueue` brings.

An executor answers when it likes, batches as it likes and may die. So a link never blocks without a timeout,
and everything that it hears is a report: answers, what an iteration ran, changes of the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from engines.types import Sampling


class CallKind(StrEnum):
    GENERATE = "generate"  # prefill, then decode; also a part, with one output token
    CONTEXT_ONLY = "context_only"  # prefill; KV stays until a decode side has pulled it
    GENERATION_ONLY = "generation_only"  # decode from another instance's KV


_SECONDS_MAX = 1e6  # of a deadline: eleven days; what waits in the kernel takes no more than about 1e9


class ExecutorRole(StrEnum):
    """What an executor is there for; sets `Capabilities.decode` and which calls it gets."""

    BOTH = "both"
    CONTEXT = "context"  # prefill side of a hand-over
    GENERATION = "generation"  # decode side of a hand-over


class CancelMode(StrEnum):
    """How a cancelled call ends. Some builds crash when a streaming call is aborted."""

    ENGINE = "engine"  # the executor is told to stop it
    UNHEARD = "unheard"  # it runs to its end and nobody listens


class Ending(StrEnum):
    """Why a call ended, by the executor's own word."""

    NOT_FINISHED = "not_finished"  # of a context-only call: its request goes on elsewhere
    END_ID = "end_id"
    STOP_WORDS = "stop_words"
    LENGTH = "length"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


class Incident(StrEnum):
    """What went wrong and was survived; counted by an engine and shown in metrics."""

    EXECUTOR_LOST = "executor_lost"  # died, or was ended because it hung
    RESTARTED = "restarted"
    PASS_TIMED_OUT = "pass_timed_out"
    NO_PROGRESS = "no_progress"  # alive, but no iteration and no answer while calls wait
    POOL_LEAKED = "pool_leaked"  # holds KV blocks that no request of ours explains
    DUPLICATE_FIRST_TOKEN = "duplicate_first_token"
    TRANSFER_TIMED_OUT = "transfer_timed_out"  # the KV of a hand-over did not come in time
    EVENTS_LOST = "events_lost"  # a gap in the events of the prefix cache
    EVICTED = "evicted"  # less of a prompt was still cached than its part left there
    SPLIT = "split"  # a pass ran in more than one iteration
    UNHEARD = "unheard"  # a cancelled call was left to run to its end
    BAD_REPORT = "bad_report"  # a report that can't be understood; it was left out


@dataclass(frozen=True, slots=True)
class ContextTicket:
    """What a decode side needs to pull the KV of a finished prefill.

    first_gen_tokens: tokens that prefill gave; the client has them already. context_request_id: the
    executor's own id of the context call. opaque_state: where the KV lies; versioned by the executor's
    exact build, never read here. fingerprint: bundle id of the engine; both sides must have the same.
    """

    first_gen_tokens: tuple[int, ...]
    context_request_id: int
    opaque_state: bytes
    fingerprint: str
    block_tokens: int
    draft_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """One request to an executor.

    call_id: unique in the life of a link. max_tokens: output tokens. priority: of its cached blocks against
    eviction, 0 to 100; None takes the executor's own for new blocks and leaves others as they are.
    priority_s: how long that holds after a block was used last, where a backend can be told; None: for good.
    end_id: the end-of-sequence token; None: ignore it. ticket: of a generation-only call.
    """

    call_id: str
    kind: CallKind
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    end_id: int | None = None
    priority: int | None = None
    priority_s: float | None = None
    ticket: ContextTicket | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Something new of one call.

    tokens: output tokens since the last answer of this call. reused_tokens: prompt tokens that were taken
    from the cache, where the executor says so (it may only with the last answer). error: set, the call is
    over.
    """

    call_id: str
    tokens: tuple[int, ...] = ()
    final: bool = False
    ending: Ending | None = None
    reused_tokens: int | None = None
    ticket: ContextTicket | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration of the executor ran, by its statistics, and its KV pool after it.

    context_tokens: prompt tokens computed. kv_blocks_used: held by live requests, cached ones left out, which
    count as free (read in a source near 1.x, getUsedNumBlocks). What a backend does not tell is None.
    """

    number: int
    context_requests: int
    context_tokens: int
    generation_requests: int
    queued_requests: int | None = None
    active_requests: int | None = None
    latency_s: float | None = None
    kv_blocks_total: int | None = None
    kv_blocks_free: int | None = None
    kv_blocks_used: int | None = None


@dataclass(frozen=True, slots=True)
class CacheStored:
    """Blocks that became reusable: (the executor's own hash, tokens) each, following `parent`.

    The hash is of the tokens and of all before them; a second block of the same content is not told (read in
    a source near 1.x, storeBlocks and enqueueStoredEvent).
    """

    parent: int | None  # the executor's hash of the block before; None: the first of a prompt
    blocks: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class CacheRemoved:
    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheGap:
    """Events of the prefix cache were lost: what is known of it may be wrong from here on."""

    missing: int


@dataclass(frozen=True, slots=True)
class Unread:
    """So many reports of the executor could not be understood and were left out."""

    count: int


Report = Answer | Iteration | CacheStored | CacheRemoved | CacheGap | Unread


@dataclass(frozen=True, slots=True)
class Facts:
    """What an executor says of itself when it is up.

    cache_events: whether it tells what its prefix cache holds. reports_reuse: whether an answer says how much
    was taken from it. iteration_stats: whether it tells what its iterations ran.
    """

    version: str
    kv_blocks_total: int
    block_tokens: int
    cache_events: bool = True
    reports_reuse: bool = True
    iteration_stats: bool = True


class LinkLost(Exception):  # noqa: N818 - what happened
    """The executor is gone, or does not answer. The message says how it ended and what it said last."""


class ExecutorLink(Protocol):
    """A way to one executor. Called from one thread but for `interrupt`; nothing blocks longer than it is
    told to."""

    def start(self) -> Facts:
        """Bring the executor up, or up again after `LinkLost`; what it held before is gone.

        Raises LinkLost when it does not come up in time, `BackendUnavailable` when it never can.
        """

    def enqueue(self, calls: Sequence[Call]) -> None:
        """Hand over all of `calls` at once. Raises LinkLost."""

    def cancel(self, call_id: str) -> None:
        """Tell the executor to stop a call; unknown ids are ignored. It may still answer. Raises LinkLost."""

    def receive(self, timeout_s: float) -> Sequence[Report]:
        """Reports in the order in which they were made; empty after `timeout_s`. Raises LinkLost."""

    def close(self) -> None:
        """End the executor, by force if it does not end by itself. Safe to call twice."""

    def interrupt(self) -> None:
        """From any thread, for good: `start` and `receive` raise LinkLost soon, also those that wait now."""


class BackendUnavailable(Exception):  # noqa: N818 - what happened
    """This backend can't run here: `reason`, and the `remedy`."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class ExecutorSettings:
    """Deadlines and switches of an engine over an executor. Seconds.

    pass_timeout_s: a pass that takes longer has failed. progress_timeout_s: calls wait, and neither an answer
    nor an iteration came for so long: the executor hangs, however healthy its process looks.
    handover_timeout_s: from adopting a ticket to the first token of the decode side. restarts_max within
    restart_window_s: more and the engine is lost. leak_iterations: so many iterations in a row with
    unexplained blocks are a leak.
    """

    cancel: CancelMode = CancelMode.ENGINE
    pass_timeout_s: float = 60.0
    progress_timeout_s: float = 20.0
    handover_timeout_s: float = 5.0
    restarts_max: int = 3
    restart_window_s: float = 600.0
    leak_iterations: int = 50
    eos_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("pass_timeout_s", "progress_timeout_s", "handover_timeout_s", "restart_window_s"):
            value = getattr(self, name)
            if not 0 < value <= _SECONDS_MAX:
                raise ValueError(f"{name} must be above 0 and at most {_SECONDS_MAX:g} s, got {value:g}")
        if self.restarts_max < 0:
            raise ValueError(f"restarts_max must be 0 or more, got {self.restarts_max}")
        if self.leak_iterations < 1:
            raise ValueError(f"leak_iterations must be at least 1, got {self.leak_iterations}")
