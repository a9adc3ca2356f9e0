"""The public gRPC port: the service, its interceptors, health and server options."""
