"""Values of the chart: each is explained and has a rule, and bad ones are refused by name."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="pip install 'plaserve[deploy]'")

import chart_render as chart
from chart_render import CHART, Object

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
TEXT = (CHART / "values.yaml").read_text(encoding="utf-8")

# What is wrong -> words that the refusal must have.
REFUSED: dict[str, tuple[Object, str]] = {
    "no shard": ({"shards": []}, "shards"),
    "shard twice": (
        {"shards": [{"name": "a", "workers": 1}, {"name": "a", "workers": 2}]},
        "shards: the name a",
    ),
    "shard without a name": ({"shards": [{"workers": 1}]}, "name"),
    "shard with a long name": ({"shards": [{"name": "thirteen-long", "workers": 1}]}, "maxLength|maximum"),
    "shard in capitals": ({"shards": [{"name": "A", "workers": 1}]}, "pattern"),
    "no workers": ({"shards": [{"name": "a", "workers": 0}]}, "minimum"),
    "a misspelt value": ({"frontend": {"replica": 3}}, "replica"),
    "a misspelt group": ({"front_end": {}}, "front_end"),
    "the tag latest": ({"images": {"service": {"tag": "latest"}}}, "tag"),
    "a digest that is none": ({"images": {"worker": {"digest": "sha256:12"}}}, "digest"),
    "another number of GPUs": ({"worker": {"resources": {"limits": {"nvidia.com/gpu": "2"}}}}, "limits"),
    "no memory limit": ({"scheduler": {"resources": {"limits": {"memory": None}}}}, "memory"),
    "a backend that is not deployed": ({"worker": {"backend": "triton_server"}}, "backend"),
    "no etcd": ({"etcd": {"endpoints": []}}, "etcd.endpoints"),
    "etcd by URL": ({"etcd": {"endpoints": ["http://etcd:2379"]}}, "endpoints"),
    "etcd of two": ({"etcd": {"trial": {"replicas": 2}}}, "replicas"),
    "no claim": ({"bundle": {"pvc": {"claimName": ""}}}, "bundle.pvc.claimName"),
    "no url": ({"bundle": {"source": {"worker": "fetch"}}}, "bundle.fetch.url"),
    "links without TLS": ({"tls": {"linksSecret": ""}}, "tls.linksSecret"),
    "etcd without TLS": ({"etcd": {"tlsSecret": ""}}, "etcd.tlsSecret"),
    "a lease as short as a call": ({"fleet": {"leaseTtlSeconds": 2}}, "leaseTtlSeconds"),
    "liveness that kills at once": ({"probes": {"livenessFailures": 1}}, "livenessFailures"),
    "a controller without moves": ({"settings": {"scheduler": {"mode": "temporal"}}}, "controller.replicas"),
    "root": ({"security": {"user": 0}}, "user"),
    "nobody may be away": ({"worker": {"maxUnavailable": 0}}, "maxUnavailable"),
    "everybody may be away": ({"worker": {"maxUnavailable": "100%"}}, "maxUnavailable"),
    "a list as a setting": ({"settings": {"scheduler": {"mode": ["auto"]}}}, "settings"),
    "the port as a setting": ({"settings": {"server": {"port": 1}}}, "PLASERVE_SERVER__PORT follows"),
    "the backend as a setting": (
        {"worker": {"settings": {"engine": {"backend": "simulated"}}}},
        "BACKEND follows",
    ),
    "the shard as a setting": ({"scheduler": {"settings": {"fleet": {"shard": "b"}}}}, "SHARD follows"),
    "drain time as a setting": (
        {"frontend": {"settings": {"server": {"drain_timeout_s": 1}}}},
        "DRAIN_TIMEOUT_S",
    ),
}


@pytest.fixture(scope="module")
def refusals() -> dict[str, Any]:
    return chart.ask({name: {"values": values, "release": "demo"} for name, (values, _) in REFUSED.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_bad_values_are_refused_by_name(name: str, refusals: dict[str, Any]) -> None:
    assert isinstance(refusals[name], str), "it was rendered"
    assert re.search(REFUSED[name][1], refusals[name])


def test_every_value_is_explained() -> None:
    """A comment above each key. Keys inside a quantity, a label or a list of Kubernetes' own are not ours."""
    lines = TEXT.splitlines()
    theirs = re.compile(r"^\s*(requests|limits|nvidia\.com/gpu\.product|operator|effect|- key):")
    unexplained = [
        line
        for above, line in pairwise(lines)
        if re.match(r"^\s*(- )?[A-Za-z]\w*:", line)
        and not theirs.match(line)
        and not above.lstrip(" -").startswith("#")
    ]
    assert unexplained == []


def test_the_schema_knows_every_value_and_no_other() -> None:
    def walk(values: Object, schema: Object, path: str) -> None:
        known = schema.get("properties")
        if known is None:
            return
        assert schema["additionalProperties"] is False, path
        assert set(values) == set(known) - ({"global"} if not path else set()), path
        for key, value in values.items():
            rule = known[key]
            if "$ref" in rule:
                rule = SCHEMA["definitions"][rule["$ref"].rpartition("/")[2]]
            if isinstance(value, dict):
                walk(value, rule, f"{path}.{key}")

    values = yaml.safe_load(TEXT)
    walk(values, SCHEMA, "")
    assert set(values["shards"][0]) == set(SCHEMA["properties"]["shards"]["items"]["properties"])


def test_examples_change_something_each() -> None:
    defaults = yaml.safe_load(TEXT)
    for path in chart.EXAMPLES:
        over = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert chart.merged(defaults, over) != defaults
        assert over.keys() <= defaults.keys()


def test_the_chart_follows_the_project() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = (chart.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert about["appVersion"] == re.search(r'^version = "(.+)"', project, re.MULTILINE)[1]
