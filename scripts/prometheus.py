"""Runs Prometheus to scrape a service, and promtool, for checks and pictures; `scripts/fetch_prometheus.sh`
downloads them."""

import http
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BINARIES = ROOT / ".cache" / "prometheus" / "usr" / "bin"
PROMTOOL, PROMETHEUS = BINARIES / "promtool", BINARIES / "prometheus"
START_S = 60.0
CONFIGURATION = """\
global:
  scrape_interval: 1s
  scrape_timeout: 1s
  evaluation_interval: 1s
{rules}
scrape_configs:
  - job_name: tgis
    static_configs:
      - targets: ["{target}"]
        labels: {{namespace: demo, pod: inference-server-0}}
"""


def promtool(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run promtool; its output is all on stdout."""
    return subprocess.run(
        [PROMTOOL, *arguments],
        input=text,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )


class Prometheus:
    """Run a Prometheus that scrapes `target` every second, in a temporary directory, on a loopback port."""

    def __init__(self, directory: Path, target: str, rules: Path | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        configuration = directory / "prometheus.yml"
        rule_files = f"rule_files: [{rules}]" if rules else ""
        configuration.write_text(CONFIGURATION.format(target=target, rules=rule_files))
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (directory / "log").open("w")
        self._process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={configuration}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> "Prometheus":
        deadline = time.monotonic() + START_S
        while not self._has_scraped():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise RuntimeError(f"Prometheus does not start: {Path(self._log.name).read_text()[-2000:]}")
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current result of a query. Raises RuntimeError with Prometheus' message if it is
        refused."""
        return self._ask("query", query=expression)

    def query_range(self, expression: str, begin: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Return the results over an interval, in seconds since 1970. Raises RuntimeError like `query`."""
        return self._ask("query_range", query=expression, start=begin, end=end, step=step_s)

    def _has_scraped(self) -> bool:
        try:
            return any(one["value"][1] == "1" for one in self.query("up"))
        except OSError:
            return False

    def _ask(self, path: str, **parameters: str | float) -> list[dict[str, Any]]:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310
                result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            if (
                error.code == http.HTTPStatus.SERVICE_UNAVAILABLE
            ):  # it is starting, and its response is not JSON
                raise OSError("Prometheus is not ready") from error
            raise RuntimeError(f"{parameters['query']}: {json.load(error).get('error')}") from error
        return result


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
