"""Reads gRPC's service config, of which this client does the retries and timeouts itself."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from tgis_client.errors import SettingsError
from tgis_client.retries import RetryPolicy


@dataclass(frozen=True)
class MethodConfig:
    """Retries and timeout of a method; None where the service config has none."""

    retry: RetryPolicy | None = None
    timeout_s: float | None = None


class ServiceConfig:
    """Service config, by method. Hedging is not supported: it would send a call several times."""

    def __init__(self, text: str | None) -> None:
        """Read the config's JSON. Raises SettingsError."""
        self._by_name: dict[tuple[str, str], MethodConfig] = {}
        if text is None:
            return
        try:
            for entry in json.loads(text).get("methodConfig", []):
                config = _read_method(entry)
                for name in entry["name"]:
                    self._by_name[name.get("service", ""), name.get("method", "")] = config
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f"the service config cannot be read: {error!r}") from error

    def of_method(self, path: str) -> MethodConfig:
        """Return the config of the method with this path, by the most specific of its names."""
        _, service, method = path.split("/")
        for name in ((service, method), (service, ""), ("", "")):
            if name in self._by_name:
                return self._by_name[name]
        return MethodConfig()


def _read_method(entry: Mapping[str, Any]) -> MethodConfig:
    timeout_s = _seconds(entry["timeout"]) if "timeout" in entry else None
    given = entry.get("retryPolicy")
    return MethodConfig(None if given is None else _read_policy(given), timeout_s)


def _read_policy(given: Mapping[str, Any]) -> RetryPolicy:
    return RetryPolicy(
        max_attempts=int(given["maxAttempts"]),
        initial_backoff_s=_seconds(given["initialBackoff"]),
        max_backoff_s=_seconds(given["maxBackoff"]),
        backoff_multiplier=float(given["backoffMultiplier"]),
        codes=frozenset(grpc.StatusCode[code] for code in given["retryableStatusCodes"]),
    )


def _seconds(text: str) -> float:
    if not text.endswith("s"):
        raise ValueError(f"{text} is no duration")
    return float(text[:-1])
