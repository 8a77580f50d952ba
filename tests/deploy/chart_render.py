"""Renders the chart: Helm as a library, in a process of its own, since it brings Go's signal handlers.

Run as a script it reads {case: {"values": ..., "release": ...}} from standard input and writes {case: {file:
text} or error text}. `rendered` does that once for all cases.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "chart" / "plaserve"
NAMESPACE = "llm"
ROLES = ("frontend", "scheduler", "worker", "controller")
EXAMPLES = tuple(sorted((CHART / "examples").glob("*.yaml")))

Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """Manifests of one case and the values that they come from, defaults included."""

    manifests: tuple[Object, ...]
    values: Object
    release: str

    def of(self, *kinds: str) -> list[Object]:
        return [each for each in self.manifests if each["kind"] in kinds]

    def workloads(self) -> list[Object]:
        return self.of("Deployment", "StatefulSet")

    def environment(self, workload: Object) -> dict[str, str]:
        """What the main container gets, as far as it is plain text."""
        container = main(workload)
        found: dict[str, str] = {}
        maps = {each["metadata"]["name"]: each["data"] for each in self.of("ConfigMap")}
        for source in container.get("envFrom", ()):
            if "configMapRef" in source:
                found |= maps[source["configMapRef"]["name"]]
        return found | {each["name"]: each["value"] for each in container["env"] if "value" in each}


def role(workload: Object) -> str:
    return str(workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


def pod(workload: Object) -> Object:
    return workload["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def main(workload: Object) -> Object:
    return pod(workload)["containers"][0]  # type: ignore[no-any-return]


def ours(workloads: list[Object]) -> list[Object]:
    return [each for each in workloads if role(each) in ROLES]


def merged(base: Object, over: Object) -> Object:
    """As Helm merges values: maps by key, all else replaced."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


ODD: dict[str, Object] = {
    "ipv6": {"ipFamily": "IPv6", "etcd": {"endpoints": ["[fd00::1]:2379"]}},
    "single-pods": {
        "shards": [{"name": "only", "workers": 1}],
        "frontend": {"replicas": 1},
        "scheduler": {"replicas": 1},
        "controller": {"replicas": 0},
    },
    "fetch-everywhere": {
        "bundle": {
            "source": dict.fromkeys(ROLES, "fetch"),
            "fetch": {"url": "gs://b/x", "checkHost": False, "envFrom": [{"secretRef": {"name": "s"}}]},
        },
    },
    "tls-for-clients": {
        "tls": {"frontendSecret": "front-tls", "linksSecret": "links-tls"},
        "etcd": {
            "tlsSecret": "etcd-ca",
            "clientCertificate": False,
            "tlsName": "etcd",
            "passwordSecret": "pw",
        },
    },
    "plain-etcd-all-shards": {
        "etcd": {"tlsSecret": "", "allowPlaintext": True},
        "shards": [{"name": "a", "workers": 2}, {"name": "b", "workers": 1}],
        "frontend": {"allShards": True},
        "settings": {"scheduler": {"mode": "temporal"}},
    },
    "health-port": {"probes": {"healthPort": 8090}},
    "trial-etcd-of-three": {"etcd": {"endpoints": [], "trial": {"enabled": True, "replicas": 3}}},
    "closed-network": {
        "networkPolicy": {
            "clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}],
            "operators": [{"podSelector": {"matchLabels": {"app": "ops"}}}],
            "monitoringNamespace": "observability",
        },
    },
    "open-network": {"networkPolicy": {"enabled": False}},
    "torch-backend": {
        "worker": {
            "backend": "trtllm_torch",
            "updateStrategy": "OnDelete",
            "gpu": {"runtimeClassName": "nvidia", "resource": "nvidia.com/mig-7g.141gb"},
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "pool", "operator": "Exists"}],
        },
        "shards": [{"name": "x-1", "workers": 3, "nodeSelector": {"rack": "7"}}],
    },
    "embedded-backend": {"worker": {"backend": "openvino_cpu", "spread": "ScheduleAnyway"}},
    "settings": {
        "settings": {
            "policy": "laps_slides",
            "scheduler": {"window_s_max": 0.008, "queue_tokens_max": 4194304, "mode": "temporal"},
            "telemetry": {"sample_ratio": 0, "otlp_endpoint": "otel:4317"},
        },
        "frontend": {"settings": {"limits": {"max_tokens_max": 16777216}, "telemetry": {"sample_ratio": 1}}},
        "worker": {"settings": {"executor": {"cancel": "unheard"}}, "drainTimeoutSeconds": 0.5},
        "controller": {"replicas": 0},
        "security": {"user": 1000680000, "group": 3000000},
        "imagePullSecrets": [{"name": "regcred"}],
    },
    "digests": {
        "images": {
            "service": {"digest": "sha256:" + "0" * 64, "repository": "localhost:5000/plaserve"},
            "worker": {"digest": "sha256:" + "f" * 64, "tag": "1.2.3"},
        },
    },
    "long-names": {
        "fullnameOverride": "a-name-of-twenty-eight-chars",
        "shards": [{"name": "twelve-chars", "workers": 1000}],
    },
    "long-release": {},
    "named-plaserve": {"frontend": {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}}},
    "monitored": {
        "monitoring": {
            "podMonitor": {"enabled": True, "labels": {"release": "kps"}},
            "rules": {"enabled": True, "labels": {"release": "kps"}},
        },
    },
}
RELEASES = {"long-release": "r" * 53, "named-plaserve": "plaserve"}


