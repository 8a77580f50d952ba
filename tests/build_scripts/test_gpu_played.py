"""The CUDA branches of the measurements, with torch.cuda played: that they call what they mean to call.

Graphs replay nothing here and streams are no streams; what kernels do is for a GPU (tests/gpu).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from build_scripts.gpu import machine, part_graphs, part_launch, part_sm_split
from build_scripts.gpu import measure as measuring
from build_scripts.gpu.bench import SCALES, Bench, Deadline, Table, make_bench
from build_scripts.gpu.green import NoGreenContexts, Side
from build_scripts.gpu.summary import read_rows
from build_scripts.gpu.timing import timed

NEVER = Deadline(float("inf"))
SMS = 132


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at_s - self.at_s) + 1e-6


class Stream:
    def __init__(self, handle: int = 0) -> None:
        self.handle = handle

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None: ...


class Played:
    """What was done with graphs."""

    def __init__(self) -> None:
        self.captured, self.replayed = 0, 0
        self.pools: set[object] = set()

    def graph_class(self) -> type:
        played = self

        class Graph:
            def replay(self) -> None:
                played.replayed += 1

        return Graph

    @contextmanager
    def capture(self, graph: object, pool: object = None) -> Iterator[None]:
        self.captured += 1
        self.pools.add(pool)
        yield


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    properties = SimpleNamespace(
        name="NVIDIA Played 141GB", multi_processor_count=SMS, major=9, minor=0, total_memory=141e9
    )
    names: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "ExternalStream": Stream,
        "CUDAGraph": played.graph_class(),
        "graph": played.capture,
        "graph_pool_handle": object,
        "stream": lambda stream: nullcontext(),
        "current_stream": Stream,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (10**9, 2 * 10**9),
        "is_available": lambda: True,
        "set_device": lambda number: None,
        "get_device_name": lambda device: properties.name,
        "get_device_properties": lambda device: properties,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Bench, "cuda", property(lambda self: True))
    return played


@pytest.fixture
def bench() -> Bench:
    return make_bench("qwen2.5-7b", "cpu", SCALES["tiny"])


def test_graphs_of_a_kind_share_a_pool_and_each_is_replayed(
    cuda: Played, bench: Bench, tmp_path: Path
) -> None:
    table = Table(tmp_path / "graphs.csv", part_graphs.COLUMNS)
    said = part_graphs.run(bench, table, NEVER)
    table.close()
    rows = read_rows(table.path)
    assert said == "4 eager, 2 class_graph, 4 cell_graph"
    assert cuda.captured == 6
    assert len(cuda.pools) == 2
    assert cuda.replayed >= 6 * 4  # two to warm up, two at least to be counted
    assert {row["kind"] for row in rows if float(row["memory_mb"]) == 0.0} == {row["kind"] for row in rows}


def test_launches_are_timed_eager_and_replayed(cuda: Played, bench: Bench, tmp_path: Path) -> None:
    table = Table(tmp_path / "launch.csv", part_launch.COLUMNS)
    part_launch.run(bench, table, NEVER)
    table.close()
    assert [row["mode"] for row in read_rows(table.path)] == ["eager", "graph"] * 2
    assert cuda.captured == 2


def test_every_share_of_the_sms_is_measured(
    cuda: Played, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split(driver: Any, ordinal: int, total: int, sms: int) -> tuple[Side, Side]:
        assert (driver, ordinal, total) == ("driver", 0, SMS)
        return Side(sms, 1), Side(total - sms, 2)

    monkeypatch.setattr(part_sm_split, "load_driver", lambda: "driver")
    monkeypatch.setattr(part_sm_split, "split", split)
    table = Table(tmp_path / "sm_split.csv", part_sm_split.COLUMNS)
    part_sm_split.run(bench, table, NEVER)
    table.close()
    rows = [
        (row["sharing"], int(row["prefill_sms"]), int(row["decode_sms"])) for row in read_rows(table.path)
    ]
    assert rows == [
        ("streams", SMS, SMS),
        *[("green", SMS - sms, sms) for sms in part_sm_split.shares(SMS)],
    ]


def test_without_green_contexts_two_streams_are_left(
    cuda: Played, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Any:
        raise NoGreenContexts("too old")

    monkeypatch.setattr(part_sm_split, "load_driver", none)
    table = Table(tmp_path / "sm_split.csv", part_sm_split.COLUMNS)
    with pytest.raises(part_sm_split.Skip, match="too old"):
        part_sm_split.run(bench, table, NEVER)
    assert table.rows == 1
    table.close()


def test_a_pass_is_timed_by_events(cuda: Played) -> None:
    device: Any = SimpleNamespace(type="cuda")
    timing = timed(lambda: time.sleep(0.002), device, spend_s=0.0)
    assert all(issue >= 0.002 for issue in timing.issue_s)
    assert all(wall >= issue for wall, issue in zip(timing.wall_s, timing.issue_s, strict=True))


def test_the_card_and_its_driver_are_named(cuda: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVIDIA Played, 580.1, 1980 MHz, 1980 MHz, 700.00 W, 40, 143771 MiB\n"
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **options: SimpleNamespace(stdout=line))
    facts = machine.describe("cuda")
    assert (facts["card"], facts["driver"], facts["sms"]) == ("NVIDIA Played 141GB", "580.1", SMS)
    assert facts["power.limit"] == "700.00 W"
    assert measuring.default_directory("cuda").name.startswith("nvidia-played-141gb-")
