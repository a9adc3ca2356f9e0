"""Asyncio process that owns requests, text, blocks and the schedule; no torch."""
