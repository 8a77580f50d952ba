"""Dashboards, alerts and the operations page speak of metrics, labels and spans that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from service.telemetry import TelemetrySettings
from service.telemetry.fleet_names import FLEET_METRICS, FLEET_SPANS, TRIES
from service.telemetry.names import METRICS, SPANS, Attribute, Metric, MetricKind

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "deploy" / "dashboards").glob("*.json"))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")

SERIES: dict[str, Metric] = {}
ALL = (*METRICS, *FLEET_METRICS)
for _metric in ALL:
    if _metric.kind is MetricKind.HISTOGRAM:
        _suffixes = ("_bucket", "_count", "_sum") if _metric.buckets[0] > 0 else ("_bucket", "_count")
        SERIES |= {_metric.name + suffix: _metric for suffix in _suffixes}
    else:
        SERIES[_metric.name] = _metric


def expressions() -> list[str]:
    """Every PromQL expression in deploy/."""
    found = []
    for path in DASHBOARDS:
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        found += [target["expr"] for panel in panels for target in panel["targets"]]
    alerts = (ROOT / "deploy" / "alerts.yml").read_text(encoding="utf-8")
    rules = re.split(r"- alert: \w+", alerts)[1:]
    return found + [
        re.search(r"expr:(?: >\n)?(.*?)\n +(?:for|labels):", rule, re.DOTALL)[1] for rule in rules
    ]


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_names_known_series_and_labels(expression):
    series = set(re.findall(r"\bplaserve_\w+", expression))
    assert series <= SERIES.keys()
    known = {label for name in series for label in SERIES[name].labels} | {"le", "job"}
    used = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
    used |= set(re.findall(r"[{,]\s*(\w+)\s*[=!]", expression))
    assert used <= known


def test_alerts_and_panels_are_found():
    assert len(expressions()) > 25
    assert all(re.search("plaserve_|up{", expression) for expression in expressions())


@pytest.mark.parametrize("name", [*(metric.name for metric in ALL), *SPANS, *FLEET_SPANS, *Attribute, TRIES])
def test_the_operations_page_has_every_name(name):
    assert f"`{name}`" in OPERATIONS


def test_names_are_given_once_and_every_fleet_metric_is_on_the_dashboard():
    assert len({metric.name for metric in ALL}) == len(ALL)
    shown = {SERIES[name].name for text in expressions() for name in re.findall(r"\bplaserve_\w+", text)}
    assert {metric.name for metric in FLEET_METRICS} - shown == {"plaserve_worker_link_epoch"}


def test_every_alert_is_explained():
    alerts = (ROOT / "deploy" / "alerts.yml").read_text(encoding="utf-8")
    for alert in re.findall(r"- alert: (\w+)", alerts):
        assert f"`{alert}`" in OPERATIONS


def test_prometheus_scrapes_the_default_port():
    settings = TelemetrySettings()
    scraped = (ROOT / "deploy" / "prometheus.yml").read_text(encoding="utf-8")
    assert f'"{settings.metrics_host}:{settings.metrics_port}"' in scraped
