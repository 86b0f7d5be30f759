"""Tells which requests belong together: the key that keeps them on one replica."""

import json
from collections.abc import Mapping
from typing import Any

HEADER = "x-session-id"
_NUM_IDS = 64  # a page of the cache
_NUM_LETTERS = 256


def key_of(headers: Mapping[str, str], body: bytes) -> str:
    """Returns the key of a request.

    It is the first of these that the request has: the header X-Session-ID; the body's
    prompt_cache_key, user or metadata.user_id; the conversation's beginning, which is
    its system prompt and first message, or the first ids or letters of a prompt; the
    body itself.

    Args:
      headers: with names in lower case.
      body: as the client sent it, not necessarily JSON.
    """
    if named := headers.get(HEADER):
        return f"session {named}"
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return f"body {body.hex()}"
    metadata = fields.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    for name in (fields.get("prompt_cache_key"), fields.get("user"), user_id):
        if isinstance(name, str) and name:
            return f"user {name}"
    return f"beginning {_beginning(fields)}"


def _beginning(fields: Mapping[str, Any]) -> str:
    """Returns what later requests of the same conversation begin with, too."""
    first: list[Any] = [fields.get("system"), fields.get("instructions")]
    said = fields.get("messages") or fields.get("input")
    if isinstance(said, list) and said and isinstance(said[0], dict):
        is_user = [m.get("role") == "user" if isinstance(m, dict) else 0 for m in said]
        end = is_user.index(True) + 1 if True in is_user else len(said)
        first += said[:end]
    else:
        prompt = said or fields.get("token_ids") or fields.get("prompt")
        if isinstance(prompt, list):
            first.append(prompt[:_NUM_IDS])
        else:
            first.append(str(prompt)[:_NUM_LETTERS])
    return json.dumps(first, sort_keys=True)
