"""Keys and JSON of what membership stores, and nothing else: the one place that knows the spelling.

    /plaserve/<fleet>/members/<id>          under the member's lease
    /plaserve/<fleet>/roles/<worker id>     the wanted role
    /plaserve/<fleet>/number                number of the newest assignment
    /plaserve/<fleet>/moves/<number>        history; the oldest are deleted as new ones come
    /plaserve/<fleet>/elections/<name>      under the leader's lease; its creating revision is the epoch
    /plaserve/<fleet>/retired/<shard>       there while the shard is out of service

Unknown fields are passed over, so that a newer version may add some; a value that lacks one, or that is no
JSON, is reported as unreadable and left out.
"""

from __future__ import annotations

import json
import re
from typing import Any

from service.core.reconcile import MoveReason
from service.core.types import Role
from service.fleet.membership import (
    Assignment,
    Facts,
    Leader,
    Member,
    MemberKind,
    Move,
    RetiredShard,
    RoleReport,
)
from service.fleet.store import Entry

Record = Member | Assignment | Move | Leader | RetiredShard | int

FACTS_BYTES_MAX = 256 * 1024  # etcd takes requests of up to 1.5 MiB by default
_NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")


def check_name(name: str, what: str) -> str:
    """The name, if it may stand in a key. Raises ValueError."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise ValueError(f"{what} must be 1 to 128 letters, digits or . _ : @ -, got {name!r}")
    return name


class Keys:
    """The keys of one fleet."""

    def __init__(self, fleet: str, root: str = "/plaserve") -> None:
        if not root.startswith("/") or root.endswith("/"):
            raise ValueError(f"prefix must begin with / and not end with it, got {root!r}")
        self.prefix = f"{root}/{check_name(fleet, 'fleet')}/"
        self.number = f"{self.prefix}number"

    def member(self, member_id: str) -> str:
        return f"{self.prefix}members/{check_name(member_id, 'member_id')}"

    def role(self, worker_id: str) -> str:
        return f"{self.prefix}roles/{check_name(worker_id, 'worker_id')}"

    def move(self, number: int) -> str:
        return f"{self.prefix}moves/{max(0, number):020d}"

    def election(self, name: str) -> str:
        return f"{self.prefix}elections/{check_name(name, 'election')}"

    def retired(self, shard: str) -> str:
        return f"{self.prefix}retired/{check_name(shard, 'shard')}"

    def split(self, key: str) -> tuple[str, str]:
        """(members | roles | moves | elections | retired | number, name)."""
        group, _, name = key.removeprefix(self.prefix).partition("/")
        return group, name


def check_facts(facts: Facts) -> None:
    """Raises ValueError when they are no JSON object, or too large."""
    try:
        text = json.dumps(dict(facts), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"facts must be JSON (str keys; numbers, text, lists, objects): {error}") from None
    if json.loads(text) != _plain(facts):
        raise ValueError("facts must be JSON with str keys")
    if len(text) > FACTS_BYTES_MAX:
        raise ValueError(
            f"facts take {len(text)} bytes, at most {FACTS_BYTES_MAX}; put a digest or an address"
        )


def _plain(value: Any) -> Any:
    """Tuples as lists, any mapping as a dict: what JSON gives back."""
    if isinstance(value, dict) or hasattr(value, "keys"):
        return {key: _plain(value[key]) for key in value}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _dump(fields: dict[str, Any]) -> str:
    return json.dumps(fields, allow_nan=False, separators=(",", ":"))


def encode_member(member: Member) -> str:
    report = member.report
    return _dump(
        {
            "kind": member.kind,
            "address": member.address,
            "shard": member.shard,
            "facts": _plain(member.facts),
            "joined_time_s": member.joined_time_s,
            "report": report
            and {"role": report.role, "number": report.number, "at_time_s": report.at_time_s},
        }
    )


def encode_assignment(assignment: Assignment) -> str:
    return _dump(
        {
            "role": assignment.role,
            "reason": assignment.reason,
            "by": assignment.by,
            "number": assignment.number,
            "pinned": assignment.pinned,
            "at_time_s": assignment.at_time_s,
            "shard": assignment.shard,
        }
    )


def encode_move(move: Move) -> str:
    return _dump(
        {
            "worker_id": move.worker_id,
            "from_role": move.from_role,
            "to_role": move.to_role,
            "reason": move.reason,
            "by": move.by,
            "at_time_s": move.at_time_s,
            "facts": _plain(move.facts),
            "from_shard": move.from_shard,
            "to_shard": move.to_shard,
        }
    )


def encode_retired(shard: RetiredShard) -> str:
    return _dump({"by": shard.by, "at_time_s": shard.at_time_s})


def encode_leader(candidate: str, at_time_s: float) -> str:
    return _dump({"candidate": candidate, "at_time_s": at_time_s})


def decode(group: str, name: str, entry: Entry) -> Record:
    """What an entry says. Raises ValueError when it can't be read."""
    try:
        value = json.loads(entry.value)
        if group == "number":
            return int(value)
        record: Record = _DECODERS[group](name, value, entry)
        return record
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{group}/{name}: {error!r}") from None


def _member(name: str, value: dict[str, Any], entry: Entry) -> Member:
    report = value.get("report")
    return Member(
        member_id=name,
        kind=MemberKind(value["kind"]),
        address=str(value["address"]),
        shard=str(value.get("shard", "")),
        facts=dict(value.get("facts") or {}),
        report=report
        and RoleReport(Role(report["role"]), int(report["number"]), float(report.get("at_time_s", 0.0))),
        joined_time_s=float(value.get("joined_time_s", 0.0)),
        incarnation=entry.created,
    )


def _assignment(name: str, value: dict[str, Any], _entry: Entry) -> Assignment:
    return Assignment(
        worker_id=name,
        role=Role(value["role"]),
        reason=MoveReason(value["reason"]),
        by=str(value["by"]),
        number=int(value["number"]),
        pinned=bool(value.get("pinned", False)),
        at_time_s=float(value.get("at_time_s", 0.0)),
        shard=str(value.get("shard", "")),
    )


def _move(name: str, value: dict[str, Any], _entry: Entry) -> Move:
    came_from = value.get("from_role")
    return Move(
        number=int(name),
        worker_id=str(value["worker_id"]),
        from_role=None if came_from is None else Role(came_from),
        to_role=Role(value["to_role"]),
        reason=MoveReason(value["reason"]),
        by=str(value["by"]),
        at_time_s=float(value.get("at_time_s", 0.0)),
        facts=dict(value.get("facts") or {}),
        from_shard=str(value.get("from_shard", "")),
        to_shard=str(value.get("to_shard", "")),
    )


def _retired(name: str, value: dict[str, Any], _entry: Entry) -> RetiredShard:
    return RetiredShard(name, str(value["by"]), float(value.get("at_time_s", 0.0)))


def _leader(name: str, value: dict[str, Any], entry: Entry) -> Leader:
    return Leader(
        election=name,
        candidate=str(value["candidate"]),
        epoch=entry.created,
        at_time_s=float(value.get("at_time_s", 0.0)),
    )


_DECODERS: dict[str, Any] = {
    "members": _member,
    "roles": _assignment,
    "moves": _move,
    "elections": _leader,
    "retired": _retired,
}
