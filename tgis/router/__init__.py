"""Runs the router, an asyncio process that owns requests, text, cache blocks and the schedule. It does not
use torch."""
