"""Settings: precedence, and unknown or bad keys named wherever they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.settings import SettingsError, known_keys, load_settings


@pytest.fixture(autouse=True)
def _no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("PLASERVE_")]:
        monkeypatch.delenv(name)


def test_flags_win_over_environment_over_file_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('policy = "fcfs"\n[server]\nport = 1\nhost = "127.0.0.2"\n[scheduler]\nsigma_s = 0.01\n')
    monkeypatch.setenv("PLASERVE_SERVER__PORT", "2")
    monkeypatch.setenv("PLASERVE_SCHEDULER__WINDOW_S_MAX", "0.02")
    settings = load_settings(file, {"server.drain_timeout_s": 3.0})
    assert settings.policy == "fcfs"
    assert (settings.server.host, settings.server.port) == ("127.0.0.2", 2)
    assert settings.server.drain_timeout_s == 3.0
    assert (settings.scheduler.sigma_s, settings.scheduler.window_s_max) == (0.01, 0.02)
    assert settings.scheduler.age_bound_s == 5.0
    assert load_settings(file, {"server.port": 3, "policy": None}).server.port == 3


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[server]\nport = 4\n")
    monkeypatch.setenv("PLASERVE_CONFIG", str(file))
    assert load_settings().server.port == 4


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("PLASERVE_SERVER__PROT", "1", "PLASERVE_SERVER__PROT"),
        ("PLASERVE_SCHEDULER__SIGMA", "1", "PLASERVE_SCHEDULER__SIGMA"),
        ("PLASERVE_PORT", "1", "PLASERVE_PORT"),
        ("PLASERVE_SERVER__PORT", "banana", "server.port"),
        ("PLASERVE_SERVER__PORT", "70000", "server.port"),
        ("PLASERVE_EXECUTOR__START_TIMEOUT_S", "inf", "executor.start_timeout_s"),
        ("PLASERVE_EXECUTOR__PASS_TIMEOUT_S", "nan", "executor.pass_timeout_s"),
        ("PLASERVE_POLICY", "lifo", "policy"),
        ("PLASERVE_SCHEDULER__AGE_BOUND_S", "-1", "age_bound_s"),
        ("PLASERVE_SCHEDULER__LATE_POLICY", "maybe", "late_policy"),
    ],
)
def test_the_environment_is_checked(
    variable: str, value: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=named):
        load_settings()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nprot = 1\n", "server.prot"),
        ("[scheduler]\nsigma = 1\n", "sigma"),
        ("[nonsense]\na = 1\n", "nonsense"),
        ("[server\n", "settings.toml"),
        ("[limits]\nmax_tokens_max = 0\n", "limits.max_tokens_max"),
    ],
)
def test_the_file_is_checked(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=named):
        load_settings(file)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        load_settings(tmp_path / "none.toml")


def test_settings_can_not_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings().server.port = 1


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")
    missing = [
        f"{group}.{name}"
        for group, names in known_keys().items()
        for name in names
        if f"`{f'{group}.' if group else ''}{name}`" not in page
    ]
    assert not missing


def test_variables_that_are_no_settings_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`PLASERVE_TRACES` belongs to the lab; a service started beside it must not refuse it."""
    monkeypatch.setenv("PLASERVE_TRACES", "/nowhere")
    load_settings()
