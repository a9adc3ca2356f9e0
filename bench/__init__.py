"""`python -m bench` measures the service as a client sees it, beside transformers and the machine's limit."""
