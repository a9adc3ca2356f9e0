"""Text generation behind gRPC: a router that decides, shards that compute, a launcher that watches over
both."""

__version__ = "0.1.0"
