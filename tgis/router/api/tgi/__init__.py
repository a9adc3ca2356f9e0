"""Hugging Face TGI's API."""
