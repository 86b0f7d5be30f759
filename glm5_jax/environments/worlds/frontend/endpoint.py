"""A judge behind any OpenAI-compatible endpoint."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax import config, messages

_SECONDS = 600.0  # of an answer


def ask(base_url: str, model: str, key: str = "", max_tokens: int = 2048) -> Any:
    """Returns a `judge.Ask` that sends chat completions at temperature 0.

    Args:
        base_url: of the endpoint, such as http://127.0.0.1:8000/v1.
        model: its name there.
        key: sent as a bearer token, if any.
        max_tokens: of an answer.
    """
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{base_url.rstrip('/')}/chat/completions"

    async def answer(
        history: Sequence[messages.Message], tools: Sequence[Mapping[str, Any]]
    ) -> messages.Message:
        body = {
            "model": model,
            "messages": [_sent(message) for message in history],
            "tools": [*tools],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        said = await asyncio.to_thread(_post, request)
        kept = ("role", "content", "reasoning_content", "tool_calls")
        message = said["choices"][0]["message"]
        return {key: message[key] for key in kept if message.get(key)} | {
            "content": message.get("content") or ""
        }

    return answer


def _post(request: urllib.request.Request) -> Any:
    """Sends a request.

    Raises:
        config.InputError: the endpoint does not answer, or refuses.
    """
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        raise config.InputError(
            f"The judge's endpoint {request.full_url} answers {error.code}: {text}"
        ) from error
    except (OSError, ValueError) as error:
        raise config.InputError(
            f"The judge's endpoint {request.full_url} does not answer: {error}. Start "
            "it, or name another by --base_url."
        ) from error


def _sent(message: messages.Message) -> messages.Message:
    """Returns a message with the arguments of its calls as JSON, as endpoints take."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    turned = []
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments)
        turned.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": turned}
