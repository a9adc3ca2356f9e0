"""Implements `health-probe`, which checks over HTTP whether a running service is ready or alive.

It is for images without curl. It is started every few seconds, so it imports little."""

import http.client
import signal
import ssl
import sys

from tgis.cli.command import command
from tgis.config.network import ProbeConfig
from tgis.net.addresses import http_url, local_host

MAX_RESPONSE_BYTES = 200  # another program may respond, with any length


def ask(config: ProbeConfig) -> tuple[bool, str]:
    """Return whether the service responded with status 200, and a line with the URL and the response.

    The time limit uses a signal, so only the main thread may call this function."""
    path = "/live" if config.live else "/health"
    host = local_host(config.bind)
    url = http_url(host, config.port, config.http_tls) + path
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, config.timeout)
    try:
        status, text = _get(_connection(config, host), path)
    except TimeoutError:
        return False, f"{url}: no response within {config.timeout:g} s"
    except (OSError, http.client.HTTPException) as error:
        return False, f"{url}: {_line(str(error)) or type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return status == 200, f"{url}: {status} {text}"


def _give_up(*_: object) -> None:
    raise TimeoutError  # a socket's timeout would apply to each read, not to the whole response


def _connection(config: ProbeConfig, host: str) -> http.client.HTTPConnection:
    if not config.http_tls:
        return http.client.HTTPConnection(host, config.port)
    # The certificate is for the service's public name, rarely for loopback, and any CA may have signed it.
    # The probe sends no secrets, and a process that could impersonate the service could also kill it.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, config.port, context=context)


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read(MAX_RESPONSE_BYTES).decode("utf-8", "replace")
    finally:
        connection.close()
    return response.status, _line(text) or response.reason


def _line(text: str) -> str:
    """Replace unprintable characters with spaces: the server may send any bytes."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _probe(config: ProbeConfig) -> None:
    is_healthy, line = ask(config)
    print(line, file=sys.stderr)
    sys.exit(not is_healthy)


health_probe = command(
    "health-probe",
    _probe,
    "Check whether the service on this host is ready; exit with 0 if it is, else with 1.",
    ProbeConfig,
)
health_probe.usage_exit_code = 1  # Kubernetes expects 0 or 1
