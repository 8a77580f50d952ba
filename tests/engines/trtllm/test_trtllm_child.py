"""Real child processes that live, hang, die and talk nonsense: each end is told, nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from child_rig import CONFIG, Make, call, hear, hear_the_end

from engines.executor.types import (
    Answer,
    BackendUnavailable,
    CallKind,
    Ending,
    Iteration,
    LinkLost,
    Report,
)
from engines.trtllm_link import ChildLink
from engines.trtllm_process import ChildSettings


def test_a_child_says_what_it_is_and_answers(make: Make) -> None:
    link = make()
    facts = link.start()
    assert (facts.version, facts.kv_blocks_total, facts.block_tokens) == ("1.2.1", 100, 32)
    assert link.receive(0.0) == []
    link.enqueue([call("a"), call("b", 400, 1, CallKind.CONTEXT_ONLY)])
    heard = hear(link, 2)
    assert isinstance(heard[0], Iteration), "statistics come before the answers of their moment"
    assert heard[0].context_tokens == 440
    answers = [report for report in heard if isinstance(report, Answer)]
    assert [token for answer in answers if answer.call_id == "a" for token in answer.tokens] == [
        100,
        101,
        102,
    ]
    assert [a.ending for a in answers if a.final] == [Ending.LENGTH, Ending.NOT_FINISHED]
    ticket = answers[-1].ticket
    assert ticket is not None
    assert (ticket.first_gen_tokens, ticket.opaque_state, ticket.block_tokens) == ((100,), b"where", 32)


def test_receive_waits_no_longer_than_told(make: Make) -> None:
    """Ten waits of 20 ms end; a receive that waits for something would time the test out."""
    link = make("hang")
    link.start()
    link.enqueue([call("a")])
    assert [link.receive(0.02) for _ in range(10)] == [[]] * 10


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_child_is_lost_by_name_and_starts_again(make: Make, number: signal.Signals) -> None:
    link = make()
    link.start()
    first = link.pid
    assert first is not None
    os.kill(first, number)
    text = hear_the_end(link)
    assert f"child {first}" in text
    assert number.name in text
    assert "stub of TensorRT-LLM 1.2.1" in text, "its last lines are shown"
    for act in (lambda: link.receive(0.0), lambda: link.enqueue([]), lambda: link.cancel("a")):
        with pytest.raises(LinkLost):
            act()
    link.start()
    assert link.pid not in (None, first)
    link.enqueue([call("again")])
    assert hear(link, 1)


def test_what_was_heard_before_the_end_is_told_before_it(make: Make) -> None:
    link = make("segfault_on_cancel")
    link.start()
    link.enqueue([call("a")])
    link.cancel("unknown")  # ignored: the executor is not even asked
    link.enqueue([call("b", max_tokens=1)])
    time.sleep(0.3)
    assert link.pid is not None
    os.kill(link.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert {r.call_id for r in hear(link, 2) if isinstance(r, Answer)} == {"a", "b"}
    hear_the_end(link)


def test_a_crash_on_cancel_is_lost_with_what_it_printed(make: Make) -> None:
    link = make("segfault_on_cancel")
    link.start()
    link.enqueue([call("a", max_tokens=1_000)])
    link.enqueue([call("b", max_tokens=1_000)])
    for name in ("a", "b") * 50:  # one of them is caught while it is known
        try:
            link.cancel(name)
            link.enqueue([call(name, max_tokens=1_000)])
        except LinkLost:
            break
    text = hear_the_end(link)
    assert "SIGSEGV" in text
    assert "Signal: Segmentation fault" in text


def test_garbage_is_a_lost_link_that_shows_it(make: Make) -> None:
    link = make("garbage")
    link.start()
    pid = link.pid
    link.enqueue([call("a")])
    text = hear_the_end(link)
    assert "garbage" in text
    assert "half a mess" in text
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # a child that talks nonsense does not live on


def test_a_child_whose_fork_holds_its_socket_is_lost_all_the_same(make: Make) -> None:
    link = make("fork_and_die")
    link.start()
    link.enqueue([call("a")])
    assert "exit code 9" in hear_the_end(link)


def test_a_child_that_dies_at_its_start(make: Make) -> None:
    with pytest.raises(LinkLost, match=r"exit code 7(.|\n)*out of luck"):
        make("die_at_start").start()


def test_a_start_that_takes_too_long_is_ended(make: Make) -> None:
    link = make("slow_start", start_timeout_s=0.6)
    with pytest.raises(LinkLost, match=r"did not come up in 0\.6 s"):
        link.start()
    assert link.pid is None


def test_a_pool_that_is_smaller_than_asked_says_both_numbers(make: Make) -> None:
    with pytest.raises(BackendUnavailable, match=r"90 KV blocks .* not 100"):
        make("fewer_blocks").start()


def test_blocks_of_another_size_are_refused(make: Make) -> None:
    with pytest.raises(BackendUnavailable, match="hold 8 tokens, the bundle says 32"):
        make("other_blocks").start()


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("0.17.0", "upgrade"),
        ("1.4.0", "trtllm_torch"),
        ("1.2.0", "build the bundle again"),
        ("main", "1.2.1"),
    ],
)
def test_other_versions_are_refused_with_the_remedy(make: Make, version: str, remedy: str) -> None:
    with pytest.raises(BackendUnavailable) as refused:
        make(version=version).start()
    assert version in refused.value.reason
    assert remedy in refused.value.remedy


def test_no_tensorrt_llm_at_all(make: Make) -> None:
    link = ChildLink(CONFIG, Path(sys.executable), ChildSettings(start_timeout_s=30.0))
    with pytest.raises(BackendUnavailable, match="can't be imported") as refused:
        link.start()
    assert sys.executable in refused.value.reason


def test_no_interpreter(make: Make, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="can't be started"):
        ChildLink(CONFIG, tmp_path / "python", ChildSettings()).start()


def test_one_refused_call_does_not_hurt_the_others(make: Make) -> None:
    link = make("refuse")
    link.start()
    link.enqueue([call("long", 101), call("short", 5)])
    answers = [r for r in hear(link, 2) if isinstance(r, Answer)]
    errors = {answer.call_id: answer.error for answer in answers if answer.final}
    assert "exceeds maximum 100" in (errors["long"] or "")
    assert errors["short"] is None


@pytest.mark.parametrize(("vice", "waits_in"), [("slow_start", "start"), ("hang", "receive")])
def test_who_waits_for_a_child_is_told_that_the_service_ends(make: Make, vice: str, waits_in: str) -> None:
    link, told = make(vice), []
    if waits_in == "receive":
        link.start()
        link.enqueue([call("a")])

    def wait() -> None:
        try:
            while True:
                link.start() if waits_in == "start" else link.receive(60.0)
        except LinkLost as lost:
            told.append(str(lost))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while link.pid is None:
        time.sleep(0.01)
    link.interrupt()
    waiting.join(20.0)
    assert ["the service is stopping" in text for text in told] == [True]
    assert link.pid is None
    with pytest.raises(LinkLost, match="the service is stopping"):
        link.start()


@pytest.mark.parametrize("vice", ["hang_at_end", "hang"])
def test_an_executor_that_does_not_end_is_ended(make: Make, vice: str) -> None:
    link = make(vice, close_grace_s=0.3)
    link.start()
    link.enqueue([call("a")])
    time.sleep(0.1)
    pid = link.pid
    assert pid is not None
    link.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_stopped_child_can_be_closed(make: Make) -> None:
    link = make(close_grace_s=0.2)
    link.start()
    assert link.pid is not None
    os.kill(link.pid, signal.SIGSTOP)
    link.close()
    assert link.pid is None
    link.close()


def test_a_stopped_child_that_takes_no_message_is_lost(make: Make) -> None:
    link = make(send_timeout_s=0.3)
    link.start()
    assert link.pid is not None
    os.kill(link.pid, signal.SIGSTOP)
    calls = [call("a", tokens=2_000_000)]  # more than a socket holds
    with pytest.raises(LinkLost, match=r"took no message for 0\.3 s"):
        link.enqueue(calls)


def test_processes_of_the_child_end_with_it(make: Make, tmp_path: Path) -> None:
    link = make("grandchild", log=tmp_path / "child.log")
    link.start()
    link.close()
    text = (tmp_path / "child.log").read_text()
    left = int(text.split("left behind ")[1].split()[0])
    deadline = time.monotonic() + 5
    while _runs(left) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(left)


def test_an_output_that_a_process_of_the_child_holds_is_left_to_it(make: Make) -> None:
    """It can't be waited for; what reads it ends with it, and fails not."""
    link = make("escaped_grandchild", close_grace_s=0.2)
    link.start()
    readers = {thread for thread in threading.enumerate() if thread.name == "trtllm-keeper"}
    link.close()
    for reader in readers:
        reader.join(20.0)
        assert not reader.is_alive()


