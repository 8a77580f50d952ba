"""The etcd of the tests: `service.bench.etcd`, under the name by which tests import it."""

from __future__ import annotations

from service.bench.etcd import MISSING, EtcdServer, find_etcd, free_ports, running_cluster, running_etcd

__all__ = ["MISSING", "EtcdServer", "find_etcd", "free_ports", "running_cluster", "running_etcd"]
