"""The gRPC API of vLLM's engine, `vllm.grpc.engine.VllmEngine`, which the Shepherd Model Gateway calls."""
