"""Simulates the API server of a cluster with one pod: lists and watches it, and refuses everything else."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from integration_tests.deployment.manifests.rendering import Object

WATCH_S = 30.0


class ApiServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, namespace: str, pod: Object) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self.pod = pod
        self.is_deleted = threading.Event()
        self.selectors: set[str] = set()
        self.refused: list[str] = []

    def delete_pod(self) -> None:
        """Begin the pod's end, as `kubectl delete` does."""
        metadata = {
            **self.pod["metadata"],
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "resourceVersion": "2",
        }
        self.pod = {**self.pod, "metadata": metadata}
        self.is_deleted.set()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if url.path != self.server.path:
            self.server.refused.append(self.path)
            self.send_error(403)
        elif "watch" in query:
            self._watch()
        else:
            self.server.selectors |= {*query.get("labelSelector", [])}
            listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
            self._begin(
                "content-length", str(len(body := json.dumps({**listed, "items": [self.server.pod]})))
            )
            self.wfile.write(body.encode())

    def _watch(self) -> None:
        self._begin("connection", "close")
        if self.server.is_deleted.wait(WATCH_S):
            event = {"type": "MODIFIED", "object": self.server.pod}
            self.wfile.write(json.dumps(event).encode() + b"\n")

    def _begin(self, name: str, value: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header(name, value)
        self.end_headers()


@contextmanager
def serve_pod(namespace: str, labels: dict[str, str]) -> Iterator[ApiServer]:
    """Serve a ready pod with these labels on loopback."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "a",
            "namespace": namespace,
            "uid": "1",
            "resourceVersion": "1",
            "labels": labels,
        },
        "spec": {"containers": [{"name": "server"}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    with ApiServer(namespace, pod) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()


def write_kubeconfig(server: ApiServer, path: Path) -> None:
    cluster = {"server": f"http://127.0.0.1:{server.server_port}"}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "a",
        "clusters": [{"name": "a", "cluster": cluster}],
        "users": [{"name": "a", "user": {}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
    }
    path.write_text(json.dumps(config))
