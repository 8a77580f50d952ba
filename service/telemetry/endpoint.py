"""The HTTP endpoint that Prometheus scrapes.

One thread serves one scrape at a time, each bounded by a socket timeout, where prometheus_client's own server
starts a thread for every connection and lets it wait for ever.
"""

from __future__ import annotations

import socket
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

SOCKET_TIMEOUT_S = 5.0
POLL_S = 0.1  # how soon a stop is noticed


class _Handler(WSGIRequestHandler):
    timeout = SOCKET_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not news."""


class _Server(WSGIServer):
    request_queue_size = 16

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away or never spoke."""


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class MetricsEndpoint:
    """Listens once constructed. Raises OSError naming the setting where the address can't be had."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        server_class = _ServerV6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, make_wsgi_app(registry), server_class, _Handler)
        except OSError as error:
            raise OSError(
                f"metrics_port: can't listen on {host}:{port} ({error.strerror or error}); "
                "choose another port, or 0 for a free one"
            ) from error
        self._thread = Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="metrics-endpoint", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        """Waits for a scrape in progress, at most its socket timeout."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
