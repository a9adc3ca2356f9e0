"""Fields of requests: reading bodies, checking parameters and wording refusals."""
