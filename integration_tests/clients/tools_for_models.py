"""Tools that models are asked to call. Needs pydantic alone. Each value that they take is one of a few, so
that a model that knows nothing comes to an end."""

from typing import Literal

import pydantic


class Forecast(pydantic.BaseModel, extra="forbid"):
    """Tell the weather of a city."""

    city: Literal["Bonn", "Rome"]
    days: Literal[1, 2, 3]


class Clock(pydantic.BaseModel, extra="forbid"):
    """Tell the time."""

    zone: Literal["UTC", "CET"]


def run_tool(name: str, arguments: str) -> str:
    """Return what the tool says. Raises ValidationError for arguments that it does not take."""
    called = {"Forecast": Forecast, "Clock": Clock}[name].model_validate_json(arguments)
    return f"{name} of {called.model_dump_json()}"
