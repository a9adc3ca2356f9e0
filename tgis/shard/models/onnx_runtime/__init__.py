"""Models in ONNX form that ONNX Runtime runs with this service's cache."""
