"""Requests for streams over every HTTP API, for clients that do not read them to the end."""

import json

NUM_TOKENS = 150
_OPENAI = {"max_tokens": NUM_TOKENS, "min_tokens": NUM_TOKENS, "stream": True}
_INPUTS = {"inputs": "girl", "parameters": {"max_new_tokens": NUM_TOKENS}}
HTTP_STREAMS = tuple(
    (path, json.dumps(fields))
    for path, fields in (
        ("/v1/chat/completions", {**_OPENAI, "messages": [{"role": "user", "content": "girl"}]}),
        ("/v1/completions", {**_OPENAI, "prompt": "girl"}),
        ("/generate_stream", _INPUTS),
        ("/invocations", {**_INPUTS, "stream": True}),
    )
)
"""Paths and bodies."""
