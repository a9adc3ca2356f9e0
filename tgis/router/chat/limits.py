"""Limits for rendering one chat."""

CPU_LIMIT_S = 1.0
MEMORY_BYTES = 256 << 20  # address space, of which Python and Jinja2 take 25 MiB
MAX_PROMPT_BYTES = 4 << 20
# The worker limits its own CPU time; this limit is for a worker that gets no CPU time.
TIMEOUT_S = 30.0
NUM_WORKERS = 2
OUT_OF_MEMORY = 77  # exit status of a worker that has reached MEMORY_BYTES
