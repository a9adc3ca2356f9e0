"""Defines what a load process does in one run, as it is sent to the process."""

from dataclasses import asdict, dataclass
from typing import Any

from tgis.load.apis.interface import LoadTarget
from tgis.load.workload.conversations import TokenScale, Workload, as_workload


@dataclass(frozen=True, kw_only=True)
class LoadJob:
    """Share of one run that a process has."""

    api: str
    target: LoadTarget
    workload: Workload
    scale: TokenScale
    first_index: int
    """Number of the process's first conversation."""
    step: int
    """Distance of the numbers of its conversations."""
    warm_up: int
    """Number of conversations before the run, which are not recorded."""
    concurrency: int = 0
    """Closed loop: number of conversations at a time; 0: open loop."""
    num_conversations: int | None = None
    """Closed loop: number of conversations; None: as many as the duration allows."""
    duration_s: float | None = None
    """Closed loop: time after which none begins."""
    schedule: tuple[float, ...] = ()
    """Open loop: intended send times."""
    timeout_s: float = 600.0
    error_pause_s: float = 0.0
    """Closed loop: time for which a client waits after a failure."""
    keeps_texts: bool = False
    """True to keep digests of the answers."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "LoadJob":
        read = {
            "target": LoadTarget(**fields["target"]),
            "workload": as_workload(fields["workload"]),
            "scale": TokenScale(**fields["scale"]),
            "schedule": tuple(fields["schedule"]),
        }
        return cls(**{**fields, **read})
