"""Parts that APIs over gRPC share: interceptors, health and server options."""
