"""Options of vLLM that the launcher reads with `--compat vllm`."""