def _random_values(seed: int) -> Object:
    """Values that the schema allows, for laws that hold for all of them."""
    draw = random.Random(seed)

    def pod_values() -> Object:
        return {
            "drainTimeoutSeconds": draw.choice([0, 0.25, 20, 300, 3600]),
            "preStopSleepSeconds": draw.choice([0, 1, 30]),
            "graceMarginSeconds": draw.choice([5, 60]),
            "startTimeoutSeconds": draw.choice([5, 61, 7200]),
            "maxUnavailable": draw.choice([1, 2, "10%", "34%"]),
            "spread": draw.choice(["ScheduleAnyway", "DoNotSchedule"]),
        }

    names = draw.sample(["a", "b", "c-1", "west"], draw.randint(1, 3))
    few = draw.randint(1, 4)
    return {
        "shards": [{"name": name, "workers": draw.choice([1, 2, 8, 64])} for name in names],
        "frontend": pod_values()
        | {
            "replicas": draw.randint(1, 6),
            "autoscaling": {"enabled": draw.random() < 0.5, "minReplicas": few, "maxReplicas": few + 2},
            "service": {"headless": draw.random() < 0.5},
        },
        "scheduler": pod_values() | {"replicas": draw.randint(1, 3)},
        "worker": pod_values() | {"backend": draw.choice(["trtllm", "trtllm_torch", "simulated"])},
        "controller": pod_values() | {"replicas": draw.randint(0, 3)},
        "etcd": {"trial": {"enabled": draw.random() < 0.5, "replicas": draw.choice([1, 3, 5])}},
        "probes": {"healthPort": draw.choice([0, 8090]), "periodSeconds": draw.choice([1, 7])},
        "ports": {"grpc": draw.choice([8081, 50051]), "fleet": draw.choice([8082, 9000])},
        "bundle": {
            "source": {name: draw.choice(["pvc", "fetch", "none"]) for name in ROLES},
            "fetch": {"url": "s3://b/x", "checkHost": draw.random() < 0.5},
        },
        "tls": {"frontendSecret": draw.choice(["", "front-tls"])},
    }


RANDOM = {f"random-{seed}": _random_values(seed) for seed in range(5)}
CASES: dict[str, Object] = (
    {"default": {}}
    | {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in EXAMPLES}
    | ODD
    | RANDOM
)


def ask(cases: dict[str, Object], *words: str) -> dict[str, Any]:
    """case -> {template: text}, or the error as text."""
    ran = subprocess.run(
        [sys.executable, __file__, *words],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if ran.returncode:
        raise RuntimeError(f"the renderer ended with {ran.returncode}: {ran.stderr[-2000:]}")
    return json.loads(ran.stdout)  # type: ignore[no-any-return]


@cache
def rendered() -> dict[str, Rendered]:
    """All cases. Every one must render."""
    asked = {
        name: {"values": values, "release": RELEASES.get(name, "demo")} for name, values in CASES.items()
    }
    answers = ask(asked)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    results = {}
    for name, files in answers.items():
        if isinstance(files, str):
            raise RuntimeError(f"case {name}: {files}")
        manifests = [
            each
            for file, text in files.items()
            if file.endswith(".yaml")
            for each in yaml.load_all(text, Loader=loader)
            if each is not None
        ]
        results[name] = Rendered(tuple(manifests), merged(defaults, CASES[name]), asked[name]["release"])
    return results


def _serve() -> None:
    """`lint` as an argument: what `helm lint --strict` finds in each case."""
    import helm_python

    answers: dict[str, Any] = {}
    if sys.argv[1:] == ["lint"]:
        for name, case in json.load(sys.stdin).items():
            report = helm_python.lint(CHART, case["values"], strict=True)
            answers[name] = [each["error"] for each in report["messages"] if each["severity"] > 1]
        json.dump(answers, sys.stdout)
        return
    with helm_python.Chart.load(CHART) as chart:
        for name, case in json.load(sys.stdin).items():
            try:
                chart.validate_schema(case["values"])
                files = chart.render(case["values"], name=case["release"], namespace=NAMESPACE)
                answers[name] = {Path(file).name: text for file, text in files.items()}
            except helm_python.HelmError as error:
                answers[name] = str(error)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    _serve()
