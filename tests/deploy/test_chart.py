"""The chart, rendered without a cluster: valid manifests, and laws that hold for all values tried.

Values: the defaults, the examples, odd ones, and drawn ones. What a cluster would do with the manifests is
not tested here; deploy/README.md says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("kubernetes_validate", reason="pip install 'plaserve[deploy]'")
pytest.importorskip("helm_python", reason="pip install 'plaserve[deploy]'")

import chart_render as chart
import kubernetes_validate
from chart_render import CASES, Object, Rendered, main, ours, pod, role
from kubernetes_validate import utils as kubernetes_schemas

from service.policies import make_controller
from service.rpc.tls import is_local
from service.settings import PREFIX, load_settings
from service.wiring_fleet import place_of

# The oldest that Chart.yaml allows, and those that are current.
OLDEST, *BETWEEN, NEWEST = ("1.30.0", "1.35.0", "1.36.0", "1.37.0")
OPERATOR_KINDS = {"PodMonitor", "PrometheusRule"}  # not of Kubernetes: no schema
GPU_BACKENDS = ("trtllm", "trtllm_torch")


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Rendered:
    return chart.rendered()[request.param]


def named(objects: list[Object]) -> dict[str, Object]:
    return {each["metadata"]["name"]: each for each in objects}


def matches(selector: Object, labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def pod_labels(workload: Object) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]  # type: ignore[no-any-return]


def containers(workload: Object) -> Iterator[tuple[Object, bool]]:
    """Each container, and whether it only initialises."""
    for each in pod(workload).get("initContainers", ()):
        yield each, True
    for each in pod(workload)["containers"]:
        yield each, False


def fewest(case: Rendered, workload: Object) -> int:
    """Replicas, or the least that the autoscaler may leave."""
    for scaler in case.of("HorizontalPodAutoscaler"):
        if scaler["spec"]["scaleTargetRef"]["name"] == workload["metadata"]["name"]:
            assert "replicas" not in workload["spec"]  # else each upgrade would set it back
            return int(scaler["spec"]["minReplicas"])
    return int(workload["spec"]["replicas"])


@functools.cache
def program() -> Any:
    import typer.main

    from service.cli import app

    return typer.main.get_command(app)


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    read = kubernetes_schemas.schema_contents
    kubernetes_schemas.schema_contents = functools.cache(read)
    yield
    kubernetes_schemas.schema_contents = read


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_are_valid(case: Rendered, version: str) -> None:
    for manifest in case.manifests:
        if manifest["kind"] not in OPERATOR_KINDS:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", BETWEEN)
@pytest.mark.parametrize("name", ["default", *(path.stem for path in chart.EXAMPLES)])
def test_manifests_are_valid_in_between(name: str, version: str) -> None:
    test_manifests_are_valid(chart.rendered()[name], version)


def test_lint_finds_nothing() -> None:
    """Helm's own reading of the YAML too, which is stricter than Python's."""
    names = ["default", "fetch-everywhere", "tls-for-clients", "trial-etcd-of-three", "closed-network"]
    names += [path.stem for path in chart.EXAMPLES]
    found = chart.ask({name: {"values": CASES[name]} for name in names}, "lint")
    assert found == {name: [] for name in names}


def test_names_are_unique_and_short_enough(case: Rendered) -> None:
    keys = [(each["kind"], each["metadata"]["name"]) for each in case.manifests]
    assert len(set(keys)) == len(keys)
    assert all(len(name) <= 63 for _, name in keys)
    # A StatefulSet's revision becomes a label: its name, a dash and ten characters.
    assert all(len(each["metadata"]["name"]) <= 52 for each in case.of("StatefulSet"))


# --- processes and their settings ---


def test_processes_are_the_four_commands(case: Rendered) -> None:
    for workload in ours(case.workloads()):
        container = main(workload)
        assert len(pod(workload)["containers"]) == 1
        assert container["command"] == ["plaserve"]
        words = [role(workload)]
        assert container["args"] == words
        program().commands[words[0]].make_context(words[0], [])
    expected = {"frontend", "scheduler", "worker"}
    expected |= {"controller"} if case.values["controller"]["replicas"] else set()
    assert {role(each) for each in ours(case.workloads())} == expected


def test_every_shard_has_front_ends_schedulers_and_workers_of_its_own(case: Rendered) -> None:
    for kind in ("frontend", "scheduler", "worker"):
        found = {
            case.environment(each)["PLASERVE_FLEET__SHARD"]: each
            for each in ours(case.workloads())
            if role(each) == kind
        }
        everywhere = kind == "frontend" and case.values["frontend"]["allShards"]
        assert set(found) == ({"*"} if everywhere else {shard["name"] for shard in case.values["shards"]})
    workers = {s["name"]: s["workers"] for s in case.values["shards"]}
    assert {name: each["spec"]["replicas"] for name, each in found.items()} == workers


def test_settings_are_known_and_good(case: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service itself reads them, and would start: its links are TLS, and it listens where it is asked."""
    ports = case.values["ports"]
    for workload in ours(case.workloads()):
        with monkeypatch.context() as patch:
            for variable, value in case.environment(workload).items():
                patch.setenv(variable, value)
            for each in main(workload)["env"]:
                if "secretKeyRef" in each.get("valueFrom", {}):
                    patch.setenv(each["name"], "secret")
            settings = load_settings()
        place = place_of(settings.fleet, role(workload))
        assert place.tls is not None
        if role(workload) == "frontend":
            assert settings.server.port == ports["grpc"]
            assert not is_local(f"{settings.server.host}:1")
        else:
            assert not is_local(settings.fleet.listen)
            assert place.address(ports["fleet"]) == f"{settings.fleet.advertise}:{ports['fleet']}"
            assert settings.fleet.listen.endswith(f":{ports['fleet']}")
        assert settings.fleet.membership == "etcd"
        # A front end reads text as the bundle of this backend has it.
        assert settings.engine.backend == case.values["worker"]["backend"]
        assert settings.server.drain_timeout_s == case.values[role(workload)]["drainTimeoutSeconds"]
        if role(workload) == "controller":
            moves = make_controller(settings.policy, settings.scheduler) is not None
            assert moves or len(case.values["shards"]) > 1  # else it has nothing to do


