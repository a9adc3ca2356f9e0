"""Runs a gRPC server that only streams one message repeatedly, to measure gRPC's limit for a router worker.
It is a server, which load processes cannot replace. Several share the port: `python -m bench.raw_grpc
PORT`."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from bench.api_clients import METHOD
from tgis.pb import generation_pb2 as pb

MODULE = "bench.raw_grpc"


class _Handler(grpc.GenericRpcHandler):
    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method != METHOD:
            return None
        return grpc.unary_stream_rpc_method_handler(_stream, pb.SingleGenerationRequest.FromString)


async def _stream(request: pb.SingleGenerationRequest, _: Any) -> AsyncIterator[bytes]:
    new_tokens = request.params.stopping.max_new_tokens
    message = pb.GenerationResponse(text="a", generated_token_count=1).SerializeToString()
    for _ in range(new_tokens - 1):
        yield message
    yield pb.GenerationResponse(text="a", generated_token_count=new_tokens).SerializeToString()


async def _serve(port: int) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 1)])
    server.add_generic_rpc_handlers((_Handler(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(f"serving gRPC on 127.0.0.1:{port}, HTTP on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
