"""Runs the check at start-up under compute-sanitizer, which detects races and accesses out of bounds."""

import os
import re
import shutil
import subprocess
import sys

from bench.gpu.target import Target

COMMAND = [sys.executable, "-m", "tgis.shard.kernels.cuda.check.self_check"]
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
MARGIN_S = 1.0
# An access beyond one tensor would otherwise be inside torch's memory pool.
ENVIRONMENT = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def run_tool(target: Target, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        record = target.recorder.fact if target.is_rehearsal else target.recorder.problem
        record(tool, "there is no compute-sanitizer")
        return
    command = [sanitizer, "--tool", tool, "--target-processes", "all", *COMMAND]
    timeout = max(MARGIN_S, target.seconds_left - MARGIN_S)
    try:
        done = subprocess.run(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        print((error.stdout or b"").decode(errors="replace"))
        target.recorder.problem(tool, f"it did not end in {timeout:.0f} s")
        return
    text = done.stdout.decode(errors="replace")
    print(text)
    match = SUMMARY.search(text)
    if match is None:
        target.recorder.problem(tool, f"it gave no summary, and ended with status {done.returncode}")
    else:
        target.recorder.check(f"{tool} finds nothing", match[1] == "0", match[0])
