"""Run a step of `inside` in TensorRT-LLM's interpreter, and say clearly how it went.

That interpreter gets two packages of this project, `engines` and `build_scripts`, through a folder of links
and nothing else: the service's own environment on its path would shadow numpy and pydantic, which
TensorRT-LLM pins otherwise. What the process says goes to a log whole; of a failed one the last lines are
shown. It has a session of its own, so that a time limit or an interrupt ends what it started too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import build_scripts
import engines
from build_scripts.spec import BuildError
from build_scripts.trtllm.inside import PROGRESS

SHOWN_LINES = 30
_END_S = 10.0  # for a process that was told to end
_LINE_CHARS_MAX = 4_096  # progress bars without line breaks can fill a pipe with one line
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")

Update = Callable[[float, str], None]  # share of the step that is through, words


def link_packages(folder: Path) -> Path:
    """A folder that holds links to what the other interpreter may import. Safe to call again."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in (engines, build_scripts):
        assert package.__file__ is not None
        source, link = Path(package.__file__).resolve().parent, folder / package.__name__
        if not link.is_symlink() or link.resolve() != source:
            link.unlink(missing_ok=True)
            link.symlink_to(source, target_is_directory=True)
    return folder


def run_inside(
    python: Path,
    step: str,
    request: Mapping[str, Any],
    *,
    scratch: Path,
    log: Path,
    timeout_s: float,
    update: Update = lambda share, words: None,
) -> dict[str, Any]:
    """The answer of one step. Raises BuildError saying what failed, what to do, and what was said last.

    scratch: a folder for request, answer and links. log: what the process says, written anew.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    result, asked = scratch / f"{log.stem}.result.json", scratch / f"{log.stem}.request.json"
    result.unlink(missing_ok=True)
    asked.write_text(json.dumps({**request, "result": str(result)}, indent=2) + "\n", encoding="utf-8")
    # It runs in another folder; a name without a folder is looked for on PATH. Links stay: a virtual
    # environment's interpreter is known by where it lies.
    interpreter = python.absolute() if len(python.parts) > 1 else python
    command = [str(interpreter), "-m", "build_scripts.trtllm.inside", step, str(asked)]
    environment = _environment(link_packages(scratch / "path"))
    status, last = _run(command, scratch, environment, log, timeout_s, update)
    answer = _answer(result)
    if answer is not None and answer["ok"] and status == 0:
        return answer
    if answer is not None and not answer["ok"]:
        said = f"{answer['reason']}; {answer['remedy']}"
    elif status is None:
        said = f"it did not end within {timeout_s:.0f} s; look for what it waits for, or raise the limit"
    else:
        short = "; so the kernel ends what takes more memory than the host has" if status == -9 else ""
        said = f"the process ended with {_status(status)} and no answer{short}; read its log"
    raise BuildError(f"{log.stem}: {said}\n{_shown(last, log)}")


def _environment(path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    return {**kept, "PYTHONPATH": str(path), "PYTHONUNBUFFERED": "1"}


def _run(
    command: list[str], folder: Path, environment: dict[str, str], log: Path, timeout_s: float, update: Update
) -> tuple[int | None, list[str]]:
    """(exit status, last lines) of a command run in `folder`, which is first on its path.

    The status is None for a process that was ended for its time.
    """
    last: deque[str] = deque(maxlen=SHOWN_LINES)
    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(
            f"{command[0]} can't be run: {error.strerror or error}; give the interpreter of the environment "
            "that has tensorrt_llm"
        ) from None
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, log, last, update), daemon=True)
    reader.start()
    try:
        status: int | None = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        _end(process)
        reader.join(_END_S)
        if reader.is_alive():  # something that the process started lives on and holds the pipe
            _signal(process, signal.SIGKILL)
            reader.join(_END_S)
    return status, list(last)


def _read(stream: IO[str], log: Path, last: deque[str], update: Update) -> None:
    with stream, log.open("w", encoding="utf-8") as file:
        while line := stream.readline(_LINE_CHARS_MAX):
            if line.startswith(PROGRESS):
                share, words = _progress(line)
                if share is not None:
                    update(share, words)
                    continue
            file.write(line if line.endswith("\n") else line + "\n")
            file.flush()
            last.append(line.rstrip())


def _progress(line: str) -> tuple[float | None, str]:
    _, _, rest = line.partition(" ")
    share, _, words = rest.strip().partition(" ")
    try:
        return min(1.0, max(0.0, float(share))), words
    except ValueError:
        return None, ""


def _end(process: subprocess.Popen[str]) -> None:
    """End the process and all that it started (its group is named by its own id)."""
    if process.poll() is not None:
        return
    for ask in (signal.SIGTERM, signal.SIGKILL):
        _signal(process, ask)
        try:
            process.wait(_END_S)
            break
        except subprocess.TimeoutExpired:
            continue


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _answer(path: Path) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("ok"), bool) else None


def _status(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _shown(last: list[str], log: Path) -> str:
    if not last:
        return f"(it said nothing; log: {log})"
    return "\n".join([f"last lines of {log}:", *(f"  {line}" for line in last)])
