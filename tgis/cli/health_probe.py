"""`health-probe`: asks a running service over HTTP whether it is ready, or alive, for an image without curl.
It is started every few seconds and loads little; exit status 0 or 1, and a line on stderr that says why."""

import http.client
import signal
import ssl
import sys
from ipaddress import ip_address
from typing import Any

import click

from tgis.cli.parameters import HELP_NAMES, parameter
from tgis.config.network import ProbeConfig
from tgis.config.option import declared

MOST_BYTES = 200  # of what is no answer of ours


def ask(config: ProbeConfig) -> tuple[bool, str]:
    """Whether the answer is the good one, and a line that says what was asked and answered.

    Takes no longer than the configured time, whatever the other end does: main thread only."""
    path, host = "/live" if config.live else "/health", _host(config.bind)
    shown = f"[{host}]" if ":" in host else host
    asked = f"{'https' if config.http_tls else 'http'}://{shown}:{config.port}{path}"
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
    raise TimeoutError  # a limit of the socket's would hold for each byte by itself


def _host(bind: str) -> str:
    """An address that leads to who listens there."""
    try:
        address = ip_address(bind)
    except ValueError:
        return bind  # a name
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return bind


def _connection(config: ProbeConfig, host: str) -> http.client.HTTPConnection:
    if not config.http_tls:
        return http.client.HTTPConnection(host, config.port)
    # The certificate names the service as clients know it, seldom loopback, and may be of any authority.
    # Nothing secret is sent, and who could answer here in the service's place could as well end it.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, config.port, context=context)


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    """Status and text."""
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(MOST_BYTES).decode("utf-8", "replace")
    finally:
        connection.close()
    return answer.status, _line(text) or answer.reason


def _line(text: str) -> str:
    """As a part of a line; what the other end says may be anything."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _probe(**values: Any) -> None:
    is_good, reason = ask(ProbeConfig(**values))
    print(reason, file=sys.stderr)
    sys.exit(not is_good)


class _Probe(click.Command):
    """Whose usage errors are one line and status 1, too: Kubernetes knows of no other."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            print(f"error: {' '.join(error.format_message().split())}", file=sys.stderr)
            sys.exit(1)


health_probe = _Probe(
    "health-probe",
    callback=_probe,
    params=[parameter(f, option, hint, is_required=False) for f, option, hint in declared(ProbeConfig)],
    help="Ask the service on this host whether it is ready; exit status 0 or 1.",
    context_settings={"show_default": True, "help_option_names": HELP_NAMES},
)
