"""`python -m integration_tests.clients`: run each client, in its environment, against one launched
service."""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from integration_tests.clients.expectations import Served
from integration_tests.clients.gateway import Gateway, launch_gateway
from integration_tests.clients.losses import check_losses
from integration_tests.clients.routing import check_routing
from integration_tests.clients.served import launch_served
from integration_tests.support.service import Client

HERE = Path(__file__).parent
CLIENTS = (
    "openai",
    "langchain-openai",
    "litellm",
    "huggingface_hub",
    "text-generation",
    "langchain-huggingface",
    "botocore",
    "lm-eval",
    "schemathesis",
    "tgis-client",
)
GATEWAY = "smg"
"""Client that starts a gateway in front of services of its own."""
TIMEOUT_S = 900


def main() -> None:
    options = argparse.ArgumentParser("clients", description=__doc__)
    options.add_argument("--environments", type=Path, default=Path(".venv-clients"))
    options.add_argument("--only", default=",".join((*CLIENTS, GATEWAY)), help="clients, separated by commas")
    given = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="clients-") as directory:
        failed = run(Path(directory), given.environments, given.only.split(","))
    print(f"failed: {', '.join(failed)}" if failed else "all clients are served")
    sys.exit(bool(failed))


def run(directory: Path, environments: Path, clients: list[str]) -> list[str]:
    """Run the clients, and return those that failed."""
    failed = []
    direct = [name for name in clients if name != GATEWAY]
    if direct:
        with launch_served(directory / "direct") as (served, client):
            failed += [name for name in direct if not _is_served(name, environments, served, client)]
    if GATEWAY in clients:
        program = environments / GATEWAY / "bin" / "smg"
        with launch_gateway(directory / "gateway", program) as gateway:
            is_served = _is_served(GATEWAY, environments, gateway.served, gateway.services[0])
            if not (is_served and _is_fleet(gateway)):
                failed.append(GATEWAY)
    return failed


def _is_fleet(gateway: Gateway) -> bool:
    """Return True if the services behind a gateway pass the checks as a fleet. They end some services."""
    try:
        check_routing(gateway)
        check_losses(gateway)
    except Exception:
        traceback.print_exc()
        return False
    return True


def _is_served(name: str, environments: Path, served: Served, client: Client) -> bool:
    served.write(description := Path(served.directory).parent / "served.json")
    started = time.monotonic()
    code = _run(environments / name / "bin" / "python", name, description)
    print(f"{name}: {'failed' if code else 'served'} in {time.monotonic() - started:.1f} s", flush=True)
    if code:
        print(*[line for line in client.service.lines if " INFO " not in line][-20:], sep="\n")
    return not code


def _run(python: Path, name: str, description: Path) -> int:
    module = f"integration_tests.clients.use_{name.replace('-', '_')}"
    versions = (HERE / "requirements" / f"{name}.txt").read_text().split()
    print(f"{name}, with {', '.join(versions)}", flush=True)
    return subprocess.run([python, "-m", module, str(description)], timeout=TIMEOUT_S, check=False).returncode


if __name__ == "__main__":
    main()
