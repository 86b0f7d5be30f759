"""A model behind any OpenAI-compatible endpoint, as judge or as author."""

import asyncio
import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from glm5_jax import config, messages

Ask = Callable[
    [Sequence[messages.Message], Sequence[Mapping[str, Any]]],
    Awaitable[messages.Message],
]
_SECONDS = 600.0  # of an answer
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers that are worth another try
_REFUSED = (400, 413, 422)  # of this request, such as one that is too long
_BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", re.DOTALL)


class RefusedError(config.InputError):
    """The endpoint answers, but not to this request."""


def ask(
    base_url: str,
    model: str,
    key: str = "",
    max_tokens: int = 2048,
    temperature: float = 0.0,
    waits: Sequence[float] = (),
) -> Ask:
    """Returns a function that sends messages and tools, and returns a model's turn.

    It raises config.InputError if the endpoint does not answer, or refuses.

    Args:
        base_url: of the endpoint, such as http://127.0.0.1:8000/v1.
        model: its name there.
        key: sent as a bearer token, if any.
        max_tokens: of an answer.
        temperature: of the sampling.
        waits: seconds before each further try, while the endpoint is busy or away.
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
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        body |= {"tools": [*tools]} if tools else {}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        for wait in waits:
            try:
                said = await asyncio.to_thread(_post, request)
                break
            except _BusyError:
                await asyncio.sleep(wait)
        else:
            said = await asyncio.to_thread(_post, request)
        kept = ("role", "content", "reasoning_content", "tool_calls")
        message = said["choices"][0]["message"]
        return {key: message[key] for key in kept if message.get(key)} | {
            "content": message.get("content") or ""
        }

    return answer


class _BusyError(config.InputError):
    """The endpoint may answer later."""


def _post(request: urllib.request.Request) -> Any:
    """Sends a request.

    Raises:
        config.InputError: the endpoint does not answer, or refuses.
    """
    url = request.full_url
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            said = json.load(answer)
        said["choices"][0]["message"]["role"]
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")[:500]
        kinds = dict.fromkeys(_BUSY, _BusyError)
        kinds |= dict.fromkeys(_REFUSED, RefusedError)
        kind = kinds.get(error.code, config.InputError)
        raise kind(f"The endpoint {url} answers {error.code}: {text}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _BusyError(
            f"The endpoint {url} does not answer: {error}. Start it, or name another "
            f"by --base_url."
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise config.InputError(
            f"The endpoint {url} answers with no chat completion ({error!r}); name "
            f"another by --base_url."
        ) from error
    return said


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


def json_object(
    text: str, most_characters: int, what: str = "the answer"
) -> dict[str, Any]:
    """Returns the JSON object that a model wrote: its last JSON block, or all of it.

    Args:
        text: of the answer.
        most_characters: that the object may have.
        what: the object is, for errors.

    Raises:
        ValueError: it wrote none, or a longer one.
    """
    blocks = _BLOCK.findall(text)
    source = blocks[-1] if blocks else text
    if len(source) > most_characters:
        raise ValueError(f"{what} has more than {most_characters} characters")
    try:
        fields = json.loads(source)
    except ValueError as error:
        raise ValueError(f"{what} is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{what} is no JSON object")
    return fields
