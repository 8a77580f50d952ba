"""Steps that run in another interpreter: what is asked, what is answered, how failures look.

The packages here are stand-ins of a few lines; test_trtllm_runner.py has the whole pipeline against the fake
of the real surface."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build_scripts.spec import BuildError
from build_scripts.trtllm import launch
from build_scripts.trtllm.checkpoint import (
    CheckpointError,
    check_checkpoint,
    hashes,
    licence_of,
    stamps,
)
from build_scripts.trtllm.launch import SHOWN_LINES, link_packages, run_inside
from build_scripts.trtllm.text import read_text
from tests.build_scripts import trtllm_machine as machine


def _python(tmp_path: Path, modules: dict[str, str]) -> Path:
    """An environment with these modules: dotted name -> text."""
    folder = tmp_path / "packages"
    for name, text in modules.items():
        *parents, last = name.split(".")
        place = folder.joinpath(*parents)
        place.mkdir(parents=True, exist_ok=True)
        for depth in range(len(parents)):
            (folder.joinpath(*parents[: depth + 1]) / "__init__.py").touch()
        if last == "":
            place.joinpath("__init__.py").write_text(textwrap.dedent(text))
        else:
            place.joinpath(f"{last}.py").write_text(textwrap.dedent(text))
    return machine.write_python(tmp_path / "env", [folder])


def _run(tmp_path: Path, python: Path, step: str = "versions", **options: Any) -> dict[str, Any]:
    """One step in `python`, whose log is convert.log."""
    request: dict[str, Any] = options.pop("request", {})
    return run_inside(
        python,
        step,
        request,
        scratch=tmp_path / "scratch",
        log=tmp_path / "logs" / "convert.log",
        timeout_s=options.pop("timeout_s", 20.0),
        **options,
    )


def test_versions_are_those_that_are_imported(tmp_path: Path) -> None:
    python = _python(
        tmp_path, {"tensorrt_llm": "__version__ = '1.2.1'", "tensorrt": "__version__ = '10.14.1.48'"}
    )
    answer = _run(tmp_path, python)
    assert (answer["tensorrt_llm"], answer["tensorrt"]) == ("1.2.1", "10.14.1.48")
    assert answer["python"] == ".".join(map(str, sys.version_info[:3]))
    assert answer["torch"] is None  # not in that environment, though it may be in this one


@pytest.mark.parametrize(
    ("version", "said"), [("0.17.0", "upgrade"), ("1.4.0", "trtllm_torch"), ("1.2.0rc7", "1.2.1")]
)
def test_other_versions_are_refused_with_the_way_out(tmp_path: Path, version: str, said: str) -> None:
    python = _python(
        tmp_path, {"tensorrt_llm": f"__version__ = '{version}'", "tensorrt": "__version__ = '10.0'"}
    )
    with pytest.raises(BuildError, match=rf"convert: .*{version}.*{said}"):
        _run(tmp_path, python)


def test_only_this_projects_packages_are_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the service has installed must not shadow what TensorRT-LLM pins."""
    code = """
        import importlib.util, sys
        found = [name for name in ("pydantic", "pytest", "service") if importlib.util.find_spec(name)]
        assert importlib.util.find_spec("engines") and importlib.util.find_spec("build_scripts")
        raise ImportError(f"found {found}")
    """
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with pytest.raises(BuildError, match=r"found \[\]"):
        _run(tmp_path, _python(tmp_path, {"tensorrt_llm": code, "tensorrt": ""}))


def test_the_links_follow_the_project(tmp_path: Path) -> None:
    folder = link_packages(tmp_path / "path")
    (folder / "engines").unlink()
    (folder / "engines").symlink_to(tmp_path)
    link_packages(folder)
    assert (folder / "engines" / "base.py").is_file()
    assert sorted(path.name for path in folder.iterdir()) == ["build_scripts", "engines"]


