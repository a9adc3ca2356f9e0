"""`schemathesis` with the OpenAPI document: its generated requests get responses, and never a 5xx."""

import subprocess
import sys
from pathlib import Path

from integration_tests.clients.expectations import Check, Served, run

CHECKED = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "response_headers_conformance,unsupported_method,allow_header_conformance"
)
SEED, NUM_EXAMPLES = "23", "60"


def made_up_requests_are_answered(served: Served) -> None:
    root = served.base_url.removesuffix("/v1")
    program = Path(sys.executable).with_name("schemathesis")
    command = [
        str(program),
        "run",
        f"{root}/openapi.json",
        "--header",
        f"authorization: Bearer {served.api_key}",
    ]
    command += ["--checks", CHECKED, "--seed", SEED, "--max-examples", NUM_EXAMPLES, "--no-color"]
    command += ["--request-timeout", "30", "--phases", "examples,coverage,fuzzing", "--warnings", "off"]
    subprocess.run(command, check=True)


CHECKS: list[Check] = [made_up_requests_are_answered]

if __name__ == "__main__":
    run(CHECKS)
