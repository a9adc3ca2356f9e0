"""Hub over real sockets: the part of its API that a download uses, and its possible failures.

Like the real hub, it stores large files on another host; `requests` has the requests to both."""

import hashlib
import json
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = (".bin", ".safetensors", ".model")


@dataclass
class Repo:
    """Files of each revision. A branch maps to a commit."""

    files: dict[str, bytes]
    commit: str = "c0ffee" + 34 * "0"
    branches: tuple[str, ...] = ("main",)
    needs_token: str | None = None
    error_code: str | None = None
    """Error code that is sent with status 403 instead of an answer, such as GatedRepo."""


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: str | None


Fault = Callable[
    ["_Handler", bytes], None
]  # functions that answer in place of the content, of which they get the requested part


@dataclass
class Hub:
    """Repositories, failures of a file's next answers, and received requests."""

    repos: dict[str, Repo] = field(default_factory=dict)
    faults: dict[str, deque[Fault]] = field(default_factory=dict)
    hidden_sizes: bool = False
    wrong_sums: dict[str, str] = field(default_factory=dict)
    xet: bool = False
    requests: list[Request] = field(default_factory=list)
    stored: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def __enter__(self) -> "Hub":
        self._servers = [_Server(("127.0.0.1", 0), _Handler) for _ in range(2)]
        for server in self._servers:
            server.hub = self
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def endpoint(self) -> str:
        return f"http://localhost:{self._servers[0].server_port}"

    @property
    def store(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def asked(self, method: str, name: str) -> list[Request]:
        """Return the requests whose address ends with `name`."""
        return [one for one in self.requests if one.method == method and one.path.endswith(name)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub

    def handle_error(self, request: object, address: object) -> None:
        """Ignore errors, because clients that disconnect are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        if path.startswith("/stored/"):
            name, content = hub.stored[path.removeprefix("/stored/").split("/")[0]]
            self._send_content(name, content)
        elif match := re.fullmatch(r"/api/models/(.+?)(?:/revision/([^/]+))?", path):
            self._describe(match[1], match[2] or "main")
        elif match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self.reply(404)

    def _find(self, name: str, revision: str) -> Repo | None:
        """Return the repository, or answer with an error."""
        repo = self.server.hub.repos.get(name)
        if repo is None:
            self.reply(401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif repo.needs_token and self.headers.get("Authorization") != f"Bearer {repo.needs_token}":
            self.reply(401, X_Error_Message="Invalid credentials in Authorization header")
        elif repo.error_code:
            self.reply(403, X_Error_Code=repo.error_code, X_Error_Message="Ask for access")
        elif revision not in (repo.commit, *repo.branches):
            self.reply(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        else:
            return repo
        return None

    def _describe(self, name: str, revision: str) -> None:
        if self._fails(name):
            return
        if repo := self._find(name, revision):
            siblings = [{"rfilename": file} for file in repo.files]
            content = {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": []}
            self.reply(200, json.dumps(content).encode(), Content_Type="application/json")

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo, hub = self._find(name, revision), self.server.hub
        if repo is None:
            return
        content = repo.files.get(file)
        if content is None:
            self.reply(404, X_Error_Code="EntryNotFound")
            return
        header = {"X_Repo_Commit": repo.commit}
        if not file.endswith(LARGE):
            sum_of_git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            self._send_content(file, content, ETag=f'"{hub.wrong_sums.get(file, sum_of_git)}"', **header)
            return
        digest = hub.wrong_sums.get(file, hashlib.sha256(content).hexdigest())
        hub.stored[digest] = (file, content)
        header |= {
            "X_Linked_Etag": f'"{digest}"',
            "Location": f"{hub.store}/stored/{digest}/{file}?sig=SECRET",
        }
        if not hub.hidden_sizes:
            header["X_Linked_Size"] = str(len(content))
        if hub.xet:
            header |= {"X_Xet_Hash": digest, "Link": f'<{hub.endpoint}/xet/token>; rel="xet-auth"'}
        self.reply(302, **header)

    def _send_content(self, name: str, content: bytes, **headers: str) -> None:
        """Send all of the content, or the rest from the requested position on."""
        if self.command == "GET" and self._fails(name, content):
            return
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if not first or self.command == "HEAD":
            self.reply(200, content if self.command == "GET" else b"", **self._length(content), **headers)
            return
        begin, size = int(first[1]), len(content)
        self.reply(206, content[begin:], Content_Range=f"bytes {begin}-{size - 1}/{size}", **headers)

    def _length(self, content: bytes) -> dict[str, str]:
        return {"Content_Length": str(len(content))}

    def _fails(self, name: str, content: bytes = b"") -> bool:
        if not (faults := self.server.hub.faults.get(name)):
            return False
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        faults.popleft()(self, content[int(first[1]) if first else 0 :])
        return True


def cut_after(num_bytes: int, reset: bool = False) -> Fault:
    """Return a failure that ends the connection in the middle, either orderly or by a reset."""

    def answer(handler: _Handler, content: bytes) -> None:
        is_rest = bool(handler.headers.get("Range"))
        handler.send_response(206 if is_rest else 200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[:num_bytes])
        handler.wfile.flush()
        if reset:
            linger = struct.pack("ii", 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.close_connection = True

    return answer


def status(code: int) -> Fault:
    return lambda handler, content: handler.reply(code)


def other_bytes(handler: _Handler, content: bytes) -> None:
    """Send the right number of wrong bytes."""
    handler.reply(200, content[:-1] + bytes([content[-1] ^ 1]))


def fewer_bytes(handler: _Handler, content: bytes) -> None:
    """Send fewer bytes than the file has, with a matching length."""
    handler.reply(200, content[:-10])


def hold(begun: threading.Event, num_bytes: int) -> Fault:
    """Return a failure that sends some bytes and then nothing for a long time."""

    def answer(handler: _Handler, content: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[:num_bytes])
        handler.wfile.flush()
        begun.set()
        handler.connection.settimeout(20)
        handler.connection.recv(1)

    return answer