def test_settings_of_a_role_win_over_common_ones() -> None:
    case = chart.rendered()["settings"]
    found = {role(each): case.environment(each) for each in ours(case.workloads())}
    assert found["frontend"]["PLASERVE_TELEMETRY__SAMPLE_RATIO"] == "1"
    assert found["worker"]["PLASERVE_TELEMETRY__SAMPLE_RATIO"] == "0"
    assert found["frontend"]["PLASERVE_LIMITS__MAX_TOKENS_MAX"] == "16777216"  # and not 1.6777216e+07
    assert found["worker"]["PLASERVE_EXECUTOR__CANCEL"] == "unheard"


def test_processes_tell_others_an_address_that_is_theirs(case: Rendered) -> None:
    for workload in ours(case.workloads()):
        host = case.environment(workload)["PLASERVE_FLEET__ADVERTISE"]
        assert host == ("[$(POD_IP)]" if case.values["ipFamily"] == "IPv6" else "$(POD_IP)")
        names = [each["name"] for each in main(workload)["env"]]
        fields = {each["name"]: each["valueFrom"] for each in main(workload)["env"] if "valueFrom" in each}
        assert fields["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert names.index("POD_IP") < names.index("PLASERVE_FLEET__ADVERTISE")  # or it is not expanded


def test_no_service_variables_reach_the_settings(case: Rendered) -> None:
    """Kubernetes gives pods FRONTEND_PORT and the like for each Service of a namespace."""
    assert all(pod(each)["enableServiceLinks"] is False for each in case.workloads())


def test_service_variables_would_be_bad_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why they are off: a Service named plaserve-... has variables with the prefix of our settings."""
    services = named(chart.rendered()["named-plaserve"].of("Service"))
    variable = min(services).upper().replace("-", "_") + "_SERVICE_HOST"
    assert variable.startswith(PREFIX)
    monkeypatch.setenv(variable, "10.0.0.1")
    with pytest.raises(Exception, match=variable):
        load_settings()


def test_pods_restart_when_their_settings_change() -> None:
    def sums(name: str) -> dict[str, str]:
        return {
            role(each): each["spec"]["template"]["metadata"]["annotations"]["checksum/settings"]
            for each in ours(chart.rendered()[name].workloads())
        }

    before, after = sums("default"), sums("settings")
    assert all(before[each] != after[each] for each in after)
    assert before == sums("closed-network")


def test_bundles_are_fetched_by_a_command_that_exists(case: Rendered) -> None:
    for workload in ours(case.workloads()):
        source = case.values["bundle"]["source"][role(workload)]
        mounted = [m for m in main(workload)["volumeMounts"] if m["name"] == "bundle"]
        assert bool(mounted) == (source != "none")
        assert all(m["readOnly"] for m in mounted)
        assert ("PLASERVE_ENGINE__BUNDLE" in case.environment(workload)) == bool(mounted)
        fetching = pod(workload).get("initContainers", [])
        assert len(fetching) == (source == "fetch")
        for each in fetching:
            words = each["args"]
            command: Any = program()
            for word in words[:2]:
                command = command.commands[word]
            given = command.make_context("fetch", list(words[2:])).params
            assert str(given["target"]) == case.values["bundle"]["path"]
            # Without a GPU there is no host to check against; with one it is the worker's own.
            assert given["any_host"] is ("nvidia.com/gpu" not in each["resources"]["limits"])


# --- life and death ---


def test_pods_may_finish_what_they_drain(case: Rendered) -> None:
    for workload in ours(case.workloads()):
        drain_s = float(case.environment(workload)["PLASERVE_SERVER__DRAIN_TIMEOUT_S"])
        sleep_s = main(workload).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert sleep_s == case.values[role(workload)]["preStopSleepSeconds"]
        assert pod(workload)["terminationGracePeriodSeconds"] >= sleep_s + drain_s + 5


def test_front_ends_outlive_their_endpoints() -> None:
    """A load balancer goes on sending for a while after a pod was told to end."""
    front_end = next(e for e in chart.rendered()["default"].workloads() if role(e) == "frontend")
    assert main(front_end)["lifecycle"]["preStop"]["sleep"]["seconds"] > 0


def test_probes_let_a_process_load_and_notice_a_stuck_one(case: Rendered) -> None:
    for workload in ours(case.workloads()):
        container = main(workload)
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        speaks_plain = role(workload) == "frontend" and not case.values["tls"]["frontendSecret"]
        # gRPC probes speak no TLS, and the links of a fleet nothing else.
        health = ports.get("health") or (ports["grpc"] if speaks_plain else None)
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[kind].get("grpc") or container[kind]["tcpSocket"]
            wanted = {"port": health, "service": ""} if health else {"port": "grpc"}
            assert asked == wanted
        start, live = container["startupProbe"], container["livenessProbe"]
        needed_s = case.values[role(workload)]["startTimeoutSeconds"]
        loading_s = case.environment(workload).get("PLASERVE_EXECUTOR__START_TIMEOUT_S")
        assert start["periodSeconds"] * start["failureThreshold"] >= needed_s
        if role(workload) == "frontend":  # it waits for a worker
            loading_s = case.values["worker"]["startTimeoutSeconds"]
        if loading_s is not None:
            assert start["periodSeconds"] * start["failureThreshold"] >= float(loading_s) + 60
        assert live["periodSeconds"] * live["failureThreshold"] >= 30
        assert container["readinessProbe"]["failureThreshold"] < live["failureThreshold"]


def test_budgets_leave_a_quorum(case: Rendered) -> None:
    """Whatever is evicted: somebody of each group stays, and etcd keeps its majority."""
    budgets = case.of("PodDisruptionBudget")
    for workload in case.workloads():
        mine = [b for b in budgets if matches(b["spec"]["selector"]["matchLabels"], pod_labels(workload))]
        pods = fewest(case, workload)
        assert len(mine) == (pods > 1)  # with two budgets nothing could be evicted at all
        for budget in mine:
            away = budget["spec"]["maxUnavailable"]
            if isinstance(away, str):
                away = math.ceil(Fraction(away.removesuffix("%")) / 100 * pods)  # as Kubernetes rounds it
            majority = pods // 2 + 1 if role(workload) == "etcd" else 1
            assert pods - away >= majority or pods <= case.values[role(workload)]["maxUnavailable"]
            assert away >= 1 or pods == 1  # or nodes could never be drained
    for budget in budgets:
        selector = budget["spec"]["selector"]["matchLabels"]
        assert sum(matches(selector, pod_labels(each)) for each in case.workloads()) == 1


def test_a_scheduler_is_there_while_another_is_replaced(case: Rendered) -> None:
    for workload in case.of("Deployment"):
        rolling = workload["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxSurge": 1, "maxUnavailable": 0}


# --- GPUs, images, resources ---


def test_a_worker_asks_for_exactly_one_gpu_and_nobody_else_for_any(case: Rendered) -> None:
    resource = case.values["worker"]["gpu"]["resource"]
    for workload in case.workloads():
        asked = [each["resources"]["limits"].get(resource, 0) for each, _ in containers(workload)]
        on_gpu = role(workload) == "worker" and case.values["worker"]["backend"] in GPU_BACKENDS
        # Containers that initialise run before the main one and hand theirs on: the largest counts.
        assert max(asked) == main(workload)["resources"]["limits"].get(resource, 0) == on_gpu
        selector = pod(workload).get("nodeSelector", {})
        assert (case.values["worker"]["gpu"]["nodeSelector"].items() <= selector.items()) == on_gpu
        assert any(t["key"] == "nvidia.com/gpu" for t in pod(workload).get("tolerations", ())) == on_gpu
        assert ("worker" in main(workload)["image"]) == on_gpu or case is chart.rendered()["digests"]


def test_containers_have_resources_and_shared_memory_fits(case: Rendered) -> None:
    for workload in case.workloads():
        for each, _ in containers(workload):
            assert {"cpu", "memory"} <= each["resources"]["requests"].keys()
            assert "memory" in each["resources"]["limits"]
        if role(workload) == "worker":
            volume = next(v for v in pod(workload)["volumes"] if v["name"] == "shm")["emptyDir"]
            limit = main(workload)["resources"]["limits"]["memory"]
            assert volume["medium"] == "Memory"
            assert size_bytes(volume["sizeLimit"]) < size_bytes(limit)
            assert {"name": "shm", "mountPath": "/dev/shm"} in main(workload)["volumeMounts"]


def size_bytes(quantity: str) -> int:
    units = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    return int(quantity[:-2]) * units[quantity[-2:]]


def test_images_are_named_exactly(case: Rendered) -> None:
    for workload in case.workloads():
        for each, _ in containers(workload):
            name = each["image"].rpartition("/")[2]
            assert "@sha256:" in name or (":" in name and not name.endswith((":latest", ":")))


# --- the examples say what they promise ---


@pytest.mark.parametrize(("name", "workers"), [("node-8gpu", [8]), ("two-shards-64gpu", [32, 32])])
def test_examples_have_the_gpus_of_their_name(name: str, workers: list[int]) -> None:
    case = chart.rendered()[name]
    assert [each["spec"]["replicas"] for each in case.workloads() if role(each) == "worker"] == workers
    assert not [each for each in case.workloads() if role(each) == "etcd"]
