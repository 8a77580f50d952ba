"""Container files: linted, and in step with the project. Nothing is built here."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "containers").glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """(word, rest) of each, comments dropped and continued lines joined."""
    text = re.sub(r"(?m)^\s*#.*\n", "", path.read_text(encoding="utf-8")).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(word.upper(), " ".join(rest.split())) for word, rest in lines]


def of(path: Path, word: str) -> list[str]:
    return [rest for found, rest in instructions(path) if found == word]


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def file(request: pytest.FixtureRequest) -> Path:
    return request.param  # type: ignore[no-any-return]


def test_both_are_there() -> None:
    assert [path.name for path in FILES] == ["Dockerfile.service", "Dockerfile.worker"]


def test_hadolint_finds_nothing(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("pip install 'plaserve[deploy]'")
    ran = subprocess.run([hadolint, "--no-color", str(file)], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")


def ignored(path: str) -> bool:
    """As .dockerignore says: the last pattern that holds, for the path or a parent of it, decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.strip().removeprefix("!")
        if not pattern or pattern.startswith("#"):
            continue
        parts = path.split("/")
        heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
        if pattern.startswith("**/"):
            holds = any(fnmatch.fnmatch(part, pattern[3:]) for part in parts)
        else:
            holds = any(fnmatch.fnmatchcase(head, pattern) and head.count("/") == 0 for head in heads)
        if holds:
            result = not line.startswith("!")
    return result


def test_what_is_copied_is_there_and_not_ignored(file: Path) -> None:
    for copied in of(file, "COPY"):
        if copied.startswith("--from="):
            continue
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists()
            assert not ignored(source)


def test_the_wheel_gets_all_its_packages(file: Path) -> None:
    copied = {source for line in of(file, "COPY") for source in line.split()[:-1]}
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied
    assert PROJECT["project"]["readme"] in copied


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/x", "bundles/a", "var/b", "tests/t.py", "engines/__pycache__/x"]
)
def test_the_context_is_small(path: str) -> None:
    assert ignored(path)


def test_the_service_is_no_root_and_starts_the_command(file: Path) -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", of(file, "USER")[-1])
    assert of(file, "ENTRYPOINT") == ['["plaserve"]']
    assert of(file, "EXPOSE") == ["8081 9464"]
    words = [word for word, _ in instructions(file)]
    assert words.index("ENTRYPOINT") > len(words) - 1 - words[::-1].index("USER")


def test_versions_are_pinned(file: Path) -> None:
    """By constraints.txt; the base images by a tag that is none of the moving ones, or by digest."""
    installs = [line for line in of(file, "RUN") if "pip install" in line or "install --no-cache-dir" in line]
    assert installs
    assert all("-c " in line and "constraints.txt" in line for line in installs)
    arguments = dict(line.partition("=")[::2] for line in of(file, "ARG"))
    bases = [line.split()[0] for line in of(file, "FROM")]
    assert all(re.fullmatch(r"\$\{(\w+)\}", base)[1] in arguments for base in bases)
    assert ":latest" not in file.read_text(encoding="utf-8")


def test_nvidias_image_has_no_default_and_the_version_of_the_pin() -> None:
    worker = FILES[1]
    assert "TRTLLM_IMAGE" in of(worker, "ARG")  # without "="
    arguments = dict(line.partition("=")[::2] for line in of(worker, "ARG"))
    (pin,) = PROJECT["project"]["optional-dependencies"]["trtllm"]
    assert pin == f"tensorrt-llm=={arguments['TRTLLM_VERSION']}"
    assert any("@sha256:" in line and "exit 1" in line for line in of(worker, "RUN"))


def test_python_is_one_that_the_project_takes() -> None:
    wanted = tuple(map(int, PROJECT["project"]["requires-python"].removeprefix(">=").split(".")))
    for path in FILES:
        arguments = dict(line.partition("=")[::2] for line in of(path, "ARG"))
        version = re.search(r":(\d+)\.(\d+)-", arguments["PYTHON_IMAGE"])
        assert tuple(map(int, version.groups())) >= wanted
