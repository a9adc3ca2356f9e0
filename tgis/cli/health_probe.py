"""Implements `health-probe`, which asks a running service over HTTP if it is ready or alive.

It serves images without curl. It is started every few seconds, so it imports little."""

import http.client
import signal
import ssl
import sys

from tgis.cli.command import command
from tgis.config.network import ProbeConfig
from tgis.net.addresses import http_url, local_host

MOST_BYTES = 200  # bytes read of an answer, which may come from another program


def ask(config: ProbeConfig) -> tuple[bool, str]:
    """Return True if the service answered with status 200, and a line with the URL and the answer.

    A signal limits it to the configured time, so only the main thread may call it."""
    path, host = "/live" if config.live else "/health", local_host(config.bind)
    asked = http_url(host, config.port, config.http_tls) + path
    signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, config.timeout)
    try:
        status, text = _get(_connection(config, host), path)
    except TimeoutError:
        return False, f"{asked}: no answer within {config.timeout:g} s"
    except (OSError, http.client.HTTPException) as error:
        return False, f"{asked}: {_line(str(error)) or type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return status == 200, f"{asked}: {status} {text}"


def _give_up(*_: object) -> None:
    raise TimeoutError  # a socket's timeout would apply to each read, not to the whole answer


def _connection(config: ProbeConfig, host: str) -> http.client.HTTPConnection:
    if not config.http_tls:
        return http.client.HTTPConnection(host, config.port)
    # The certificate carries the service's public name, seldom loopback, and any authority may have signed
    # it. The probe sends nothing secret, and a process that could answer in the service's place could also
    # kill it.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, config.port, context=context)


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(MOST_BYTES).decode("utf-8", "replace")
    finally:
        connection.close()
    return answer.status, _line(text) or answer.reason


def _line(text: str) -> str:
    """Replace unprintable characters by spaces, because the other end may send anything."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _probe(config: ProbeConfig) -> None:
    is_good, reason = ask(config)
    print(reason, file=sys.stderr)
    sys.exit(not is_good)


health_probe = command(
    "health-probe",
    _probe,
    "Ask the service on this host whether it is ready; exit status 0 or 1.",
    ProbeConfig,
)
health_probe.usage_exit_code = 1  # Kubernetes expects 0 or 1
