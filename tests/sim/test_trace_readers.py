"""Trace readers: tiny files of every format, errors that say where, our own format, and the real files."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.sim import known_traces
from service.sim.traces import (
    KNOWN_TRACES,
    KnownTrace,
    MissingTrace,
    TraceFileError,
    find_trace,
    read_trace,
    write_jsonl,
)
from service.sim.workload import Trace, TraceRow

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
NORMALIZED = "arrival_s,input_tokens,output_tokens,client_id\n2.5,19,5,14\n2.75,46,31,18\n"
COUNTS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n290,905,1195,0.3\n"
APEX = "StartTimeOffset_ns,ContextTokens,GeneratedTokens\n618518284,304,822\n1618518284,497,1783\n"
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [0, 1]}\n'
    '{"timestamp": 277, "input_length": 1500, "output_length": 7, "hash_ids": [0, 1, 2]}\n'
)
TURNS = (
    "trace,subagent,turn,t_in_session_s,input_tokens,new_input_tokens,output_tokens,api_time_s,think_time_s,stop\n"
    "1,,1,0.0,71175,71175,169,7.34,0.0,tool_use\n"
    "1,,2,19.0,72762,1594,0,9.19,12.0,tool_use\n"
    "1,agent_001,1,20.0,500,500,6,,,\n"
)
OWN = (
    '{"arrival_s":0,"prompt_tokens":10,"output_tokens":1}\n'
    '{"arrival_s":1.5,"prompt_tokens":3,"output_tokens":2}\n'
)


def read(folder: Path, text: str, name: str = "tiny.txt") -> Trace:
    path = folder / name
    path.write_text(text)
    return read_trace(path)


def sizes(trace: Trace) -> list[tuple[float, int, int]]:
    return [(row.arrival_s, row.prompt_tokens, row.output_tokens) for row in trace.rows]


def test_azure(tmp_path: Path) -> None:
    assert sizes(read(tmp_path, AZURE)) == [
        (0.0, 4808, 10),
        (pytest.approx(0.052), 3180, 8),
        (60.0, 110, 27),
    ]


def test_the_normalised_csv_starts_at_its_first_row(tmp_path: Path) -> None:
    assert sizes(read(tmp_path, NORMALIZED)) == [(0.0, 19, 5), (0.25, 46, 31)]


def test_rows_without_times(tmp_path: Path) -> None:
    assert sizes(read(tmp_path, "arrival_s,input_tokens,output_tokens\n,19,5\n,46,31\n")) == [
        (0.0, 19, 5),
        (0.0, 46, 31),
    ]
    assert sizes(read(tmp_path, COUNTS)) == [(0.0, 74, 918), (0.0, 290, 905)]


def test_apex(tmp_path: Path) -> None:
    assert sizes(read(tmp_path, APEX)) == [(0.0, 304, 822), (pytest.approx(1.0), 497, 1783)]


def test_mooncake_names_full_blocks_only(tmp_path: Path) -> None:
    trace = read(tmp_path, MOONCAKE)
    assert trace.block_tokens == 512
    assert sizes(trace) == [(0.0, 1024, 2), (0.277, 1500, 7)]
    assert [row.block_hashes for row in trace.rows] == [(0, 1), (0, 1)]


def test_rows_on_a_grid_are_spread_inside_their_tick(tmp_path: Path) -> None:
    ticks_ms = [0] * 5 + [3000] * 4 + [9001] * 3 + [12_000] * 4
    lines = [
        f'{{"timestamp": {t}, "input_length": {n + 1}, "output_length": 1, "hash_ids": [{n}]}}'
        for n, t in enumerate(ticks_ms)
    ]
    trace = read(tmp_path, "\n".join(lines))
    times = np.array([row.arrival_s for row in trace.rows])
    assert [row.prompt_tokens for row in trace.rows] == list(range(1, len(lines) + 1))
    assert np.all(np.diff(times) > 0.0)
    late_s = times - np.array(ticks_ms) / 1000.0  # the first row is at 0, so all moved by the same bit
    assert late_s.max() - late_s.min() < 3.0
    assert trace == read(tmp_path, "\n".join(lines))


def test_agent_turns_are_sessions(tmp_path: Path) -> None:
    rows = read(tmp_path, TURNS).rows
    assert [row.session for row in rows] == ["1", "1", "1/agent_001"]
    assert [row.reused_tokens for row in rows] == [0, 72762 - 1594, 0]
    assert [row.think_s for row in rows] == [0.0, 12.0, 0.0]
    assert [row.output_tokens for row in rows] == [169, 1, 6]


@pytest.mark.parametrize("text", [AZURE, NORMALIZED, COUNTS, APEX, MOONCAKE, TURNS, OWN])
def test_packed_files_read_like_plain_ones(tmp_path: Path, text: str) -> None:
    plain = read(tmp_path, text)
    (tmp_path / "packed").write_bytes(gzip.compress(text.encode()))
    assert read_trace(tmp_path / "packed").rows == plain.rows


@pytest.mark.parametrize(
    ("text", "line", "field"),
    [
        (AZURE.replace("4808", "0"), 2, "ContextTokens"),
        (AZURE.replace("3180", "many"), 3, "ContextTokens"),
        (AZURE.replace(",27", ",-1"), 4, "GeneratedTokens"),
        (AZURE.replace("18:18:03", "18:16:03"), 4, "TIMESTAMP"),
        (AZURE.replace("2023-11-16 18:18", "yesterday 18:18"), 4, "TIMESTAMP"),
        (AZURE.replace(",8\n", "\n"), 3, "line"),
        (NORMALIZED.replace("2.75", "nan"), 3, "arrival_s"),
        (NORMALIZED.replace("2.75", ""), 3, "arrival_s"),
        (NORMALIZED.replace("2.75", "-1"), 3, "arrival_s"),
        (MOONCAKE.replace("277", '"soon"'), 2, "timestamp"),
        (MOONCAKE.replace("1500", "1500.5"), 2, "input_length"),
        (MOONCAKE.replace("[0, 1]", "[0]"), 1, "hash_ids"),
        (MOONCAKE.replace("[0, 1]", "[0, true]"), 1, "hash_ids"),
        (MOONCAKE.replace(', "output_length": 7', ""), 2, "output_length"),
        (MOONCAKE + "[]", 3, "line"),
        (MOONCAKE + "{", 3, "line"),
        (TURNS.replace(",1594,", ",99999,"), 3, "new_input_tokens"),
        (TURNS.replace(",12.0,", ",-12.0,"), 3, "think_time_s"),
        (OWN.replace("1.5", "true"), 2, "arrival_s"),
        (OWN.replace('"prompt_tokens":3', '"prompt_tokens":0'), 2, "prompt_tokens"),
        (OWN.replace('"arrival_s":1.5', '"arrival":1.5'), 2, "arrival"),
        (OWN.replace('"arrival_s":0,', '"arrival_s":9,'), 2, "arrival_s"),
        (OWN.replace("10,", '10,"block_hashes":[1],'), 1, "block_hashes"),
        (OWN.replace("10,", '10,"session":7,'), 1, "session"),
        (OWN.replace("10,", '10,"reused_tokens":10,'), 1, "reused_tokens"),
        (OWN + '{"format":"plaserve-trace","version":1}\n', 3, "format"),
        ('{"format":"plaserve-trace","version":2}\n' + OWN, 1, "format"),
        ('{"format":"plaserve-trace","version":1,"block_tokens":4}\n{"prompt_tokens":9,"output_tokens":2,'
         '"block_hashes":[1,2,3]}', 2, "block_hashes"),
        ("some,other,table\n1,2,3\n", 1, "line"),
        ("", 1, "line"),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_field(tmp_path: Path, text: str, line: int, field: str) -> None:
    with pytest.raises(TraceFileError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'tiny.txt'}:{line}: {field} ")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "cut.gz").write_bytes(gzip.compress(AZURE.encode() * 100)[:60])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfd")
    for name in ("cut.gz", "bytes", "absent"):
        with pytest.raises(TraceFileError, match=name):
            read_trace(tmp_path / name)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match="no request"):
        read(tmp_path, AZURE.splitlines()[0] + "\n")


def test_a_format_can_be_named_and_must_be_known(tmp_path: Path) -> None:
    (tmp_path / "tiny").write_text(AZURE)
    assert len(read_trace(tmp_path / "tiny", "azure").rows) == 3
    with pytest.raises(TraceFileError, match="arrival_s"):
        read_trace(tmp_path / "tiny", "normalized")
    with pytest.raises(ValueError, match="format"):
        read_trace(tmp_path / "tiny", "parquet")


# --- the own format ---

rows = st.builds(
    TraceRow,
    arrival_s=st.floats(0.0, 1e6),
    prompt_tokens=st.integers(64, 10**6),
    output_tokens=st.integers(1, 10**5),
    block_hashes=st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple),
    session=st.text(max_size=8),
    think_s=st.floats(0.0, 1e4),
    reused_tokens=st.integers(0, 63),
)


@settings(max_examples=50)
@given(st.lists(rows, min_size=1, max_size=8), st.text(max_size=8), st.sampled_from([".jsonl", ".jsonl.gz"]))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[TraceRow], source: str, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("own") / f"own{suffix}"
    trace = Trace("own", tuple(sorted(rows, key=lambda row: row.arrival_s)), 16, source)
    write_jsonl(trace, path)
    assert read_trace(path) == trace
    first = path.read_bytes()
    write_jsonl(trace, path)
    assert path.read_bytes() == first


# --- known traces ---


def test_known_traces_state_source_licence_and_digest() -> None:
    for name, known in KNOWN_TRACES.items():
        assert known.name == name
        assert known.source.startswith("https://github.com/")
        assert known.licence in {"CC-BY-4.0", "Apache-2.0", "MIT"}
        for path, digest in known.files:
            assert len(digest) == 64
            assert path in known.where
            assert digest in known.where


@pytest.fixture
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownTrace:
    """A trace that is known as `tiny`, looked for in tmp_path only."""
    digest = "b6d4c3ecb7fbd3e9a5b9ab3d1e8a8c3b2cb3f0b7a4c5f5a9f0c3f5a1b2c3d4e5"
    known = KnownTrace("tiny", (("folder/tiny.csv", digest),), "azure", "https://github.com/x/y", "MIT")
    monkeypatch.setitem(known_traces.KNOWN_TRACES, "tiny", known)
    monkeypatch.setenv("PLASERVE_TRACES", os.pathsep.join([str(tmp_path / "none"), str(tmp_path)]))
    return known


def test_a_missing_trace_is_reported_with_source_and_digest(only_here: KnownTrace) -> None:
    assert find_trace("tiny") is None
    with pytest.raises(MissingTrace) as caught:
        read_trace("tiny")
    assert only_here.source in str(caught.value)
    assert only_here.files[0][1] in str(caught.value)
    assert caught.value.known is only_here


def test_a_wrong_digest_is_an_error(only_here: KnownTrace, tmp_path: Path) -> None:
    (tmp_path / "tiny.csv").write_text(AZURE)
    assert find_trace("tiny") == tmp_path / "tiny.csv"
    with pytest.raises(TraceFileError, match="sha256"):
        read_trace("tiny")


def test_a_trace_is_found_under_its_path_and_read_by_name(
    only_here: KnownTrace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hashlib import sha256

    right = KnownTrace(
        "tiny", (("folder/tiny.csv", sha256(AZURE.encode()).hexdigest()),), "azure", only_here.source, "MIT"
    )
    monkeypatch.setitem(known_traces.KNOWN_TRACES, "tiny", right)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tiny.csv").write_text(AZURE)
    trace = read_trace("tiny")
    assert (trace.name, len(trace.rows), trace.source) == ("tiny", 3, right.source)


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="azure_conv"):
        find_trace("azure")


# rows, P(<256) in percent, median, mean: the table of shared/traces/README.md
REAL = {
    "azure_code": (8_819, 16.1, 1_469, 2_048),
    "azure_conv": (19_366, 13.4, 1_020, 1_155),
    "mooncake_conversation": (12_031, 0.0, 6_909, 12_035),
    "mooncake_synthetic": (3_993, 24.6, 11_587, 15_326),
    "agent_turns": (49_334, 0.0, 103_659, 122_379),
    "sharegpt_8k": (30_731, 17.1, 1_730, 2_340),
    "arxiv_summarization": (28_257, 2.1, 2_730, 2_588),
    "apex_creation": (512, 29.3, 309, 308),
    "apex_summarization": (1_302, 0.1, 2_943, 2_753),
    "servegen_deepseek_r1": (22_719, 65.7, 113, 963),
    "servegen_m_large": (194_914, 4.7, 630, 744),
    "servegen_m_small": (66_481, 85.2, 51, 123),
}
# mean rate a second, seconds
TIMES = {
    "azure_code": (2.57, 3_436),
    "azure_conv": (5.53, 3_502),
    "mooncake_conversation": (3.4, 3_537),
    "mooncake_synthetic": (3.91, 1_022),
    "apex_creation": (0.466, 1_097),
    "servegen_deepseek_r1": (12.6, 1_800),
    "servegen_m_large": (325, 600),
    "servegen_m_small": (554, 120),
}


@pytest.mark.parametrize("name", REAL)
def test_real_traces_have_the_published_figures(name: str) -> None:
    if find_trace(name) is None:
        pytest.skip(f"trace {name} is not here")
    trace = read_trace(name)
    prompts = np.array([row.prompt_tokens for row in trace.rows])
    count, short_percent, median, mean = REAL[name]
    assert len(prompts) == count
    assert 100.0 * np.mean(prompts < 256) == pytest.approx(short_percent, abs=0.05)
    assert (np.median(prompts), np.mean(prompts)) == (
        pytest.approx(median, abs=0.5),
        pytest.approx(mean, abs=0.6),
    )
    times = [row.arrival_s for row in trace.rows]
    assert times == sorted(times)
    if name in TIMES:
        rate, seconds = TIMES[name]
        assert times[-1] == pytest.approx(seconds, abs=3.5)
        assert (count - 1) / times[-1] == pytest.approx(rate, rel=0.005)


def test_the_conversation_trace_is_no_longer_on_its_grid() -> None:
    if find_trace("mooncake_conversation") is None:
        pytest.skip("trace mooncake_conversation is not here")
    gaps = np.diff([row.arrival_s for row in read_trace("mooncake_conversation").rows])
    assert np.mean(gaps == 0.0) < 0.001
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1.0, abs=0.1)  # recorded: 3.0