def test_a_failure_names_reason_remedy_and_the_last_lines(tmp_path: Path) -> None:
    code = f"""
        for line in range({2 * SHOWN_LINES}):
            print("line", line)
        raise ImportError("libcuda.so.1: cannot open shared object file")
    """
    python = _python(tmp_path, {"tensorrt": "", "tensorrt_llm": code})
    with pytest.raises(BuildError) as error:
        _run(tmp_path, python)
    text = str(error.value)
    assert text.startswith("convert: ")
    assert "libcuda.so.1" in text
    assert "on a machine with its GPU" in text
    shown = text.split("last lines of")[1].splitlines()[1:]
    assert len(shown) == SHOWN_LINES
    assert "Traceback" in "\n".join(shown)
    log = (tmp_path / "logs" / "convert.log").read_text()
    assert all(f"line {n}\n" in log for n in range(2 * SHOWN_LINES))
    assert str(tmp_path / "logs" / "convert.log") in text


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; print('so far', flush=True); os.kill(os.getpid(), 11)", "signal SIGSEGV"),
        ("import os; os._exit(7)", "status 7"),
        ("import os; os.kill(os.getpid(), 9)", "signal SIGKILL and no answer.*memory.*host"),
        ("raise RuntimeError('CUDA error: out of memory')", "smaller pass_tokens_max"),
        ("raise OSError(28, 'No space left on device')", "free space"),
        ("raise TypeError(\"got an unexpected keyword argument 'cat'\")", "'cat'.*exact version"),
    ],
)
def test_every_way_to_end_is_told_apart(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(BuildError, match=f"(?s)convert: .*{said}"):
        _run(tmp_path, _python(tmp_path, {"tensorrt": "", "tensorrt_llm": code}))


@pytest.mark.parametrize("end", ["os.abort()", "time.sleep(600)"])
def test_libraries_that_fail_when_the_interpreter_ends_do_not_undo_a_step(tmp_path: Path, end: str) -> None:
    code = f"""
        import atexit, os, time
        atexit.register(lambda: {end})
        __version__ = "1.2.1"
    """
    python = _python(tmp_path, {"tensorrt": "__version__ = '10.0'", "tensorrt_llm": code})
    assert _run(tmp_path, python)["tensorrt_llm"] == "1.2.1"


def test_an_answer_of_an_earlier_run_is_never_taken_for_one(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "convert.result.json").write_text('{"ok": true}')
    python = _python(tmp_path, {"tensorrt": "", "tensorrt_llm": "import os; os._exit(0)"})
    with pytest.raises(BuildError, match="status 0 and no answer"):
        _run(tmp_path, python)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10.0
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


SLEEPER = """
    import subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("@progress 0.5 child", child.pid, flush=True)
    time.sleep(600)
"""


def test_a_step_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    heard: list[str] = []
    python = _python(tmp_path, {"tensorrt": "", "tensorrt_llm": SLEEPER})
    with pytest.raises(BuildError, match="did not end within 2 s"):
        _run(tmp_path, python, timeout_s=2.0, update=lambda share, words: heard.append(words))
    (pid,) = (int(words.split()[1]) for words in heard)
    _wait_for_end(pid)


def test_what_a_step_leaves_running_does_not_hold_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grandchild has the pipe open after the step failed."""
    monkeypatch.setattr(launch, "_END_S", 0.3)
    code = """
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os._exit(3)
    """
    with pytest.raises(BuildError, match="status 3"):
        _run(tmp_path, _python(tmp_path, {"tensorrt": "", "tensorrt_llm": code}))


def test_an_interrupt_ends_the_step(tmp_path: Path) -> None:
    python = _python(tmp_path, {"tensorrt": "", "tensorrt_llm": SLEEPER})
    main = threading.main_thread().ident
    heard: list[str] = []

    def interrupt(share: float, words: str) -> None:
        heard.append(words)
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, python, update=interrupt)
    _wait_for_end(int(heard[0].split()[1]))


def test_a_build_that_is_killed_leaves_no_step_behind(tmp_path: Path) -> None:
    code = "import os, time; print('@progress 0.5', os.getpid(), flush=True); time.sleep(600)"
    python = _python(tmp_path, {"tensorrt": "", "tensorrt_llm": code})
    build = f"""
        from pathlib import Path
        from build_scripts.trtllm.launch import run_inside
        place = Path({str(tmp_path)!r})
        run_inside(Path({str(python)!r}), "versions", {{}}, scratch=place / "scratch", log=place / "x.log",
                   timeout_s=60.0, update=lambda share, words: print(words, flush=True))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(build)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    _wait_for_end(pid)


def test_progress_is_told_and_odd_output_is_kept_out_of_it(tmp_path: Path) -> None:
    code = """
        import sys
        print("@progress 0.25 a quarter")
        print("@progress nonsense")
        print("@progress 7 too far")
        sys.stdout.buffer.write(b"\\xff\\xfe bar: " + b"#" * 100_000)
        sys.stdout.flush()
        __version__ = "1.2.1"
    """
    heard: list[tuple[float, str]] = []
    python = _python(tmp_path, {"tensorrt": "__version__ = '10.0'", "tensorrt_llm": code})
    _run(tmp_path, python, update=lambda share, words: heard.append((share, words)))
    assert heard == [(0.25, "a quarter"), (1.0, "too far")]
    log = (tmp_path / "logs" / "convert.log").read_text()
    assert "@progress nonsense" in log
    assert log.count("#") == 100_000


def test_an_interpreter_may_be_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"tensorrt_llm": "__version__ = '1.2.1'", "tensorrt": "__version__ = '10.0'"}
    python = _python(tmp_path, modules)
    monkeypatch.chdir(tmp_path)
    assert _run(tmp_path, python.relative_to(tmp_path))["tensorrt"] == "10.0"
    monkeypatch.setenv("PATH", str(python.parent), prepend=os.pathsep)
    assert _run(tmp_path, Path("python"))["tensorrt"] == "10.0"


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no-python can't be run: No such file"):
        _run(tmp_path, tmp_path / "no-python")


