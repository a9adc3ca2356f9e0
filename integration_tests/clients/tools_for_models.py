"""Tools that models are asked to call. It needs only pydantic. Each argument has few allowed values, so that
a random model's call ends."""

from typing import Literal

import pydantic


class Forecast(pydantic.BaseModel, extra="forbid"):
    """Return the weather of a city."""

    city: Literal["Bonn", "Rome"]
    days: Literal[1, 2, 3]


class Clock(pydantic.BaseModel, extra="forbid"):
    """Return the time."""

    zone: Literal["UTC", "CET"]


def run_tool(name: str, arguments: str) -> str:
    """Return the tool's result. Raises ValidationError for invalid arguments."""
    called = {"Forecast": Forecast, "Clock": Clock}[name].model_validate_json(arguments)
    return f"{name} of {called.model_dump_json()}"
