"""What the chart's pods may do, who may reach them, and what watches them."""

from __future__ import annotations

import json
import re

import pytest
import yaml

pytest.importorskip("helm_python", reason="pip install 'plaserve[deploy]'")

import chart_render as chart
from chart_render import CASES, Object, Rendered, main, ours, pod, role

ALERTS = chart.ROOT / "deploy" / "alerts.yml"
# Who opens connections to whose gRPC port: front ends submit, schedulers command, front ends take tokens from
# workers, controllers read loads.
CALLERS = {
    "frontend": set(),
    "scheduler": {"frontend", "controller"},
    "worker": {"scheduler", "frontend"},
    "controller": set(),
}


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Rendered:
    return chart.rendered()[request.param]


def all_containers(workload: Object) -> list[Object]:
    return [*pod(workload).get("initContainers", ()), *pod(workload)["containers"]]


def labels(workload: Object) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]  # type: ignore[no-any-return]


def selects(selector: Object, workload: Object) -> bool:
    wanted = selector.get("matchLabels", selector)
    return bool(wanted.items() <= labels(workload).items())


def test_pods_meet_the_restricted_standard(case: Rendered) -> None:
    for workload in case.workloads():
        spec = pod(workload)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in all_containers(workload):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert not any("hostPort" in port for port in each.get("ports", ()))
        allowed = {"emptyDir", "persistentVolumeClaim", "secret"}
        assert all(volume.keys() - {"name"} <= allowed for volume in spec.get("volumes", ()))


