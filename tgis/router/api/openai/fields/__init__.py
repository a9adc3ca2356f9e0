"""Fields of requests that several routes have, and what they mean."""
