"""Text generation behind gRPC: a router schedules, shards compute, and a launcher starts and watches both."""

import os

__version__ = "0.1.0"

# Otherwise gRPC prints a line for every failed handshake, outside the service's log. It reads the variable
# when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
