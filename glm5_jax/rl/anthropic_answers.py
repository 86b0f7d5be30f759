"""Turns of a policy as answers to POST /v1/messages, whole or as a stream of events."""

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from glm5_jax import anthropic_form
from glm5_jax import messages as messages_lib
from glm5_jax.inference import requests


def whole(
    message: Mapping[str, Any], completion: requests.Completion, model: str
) -> dict[str, Any]:
    """Returns a turn.

    Args:
      message: the turn in our form.
      completion: of which it was parsed.
      model: name that the answer bears.
    """
    thought = messages_lib.text_of(message, "reasoning_content")
    content = messages_lib.text_of(message, "content")
    texts = (("thinking", thought), ("text", content))
    blocks = [anthropic_form.text_block(kind, text) for kind, text in texts if text]
    calls = [*map(messages_lib.call_of, messages_lib.calls_in(message))]
    for name, arguments in calls:
        id = f"toolu_{secrets.token_hex(8)}"
        blocks.append(anthropic_form.call_block(id, name, arguments))
    reason = "tool_use" if calls else "end_turn"
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": "max_tokens" if completion.finish_reason == "length" else reason,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": len(completion.tokens)},
    }


def events(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yields the events of a whole answer."""
    ends = ("stop_reason", "stop_sequence")
    empty = {"content": [], **dict.fromkeys(ends)}
    yield _event("message_start", message={**answer, **empty})
    for index, block in enumerate(answer["content"]):
        kind = block["type"]
        if kind == "tool_use":
            start = {**block, "input": {}}
            text = json.dumps(block["input"])
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            start, delta = {**block, kind: ""}, {"type": f"{kind}_delta"}
            delta[kind] = block[kind]
        yield _event("content_block_start", index=index, content_block=start)
        yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    delta = {key: answer[key] for key in ends}
    yield _event("message_delta", delta=delta, usage=answer["usage"])
    yield _event("message_stop")


def _event(name: str, **data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n"
