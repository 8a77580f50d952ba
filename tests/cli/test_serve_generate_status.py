"""The commands as a user runs them: a served process, questions to it, and what goes wrong in one line."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from service.cli import app

COMMAND = (sys.executable, "-c", "from service.cli import main; main()")
READY = re.compile(r"ready: (\S+) \((\S+)\) on (\S+), metrics http://(\S+)/metrics\n")
START_S_MAX = 60.0


def environment(**more: str) -> dict[str, str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PLASERVE_")}
    return outside | {"PLASERVE_ENGINE__SIMULATED_TIME_SCALE": "0.1"} | more


def line_of(process: subprocess.Popen[str]) -> str:
    """Its next line on standard output, waited for a bounded time."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(START_S_MAX), "nothing was printed"
    return process.stdout.readline()


@contextmanager
def started(*arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs; gone when the block ends."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        (*COMMAND, *arguments), stdout=pipe, stderr=pipe, text=True, env=environment(**more)
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A served simulated engine. In the end SIGTERM must end it with 0 and nothing more on its output."""
    with started("serve", "--backend", "simulated", "--port", "0", "--metrics-port", "0") as process:
        ready = READY.fullmatch(line_of(process))
        assert ready is not None
        assert (ready[1], ready[2]) == ("simulated-h200_32b", "plaserve")
        yield ready[3]
        process.send_signal(signal.SIGTERM)
        rest, log = process.communicate(timeout=20.0)
        assert (process.returncode, rest) == (0, ""), log


def run(*arguments: str, **options: object) -> Result:
    return CliRunner().invoke(app, arguments, env={"NO_COLOR": "1", "COLUMNS": "120"}, **options)


def test_generate_streams_the_answer_and_sums_up_beside_it(address: str) -> None:
    result = run("generate", "What is the capital of France?", "--addr", address, "--max-tokens", "6")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"[a-z]{6}", result.stdout)
    assert re.search(r"\[short lane, \d+ new \+ \d+ cached prompt tokens, 6 generated; .*\]", result.stderr)


def test_generate_reads_standard_input_and_takes_raw_text(address: str) -> None:
    chat = run("generate", "-", "--addr", address, "--max-tokens", "1", input="a b c")
    raw = run("generate", "-", "--raw", "--addr", address, "--max-tokens", "1", input="a b c")
    sizes = [
        int(new) + int(old) for r in (chat, raw) for new, old in re.findall(r"(\d+) new \+ (\d+)", r.stderr)
    ]
    assert sizes == [len("user: a b c\nassistant: "), len("a b c")]


@pytest.mark.parametrize("target", ["0.4s", "400ms", "2"])
def test_generate_takes_a_target(address: str, target: str) -> None:
    assert run("generate", "hi", "--addr", address, "--ttft-slo", target).exit_code == 0


def test_what_is_wrong_with_a_request_is_one_line(address: str) -> None:
    for arguments, words in (
        (("--ttft-slo", "soon"), "--ttft-slo 'soon': write seconds"),
        (("--seed", str(2**64)), "use a smaller number"),
        (("--raw", "--system", "Be brief."), "--system needs the chat template"),
        (("--max-tokens", "999999"), "INVALID_ARGUMENT: max_tokens: is 999999; send at most 2048"),
        (("--temperature", "-1"), "INVALID_ARGUMENT: sampling.temperature: must be from 0"),
    ):
        result = run("generate", "hi", "--addr", address, *arguments)
        assert result.exit_code in (1, 2)
        assert result.stdout == ""
        assert result.stderr.startswith("plaserve: ")
        assert words in result.stderr
        assert result.stderr.count("\n") == 1


def test_status_shows_the_books(address: str) -> None:
    before = json.loads(run("status", "--json", "--addr", address).stdout)
    assert run("generate", "hi", "--addr", address, "--max-tokens", "2").exit_code == 0
    after = json.loads(run("status", "--json", "--addr", address).stdout)
    assert int(after["submittedCount"]) == int(before["submittedCount"]) + 1
    assert sum(map(int, after["outcomeCounts"].values())) == int(after["submittedCount"])
    shown = run("status", "--addr", address).stdout
    for words in (
        "simulated-h200_32b",
        "policy plaserve",
        "serving",
        "completed",
        "short",
        "window W",
        "local",
    ):
        assert words in shown


def test_nothing_listening_says_what_to_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"127.0.0.1:{taken.getsockname()[1]}"
    for command in (("generate", "hi"), ("status",)):
        result = run(*command, "--addr", closed)
        assert result.exit_code == 1
        assert result.stderr == f"plaserve: nothing answers at {closed}; start it with `plaserve serve`\n"


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        (("--backend", "simulated", "--policy", "lifo"), {}, "policy: choose from plaserve, fcfs"),
        (("--backend", "abacus"), {}, "engine.backend: "),
        (("--bundle", "nowhere"), {}, "nowhere"),
        (("--config", "nowhere.toml"), {}, "config file nowhere.toml: No such file"),
        (
            ("--backend", "simulated"),
            {"PLASERVE_SERVER__PROT": "1"},
            "PLASERVE_SERVER__PROT: no such setting",
        ),
        (("--backend", "simulated", "--port", "TAKEN"), {}, "server.port: can't listen on 127.0.0.1:"),
        (
            ("--backend", "simulated", "--port", "0", "--metrics-port", "TAKEN"),
            {},
            "metrics_port: can't listen",
        ),
        (("--backend", "simulated", "--log-level", "loud"), {}, "--log-level 'loud'"),
    ],
)
def test_a_start_that_can_not_be_is_one_line(
    arguments: tuple[str, ...], more: dict[str, str], words: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = [port if argument == "TAKEN" else argument for argument in arguments]
        free = [] if "--metrics-port" in given else ["--metrics-port", "0"]
        ended = subprocess.run(
            (*COMMAND, "serve", *given, *free),
            capture_output=True,
            text=True,
            env=environment(**more),
            cwd=tmp_path,
            timeout=START_S_MAX,
        )
    assert ended.returncode in (1, 2)
    assert ended.stdout == ""
    *log, last = ended.stderr.splitlines()
    assert last.startswith("plaserve: ")
    assert words in last
    assert "Traceback" not in ended.stderr, log


def test_ctrl_c_lets_the_answer_end_and_the_record_is_whole(tmp_path: Path) -> None:
    """SIGINT while a request runs: it is answered, then the process ends with 0."""
    record = tmp_path / "events.jsonl"
    options = ("--backend", "simulated", "--port", "0", "--metrics-port", "0", "--record", str(record))
    with started("serve", *options, PLASERVE_ENGINE__SIMULATED_TIME_SCALE="1.0") as process:
        ready = READY.fullmatch(line_of(process))
        assert ready is not None
        with started("generate", "hi there", "--addr", ready[3], "--max-tokens", "40") as asking:
            limit_s = time.monotonic() + START_S_MAX
            while "PassStarted" not in record.read_text() and time.monotonic() < limit_s:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            answer, _ = asking.communicate(timeout=20.0)
            assert (asking.returncode, len(answer)) == (0, 40)
        _, log = process.communicate(timeout=20.0)
        assert process.returncode == 0, log
    types = {
        json.loads(line)["event"]["type"] for line in record.read_text().splitlines() if '"event"' in line
    }
    assert {"Submit", "PassFinished", "DrainBegan"} <= types


def test_help_names_every_command_and_every_option_is_explained() -> None:
    for command in ("serve", "generate", "status", "build", "demo"):
        assert command in run("--help").stdout
    for command in ("serve", "generate", "status"):
        shown = run(command, "--help").stdout
        explained = re.findall(r"^\W*\*?\s*--[a-z-]+.*$", shown, re.MULTILINE)
        assert explained
        assert all(len(line.split()) > 4 for line in explained)


def test_version_is_that_of_the_package() -> None:
    from importlib import metadata

    assert run("--version").stdout == f"plaserve {metadata.version('plaserve')}\n"