def test_a_child_that_prints_without_end_fills_no_memory_and_no_disk(make: Make, tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    link = make("flood", printed_bytes=10_000, log=log, log_bytes=200_000)
    link.start()
    for name in "abc":
        link.enqueue([call(name, max_tokens=1)])
        heard: list[Report] = []
        while not any(isinstance(report, Answer) for report in heard):
            heard += link.receive(5.0)
    child = link._child
    assert child is not None
    assert sum(map(len, child._printed)) <= 10_000 + 65_536  # and the last read
    assert sum(path.stat().st_size for path in tmp_path.glob("child.log*")) <= 2 * 200_000 + 65_536
    assert child.last_lines(2).splitlines()[-1].strip("x") == ""


def test_after_the_greeting_half_a_message_may_take_any_time(make: Make) -> None:
    link = make()
    link.start()
    assert link._child is not None
    assert link._child._connection is not None
    with socket.socket(fileno=os.dup(link._child._connection.fileno())) as its:
        assert set(its.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)) == {0}
        assert set(its.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)) != {0}


def _runs(pid: int) -> bool:
    """Whether it runs; a zombie that waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_ends_with_its_parent(stub: Path, tmp_path: Path, stopped: bool) -> None:
    """A parent that is killed says nothing; its child ends all the same, hanging or even stopped."""
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import sys, time\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[1])\n"
        "from child_rig import CONFIG, call\nfrom engines.trtllm_link import ChildLink\n"
        "from engines.trtllm_process import ChildSettings\n"
        "env = {'PYTHONPATH': sys.argv[2], 'STUB_VICE': 'hang'}\n"
        "link = ChildLink(CONFIG, Path(sys.executable), ChildSettings(environment=env))\n"
        "link.start()\nlink.enqueue([call('a')])\nprint(link.pid, flush=True)\ntime.sleep(60)\n"
    )
    here = Path(__file__).parent
    root = here.parents[2]
    with subprocess.Popen(
        [sys.executable, str(parent), str(here), str(stub)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert _runs(child)
        if stopped:  # no thread of it can see the end of the socket
            os.kill(child, signal.SIGSTOP)
        process.kill()
    deadline = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(child)


def test_the_child_sees_engines_and_nothing_else_of_this_environment(
    stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an interpreter that has no site packages, started in a directory that has other `engines`."""
    (tmp_path / "engines.py").write_text("raise SystemExit('not these')")
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    settings = ChildSettings(start_timeout_s=30.0, environment={"PYTHONPATH": str(stub)})
    link = ChildLink(CONFIG, python, settings)
    assert link.start().version == "1.2.1"
    link.close()


def test_only_what_a_gpu_process_needs_of_the_environment_is_passed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    link = make()
    link.start()
    assert link.pid is not None
    raw = Path(f"/proc/{link.pid}/environ").read_bytes().decode()
    environment = dict(item.split("=", 1) for item in raw.split("\0") if item)
    assert "AWS_SECRET_ACCESS_KEY" not in environment
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_what_is_printed_is_kept_in_bounds(make: Make, tmp_path: Path) -> None:
    link = make(printed_bytes=64, log=tmp_path / "logs" / "child.log", log_bytes=1_000)
    link.start()
    link.close()
    assert "stub of TensorRT-LLM" in (tmp_path / "logs" / "child.log").read_text()
