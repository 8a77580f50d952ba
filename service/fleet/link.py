"""The bookkeeping of a link that survives its streams: whom a worker obeys, and what is sent again.

`Fence` knows the highest (epoch, incarnation, attempt) that a worker has heard of its shard. An epoch is one
scheduler's, an incarnation is one use that it makes of the worker, an attempt is one stream. Epochs of two
shards say nothing about each other, so a scheduler of another shard is refused whatever its epoch.

Of each direction `Outbox` numbers what is sent, from 1, and keeps it until it is acknowledged; `Inbox` takes
each number once. A stream that breaks loses nothing then: the next one begins with what each side has, and
the rest is sent again. Both are bounded, since a link that has been away for long is given up anyway.

No IO and no clock in here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

M = TypeVar("M")
P = TypeVar("P", bound=Message)
SERVICE = "plaserve.v1.WorkerService"
PROTOCOL_VERSION = 1  # of the control stream; raised when an old end would misunderstand a new one
OUTBOX_MAX = 4096  # a worker keeps a handful, as two passes are under way; a scheduler may cancel many
MESSAGE_BYTES_MAX = 256 << 20  # a pass may bring hundreds of new prompts of 100,000 tokens, 3 bytes each
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)  # of both ends


class LinkBroken(Exception):  # noqa: N818 - what happened
    """The two ends can't agree on what was sent; the link can't go on where it was."""


class Outbox(Generic[M]):
    """Numbered messages that are not acknowledged yet, oldest first."""

    def __init__(self, limit: int = OUTBOX_MAX) -> None:
        self._limit = limit
        self._kept: deque[M] = deque()
        self._last = 0  # number of the latest

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def last(self) -> int:
        return self._last

    def add(self, make: Callable[[int], M]) -> M:
        """Keep and return the next message, made from its number. Raises LinkBroken when full."""
        if len(self._kept) >= self._limit:
            raise LinkBroken(f"{self._limit} messages are not acknowledged")
        self._last += 1
        message = make(self._last)
        self._kept.append(message)
        return message

    def acknowledge(self, through: int) -> None:
        """The other side has all up to `through`; less than before is an old word. Raises LinkBroken."""
        if through > self._last:
            raise LinkBroken(f"message {through} is acknowledged, but {self._last} was the last one sent")
        while self._kept and self._last - len(self._kept) < through:
            self._kept.popleft()

    def after(self, through: int) -> tuple[M, ...]:
        """What to send again to a side that has all up to `through`. Raises LinkBroken."""
        self.acknowledge(through)
        first = self._last - len(self._kept)
        if through < first:
            raise LinkBroken(f"messages {through + 1} to {first} were acknowledged and are gone")
        return tuple(self._kept)


class Inbox:
    """Takes each number once, in order."""

    def __init__(self) -> None:
        self.last = 0

    def take(self, sequence: int) -> bool:
        """Whether the message is to be applied; False: it was, earlier. Raises LinkBroken for a gap."""
        if sequence > self.last + 1:
            raise LinkBroken(f"message {sequence} came, but {self.last + 1} is missing")
        if sequence <= self.last:
            return False
        self.last = sequence
        return True


class Claim(StrEnum):
    STALE = "stale"  # somebody newer is obeyed
    RESUME = "resume"  # the same use of the worker, on a new stream
    TAKEOVER = "takeover"  # everything before is over


@dataclass(frozen=True, slots=True)
class Caller:
    """Who says Hello."""

    scheduler_id: str
    epoch: int
    incarnation: int
    attempt: int
    resume: bool = False
    shard: str = ""  # that it schedules; empty: it does not say


class Fence:
    """The highest caller that a worker has heard, of each shard that it was in. shard: its own now; empty
    before it is told."""

    def __init__(self) -> None:
        self.shard = ""
        self._heard: dict[str, Caller] = {}
        self._floor: dict[str, int] = {}

    @property
    def epoch(self) -> int:
        """The least that is obeyed; 0: any, as nobody called yet."""
        now = self._heard.get(self.shard)
        return max(now.epoch if now is not None else 0, self._floor.get(self.shard, 0))

    def move(self, shard: str, epoch: int) -> None:
        """Obey this shard's schedulers from now on, and none of an epoch below `epoch`."""
        self.shard = shard
        self._floor[shard] = max(epoch, self._floor.get(shard, 0))

    def foreign(self, caller: Caller) -> bool:
        """Whether it schedules another shard."""
        return bool(caller.shard and self.shard) and caller.shard != self.shard

    def claim(self, caller: Caller) -> tuple[Claim, str]:
        """What a caller may do, and why not more. Only the highest is remembered."""
        if self.foreign(caller):
            return (
                Claim.STALE,
                f"this worker is of shard {self.shard}, {caller.scheduler_id} of {caller.shard}",
            )
        now = self._heard.get(self.shard)
        if caller.epoch < self._floor.get(self.shard, 0):
            return Claim.STALE, f"epoch {caller.epoch} is over; shard {self.shard} has {self.epoch}"
        if now is not None:
            if caller.epoch < now.epoch:
                return Claim.STALE, f"epoch {caller.epoch} is over; {now.scheduler_id} has epoch {now.epoch}"
            if caller.epoch == now.epoch and caller.scheduler_id != now.scheduler_id:
                return Claim.STALE, f"epoch {caller.epoch} is that of {now.scheduler_id}"
            mine, theirs = (now.incarnation, now.attempt), (caller.incarnation, caller.attempt)
            if caller.epoch == now.epoch and theirs <= mine:
                return Claim.STALE, f"stream {theirs} of epoch {caller.epoch} came after stream {mine}"
        self._heard[self.shard] = caller
        same = now is not None and (now.epoch, now.incarnation) == (caller.epoch, caller.incarnation)
        return (Claim.RESUME if same and caller.resume else Claim.TAKEOVER), ""


def lenient(message: type[P]) -> Callable[[bytes], P | None]:
    """A parser for which bytes that are no message are None, and not the end of the call inside gRPC."""

    def parse(data: bytes) -> P | None:
        try:
            return message.FromString(data)
        except DecodeError:
            return None

    return parse


def as_bytes(message: Message) -> bytes:
    return message.SerializeToString()
