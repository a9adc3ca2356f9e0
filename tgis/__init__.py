"""Text generation behind gRPC: a router that decides, shards that compute, a launcher that watches over
both."""

import os

__version__ = "0.1.0"

# gRPC would print a line of its own for every failed handshake, past our log; it looks when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
