"""Models in ONNX form, run by ONNX Runtime with this service's cache."""