# --- checkpoints ---


def _check(directory: Path, architecture: str = "qwen2") -> dict[str, Any]:
    return check_checkpoint(directory, architecture, machine.SHAPES[architecture], machine.CONTEXT)


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_checkpoint_of_the_known_shape_is_taken(tmp_path: Path, architecture: str) -> None:
    directory = machine.write_checkpoint(tmp_path, architecture)
    assert _check(directory, architecture)["model_type"] == architecture
    assert licence_of(directory) == "apache-2.0"


SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size"),
)


@given(st.sets(st.sampled_from([*SIZES, "tie_word_embeddings", "model_type"]), min_size=1))
def test_every_size_that_differs_is_named_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, names: set[str]
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    config = json.loads((machine.write_checkpoint(directory) / "config.json").read_text())
    config["head_dim"] = 16  # else it follows from hidden size and heads
    other: dict[str, Any] = {name: config[name] * 2 for name in SIZES}
    other |= {"tie_word_embeddings": False, "model_type": "mistral"}
    config |= {name: other[name] for name in names}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as error:
        _check(directory)
    named = {name for name in other if name in error.value.reason.split(":", 1)[1]}
    assert named == names


def test_a_head_size_that_is_not_the_usual_is_compared(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="head_dim is 32, tiny-qwen has 16"):
        _check(machine.write_checkpoint(tmp_path, head_dim=32))
    _check(machine.write_checkpoint(tmp_path, head_dim=None))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"use_sliding_window": True}, "issue 13123.*PyTorch adapter"),
        (
            {"max_position_embeddings": 512},
            "max_position_embeddings is 512.*context_tokens_max of at most 512",
        ),
        ({"hidden_size": "many"}, "hidden_size must be a whole number above 0, got 'many'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number"),
    ],
)
def test_what_can_not_be_built_is_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        _check(machine.write_checkpoint(tmp_path, **changed))


def test_an_unreadable_or_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        _check(tmp_path)
    machine.write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        _check(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        _check(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an object"):
        _check(tmp_path)


def test_hashes_and_stamps_name_every_file_that_is_not_hidden(tmp_path: Path) -> None:
    machine.write_checkpoint(tmp_path)
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("x")
    before, times = hashes(tmp_path), stamps(tmp_path)
    assert set(before) == set(times) == {path.name for path in tmp_path.iterdir() if path.is_file()}
    machine.write_weights(tmp_path / "model.safetensors", seed=1)
    assert {name for name in before if hashes(tmp_path)[name] != before[name]} == {"model.safetensors"}
    assert stamps(tmp_path) != times


def test_the_end_token_is_the_tokenizers_and_one_begin_token_is_put(tmp_path: Path) -> None:
    qwen = read_text(machine.write_checkpoint(tmp_path / "qwen"))
    assert (qwen.eos_id, qwen.bos_id, qwen.add_bos) == (2, 0, False)
    llama = read_text(machine.write_checkpoint(tmp_path / "llama", "llama"))
    assert llama.add_bos
    jinja2 = pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": "a"}]
    for text, begins in ((qwen, "<s>"), (llama, "")):
        rendered = jinja2.Template(text.chat_template).render(messages=messages, bos_token="<s>")
        assert rendered == f"{begins}a<|turn_end|>"


def test_tokens_that_are_not_named_come_from_config_json(tmp_path: Path) -> None:
    directory = machine.write_checkpoint(tmp_path)
    (directory / "tokenizer_config.json").write_text("{}")
    text = read_text(directory)
    assert (text.eos_id, text.bos_id, text.add_bos) == (1, 0, False)
    assert "content" in text.chat_template  # a text model: what was said, nothing else
    (directory / "chat_template.jinja").write_text("{{ 1 }}")
    assert read_text(directory).chat_template == "{{ 1 }}"
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    with pytest.raises(CheckpointError, match="no token '<none>'"):
        read_text(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        read_text(directory)
