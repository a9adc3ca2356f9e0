"""Speculators: small models that propose a sequence's next tokens from the served model's last states."""
