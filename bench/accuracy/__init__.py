"""Measures the accuracy of precisions on real models, compared with float32, through the service."""
