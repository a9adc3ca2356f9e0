"""Client in a separate process, which is to be killed."""

from pathlib import Path
from typing import Any

import grpc

from tgis.pb import generation_pb2 as pb
from tgis.pb.generation_pb2_grpc import GenerationServiceStub


def open_streams(address: str, directory: str, count: int) -> list[Any]:
    """Open streams, and return when each has its first message. `directory` contains the CA, key and
    certificate as PEM files."""
    ca, key, chain = ((Path(directory) / f"{name}.pem").read_bytes() for name in ("ca", "key", "chain"))
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, chain))
    stub = GenerationServiceStub(channel)
    params = pb.Parameters(stopping=pb.StoppingCriteria(max_new_tokens=150, min_new_tokens=150))
    streams = []
    for _ in range(count):
        request = pb.GenerationRequest(text="girl")
        stream = stub.GenerateStream(pb.SingleGenerationRequest(request=request, params=params))
        next(stream)
        streams.append(stream)
    return streams
