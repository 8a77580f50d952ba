"""The laws of a chaos run on real processes, each one sentence. Each function returns those that were broken.

What is right is known beforehand: the simulated engine's tokens are a hash of prompt and position, so they
are the same on every worker, in every run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines.simulated_requests import Live
from engines.simulated_settings import h200_32b_like
from engines.types import EngineRequest
from service.bench.chaos_clients import ANSWER_S_MAX, Heard
from service.bench.chaos_faults import Span
from service.bench.chaos_plan import RealSchedule
from service.bench.chaos_watch import ChaosWatch
from service.bench.fleet_figures import life_faults, scheduler_faults
from service.bench.fleet_rig import FleetRig, Kind
from service.rpc.text import ByteCodec
from service.sim.chaos_schedule import Ask

EXPECTED = ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED")
TRACE_LINES = 12
WAIT_S_MAX = 12.0  # a lease, the election, the rest of a pass, and what has queued up meanwhile
FAILOVER_S = 10.0  # how long a front end lets requests wait for a scheduler, which needs etcd
RESEND_RATIO = 2.0  # TCP sends again after pauses that double: up to so many times the cut


def right_tokens(text: str, count: int) -> list[int]:
    """What the engine answers to a prompt."""
    capabilities, _, _ = h200_32b_like()
    ids = tuple(ByteCodec().encode(text))
    live = Live.of(EngineRequest("any", ids, count), capabilities.block_tokens)
    tokens: list[int] = []
    for index in range(count):
        live.position = len(ids) + index
        tokens.append(live.next_token(None))
    return tokens


def client_laws(heard: Sequence[Heard], asks: Sequence[Ask]) -> list[str]:
    """Each request has one end: all of its tokens and a summary, or a status that it may have."""
    broken: list[str] = []
    ends = Counter(each.name for each in heard)
    missing = [f"r{n}" for n in range(len(asks)) if f"r{n}" not in ends]
    broken += [f"{name} never ended" for name in missing]
    broken += [f"{name} ended {count} times" for name, count in ends.items() if count != 1]
    for each in heard:
        broken += [f"{each.name}: {fault}" for fault in (*_end(each), *_tokens(each))]
    return broken


def _end(heard: Heard) -> list[str]:
    found: list[str] = []
    if heard.ends != 1:
        found.append(f"{heard.ends} ends instead of one")
    if heard.status not in EXPECTED:
        found.append(f"ended as {heard.status or 'nothing'}: {heard.detail}")
    if heard.status == "CANCELLED" and not heard.went:
        found.append(f"cancelled, and its client did not go: {heard.detail}")
    if heard.status == "DEADLINE_EXCEEDED" and heard.ask.deadline_s is None:
        found.append(f"not answered within {ANSWER_S_MAX:g} s ({len(heard.tokens)} tokens came)")
    if heard.whole and len(heard.summaries) != 1:
        found.append(f"answered with {len(heard.summaries)} summaries")
    if not heard.whole and heard.summaries and not heard.went and heard.ask.deadline_s is None:
        found.append(f"had its summary and ended as {heard.status}")
    return found


def _tokens(heard: Heard) -> list[str]:
    """No token is wrong, comes twice, out of order or after the end; who is answered has all."""
    found: list[str] = []
    right = right_tokens(heard.text, heard.ask.answer_tokens)
    if heard.tokens != right[: len(heard.tokens)]:
        found.append(f"tokens {heard.tokens}, right are {right}")
    if heard.whole and len(heard.tokens) != len(right):
        found.append(f"answered with {len(heard.tokens)} tokens of {len(right)}")
    if heard.tokens_late:
        found.append(f"{heard.tokens_late} tokens after the summary")
    for summary in heard.summaries:
        told = summary.output_token_count, summary.prompt_token_count
        if told != (len(right), len(heard.text)):
            found.append(f"its summary counts {told} tokens, right are {(len(right), len(heard.text))}")
    return found


def wait_laws(heard: Sequence[Heard], schedule: RealSchedule, front_ends: Mapping[str, str]) -> list[str]:
    """Nobody waits longer than a fail-over takes, whatever stands still, but for a front end that does.

    front_ends: address -> name. Clients that went away or had a deadline are not asked.
    """
    own: dict[str, float] = defaultdict(float)
    for fault in schedule.faults:
        ratio = RESEND_RATIO if fault.how == "network" else 1.0
        own[fault.target] += ratio * fault.for_s
    without_etcd = any("etcd" in (fault.target, fault.how) for fault in schedule.faults)
    found: list[str] = []
    for each in heard:
        stood_s = own[front_ends.get(each.address, "")] + own["all"] + own["etcd"]
        bound_s = WAIT_S_MAX + stood_s + (FAILOVER_S if without_etcd else 0.0)
        waited_s = each.end_s - each.send_s
        if waited_s > bound_s and not each.went and each.ask.deadline_s is None:
            found.append(
                f"{each.name}: waited {waited_s:.1f} s for {each.status}, the bound is {bound_s:.1f} s"
            )
    return found


def calm_laws(heard: Sequence[Heard]) -> list[str]:
    """Without faults nobody fails."""
    bad = [each for each in heard if each.status not in ("OK", "CANCELLED", "DEADLINE_EXCEEDED")]
    return [f"{each.name}: {each.status} without any fault: {each.detail}" for each in bad]


def book_laws(watch: ChaosWatch, heard: Sequence[Heard], spans: Mapping[tuple[str, int], Span]) -> list[str]:
    """At every look the books of each process balance; at the end they agree with the clients."""
    addresses = {part.name: part.address for part in watch.rig.of(Kind.FRONTEND)}
    seen = [each.observation() for each in heard]
    return [
        *watch.faults,
        *life_faults(watch.lives, addresses, spans, seen),
        *scheduler_faults(watch.lives, watch.active),
    ]


def held_laws(watch: ChaosWatch) -> list[str]:
    """When nobody asks for anything, no front end and no scheduler has a request, no engine holds KV."""
    found: list[str] = []
    for (name, number), life in watch.lives.items():
        now = watch.rig.parts[name].lives == number
        if now and (life.books.queued or life.books.running) and name != watch.active:
            standby = watch.rig.parts[name].kind is Kind.SCHEDULER
            found += [] if standby else [f"{name} holds {life.books.queued} + {life.books.running} requests"]
    status = watch.status
    if status.queued_count or status.running_count:
        found.append(f"{watch.active} holds {status.queued_count} + {status.running_count} requests")
    for each in status.instances:
        held = each.kv_blocks_total - each.kv_blocks_free - each.kv_blocks_cached
        if held or each.decoding_count:
            found.append(f"{each.instance_id}: {held} blocks of KV are held, {each.decoding_count} decode")
    return found


def process_laws(rig: FleetRig) -> list[str]:
    """Asked at the end, after they were stopped: no process failed, and each ended when it was told to."""
    found: list[str] = []
    for part in rig.parts.values():
        code = part.process.returncode if part.process is not None else 0
        if part.hard:
            found.append(f"{part.name} did not end on SIGTERM and was killed")
        elif code and not part.killed:
            found.append(f"{part.name} ended with {code}: {part.tail()}")
        text = part.log.read_text(encoding="utf-8", errors="replace")
        if "Traceback (most recent call last)" in text:
            lines = text.splitlines()
            at = next(i for i, line in enumerate(lines) if line.startswith("Traceback"))
            told = "\n".join(lines[max(0, at - 1) :][:TRACE_LINES])
            found.append(f"{part.name} had an exception that nobody expected: {told}")
    return found


def left_running(folder: Path) -> list[str]:
    """Nobody is left: processes whose output still goes to a file below `folder` (Linux)."""
    found: list[str] = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                target = (each / "fd" / "1").readlink()
            except OSError:
                continue
            if str(target).startswith(f"{folder.resolve()}/"):
                found.append(f"process {each.name} still runs, output to {target.name}")
    return found
