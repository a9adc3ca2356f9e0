"""APIs of the router's public ports."""