def test_nothing_speaks_to_the_kubernetes_api(case: Rendered) -> None:
    (account,) = case.of("ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    for workload in case.workloads():
        assert pod(workload)["automountServiceAccountToken"] is False
        assert pod(workload)["serviceAccountName"] == account["metadata"]["name"]
    kinds = {each["kind"] for each in case.manifests}
    assert not {kind for kind in kinds if kind.endswith(("Role", "RoleBinding"))}


def test_processes_can_write_where_they_work(case: Rendered) -> None:
    """The root file system is read-only: home, var/ and temporary files lie on volumes of the pod."""
    for workload in ours(case.workloads()):
        volumes = {each["name"]: each for each in pod(workload)["volumes"]}
        for container in all_containers(workload):
            mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
            home = next(each["value"] for each in container["env"] if each["name"] == "HOME")
            for path in (home, container["workingDir"], "/tmp"):
                assert "emptyDir" in volumes[mounts[path]["name"]]
                assert not mounts[path].get("readOnly")
            assert {m["name"] for m in mounts.values()} <= volumes.keys()
        log = case.environment(workload).get("PLASERVE_EXECUTOR__LOG", home)
        assert log.startswith(home)


def test_no_process_is_the_first_of_its_namespace(case: Rendered) -> None:
    """A first process ignores SIGTERM until it has a handler, as while it loads; nor does it reap others."""
    assert all(pod(each)["shareProcessNamespace"] is True for each in ours(case.workloads()))


def test_secrets_are_read_only_and_where_the_values_say(case: Rendered) -> None:
    for workload in ours(case.workloads()):
        mounts = {m["mountPath"]: m for m in main(workload)["volumeMounts"]}
        etcd = case.values["etcd"]
        wanted = {
            "links": case.values["tls"]["linksSecret"],
            "etcd": etcd["tlsSecret"] if not etcd["trial"]["enabled"] else "",
        }
        if role(workload) == "frontend":
            wanted["frontend"] = case.values["tls"]["frontendSecret"]
        found = {path.rpartition("/")[2] for path in mounts if path.startswith("/etc/plaserve/tls/")}
        assert found == {name for name, secret in wanted.items() if secret}
        assert all(mounts[f"/etc/plaserve/tls/{name}"]["readOnly"] for name in found)
        environment = case.environment(workload)
        files = [value for value in environment.values() if value.startswith("/etc/plaserve/tls/")]
        assert {value.split("/")[4] for value in files} <= found
        plain = environment.get("PLASERVE_FLEET__ALLOW_PLAINTEXT") == "true"
        assert plain != (environment.get("PLASERVE_FLEET__TLS") == "true")
        assert plain == ("etcd" not in found)


def test_passwords_come_from_secrets_only(case: Rendered) -> None:
    secret = case.values["etcd"]["passwordSecret"]
    for workload in ours(case.workloads()):
        refs = {e["name"]: e.get("valueFrom", {}) for e in main(workload)["env"]}
        for name in ("PLASERVE_FLEET__USERNAME", "PLASERVE_FLEET__PASSWORD"):
            assert name not in case.environment(workload)
            assert refs.get(name, {}).get("secretKeyRef", {}).get("name", "") == secret


# --- selectors ---


def test_selectors_hold_their_own_pods_and_no_others(case: Rendered) -> None:
    for workload in case.workloads():
        selector = workload["spec"]["selector"]["matchLabels"]
        assert [each for each in case.workloads() if selects(selector, each)] == [workload]
        for spread in pod(workload).get("topologySpreadConstraints", ()):
            assert selects(spread["labelSelector"], workload)


def test_services_lead_to_ports_that_are_there(case: Rendered) -> None:
    for service in case.of("Service"):
        targets = [each for each in case.workloads() if selects(service["spec"]["selector"], each)]
        assert len(targets) == 1 or {role(each) for each in targets} == {"frontend"}
        for target in targets:
            names = {port["name"] for port in main(target)["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    clients = [s for s in case.of("Service") if "frontend" in s["spec"]["selector"].values()]
    shards = len(case.values["shards"])
    assert len(clients) == (1 + shards if shards > 1 else 1)
    headless = {s["metadata"]["name"] for s in case.of("Service") if s["spec"].get("clusterIP") == "None"}
    assert {each["spec"]["serviceName"] for each in case.of("StatefulSet")} <= headless


def test_the_etcd_of_a_trial_is_the_one_that_is_asked(case: Rendered) -> None:
    for workload in ours(case.workloads()):
        asked = json.loads(case.environment(workload)["PLASERVE_FLEET__ENDPOINTS"])
        if not case.values["etcd"]["trial"]["enabled"]:
            assert asked == case.values["etcd"]["endpoints"]
            continue
        (address,) = asked
        host, _, port = address.partition(":")
        service = next(s for s in case.of("Service") if s["metadata"]["name"] == host.split(".")[0])
        assert host.split(".")[1:] == [chart.NAMESPACE, "svc"]
        assert int(port) in {p["port"] for p in service["spec"]["ports"]}
    for etcd in (each for each in case.workloads() if role(each) == "etcd"):
        flags = dict(word.removeprefix("--").split("=", 1) for word in main(etcd)["args"])
        members = dict(each.split("=", 1) for each in flags["initial-cluster"].split(","))
        assert len(members) == etcd["spec"]["replicas"]
        for name, url in members.items():
            assert flags["initial-advertise-peer-urls"].replace("$(POD_NAME)", name) == url
        # Epochs come from its revision: it must not begin anew with its pod.
        (claim,) = etcd["spec"]["volumeClaimTemplates"]
        mount = next(m for m in main(etcd)["volumeMounts"] if m["name"] == claim["metadata"]["name"])
        assert flags["data-dir"].startswith(mount["mountPath"])


# --- network ---


def callers_of(case: Rendered, workload: Object, port: int) -> tuple[set[str], list[Object], bool]:
    """Roles that may call the port, other peers, and whether anybody may."""
    roles: set[str] = set()
    others: list[Object] = []
    for policy in case.of("NetworkPolicy"):
        if not selects(policy["spec"]["podSelector"], workload):
            continue
        for rule in policy["spec"]["ingress"]:
            if port not in {each["port"] for each in rule["ports"]}:
                continue
            if "from" not in rule:
                return roles, others, True
            assert rule["from"]  # an empty list would be anybody
            for peer in rule["from"]:
                found = {role(w) for w in case.workloads() if selects(peer.get("podSelector", {"": ""}), w)}
                roles |= found
                if "app.kubernetes.io/component" not in str(peer):
                    others.append(peer)
    return roles, others, False


def test_every_served_port_has_its_callers(case: Rendered) -> None:
    policy = case.values["networkPolicy"]
    if not policy["enabled"]:
        assert not case.of("NetworkPolicy")
        return
    monitoring = {"kubernetes.io/metadata.name": policy["monitoringNamespace"]}
    there = {role(each) for each in case.workloads()}
    for workload in case.workloads():
        governed = [p for p in case.of("NetworkPolicy") if selects(p["spec"]["podSelector"], workload)]
        assert governed  # without one everything would be open
        assert all(p["spec"]["policyTypes"] == ["Ingress"] for p in governed)
        for port in main(workload)["ports"]:
            roles, others, anybody = callers_of(case, workload, port["containerPort"])
            if port["name"] == "health":  # for the node's probes, which no policy keeps out
                assert (roles, others, anybody) == (set(), [], False)
            elif port["name"].endswith("metrics"):
                assert (roles, anybody) == (set(), False)
                assert others == [{"namespaceSelector": {"matchLabels": monitoring}}]
            elif role(workload) == "etcd":
                wanted = set(chart.ROLES) if port["name"] == "client" else {"etcd"}
                assert (roles, others, anybody) == (wanted & there, [], False)
            else:
                assert anybody == (role(workload) == "frontend" and not policy["clients"])
                if not anybody:
                    assert roles == CALLERS[role(workload)] & there
                    extra = {"frontend": policy["clients"], "controller": policy["operators"]}
                    assert others == extra.get(role(workload), [])


# --- monitoring ---


def test_the_scrape_job_is_the_one_that_alerts_ask_for() -> None:
    case = chart.rendered()["monitored"]
    (monitor,) = case.of("PodMonitor")
    jobs = set(re.findall(r'job="([^"]+)"', ALERTS.read_text(encoding="utf-8")))
    for workload in ours(case.workloads()):
        assert selects(monitor["spec"]["selector"], workload)
        assert {labels(workload)[monitor["spec"]["jobLabel"]]} == jobs
        names = {port["name"] for port in main(workload)["ports"]}
        assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} <= names
        assert labels(workload).keys() >= set(monitor["spec"]["podTargetLabels"]) - {"plaserve-shard"}
    assert monitor["metadata"]["labels"]["release"] == "kps"


def test_the_rules_are_those_of_the_alert_file() -> None:
    (rule,) = chart.rendered()["monitored"].of("PrometheusRule")
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    assert not chart.rendered()["default"].of("PrometheusRule", "PodMonitor")
