"""The router: an asyncio process that owns requests, text, cache blocks and the schedule. It uses no
torch."""
