"""Reads the form that a request asks of its answers, as a constraint of the engine.

OpenAI's response_format, vLLM's structured_outputs and its older guided_* fields, and a
tool_choice that forces a call, all become grammars.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from glm5_jax import messages as messages_lib
from glm5_jax.http_server import errors
from glm5_jax.inference import constraints, grammars, tool_grammar
from glm5_jax.serving import served

_KINDS: dict[str, grammars.Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_ANY_OBJECT = {"type": "object"}
# Special tokens that a thought may not have before an answer that must come.
_NOT_IN_THOUGHTS = ("<think>", "<tool_call>")


class Field(NamedTuple):
    """A grammar, and the field of a body that asks for it."""

    name: str
    source: grammars.Source


class Forced(NamedTuple):
    """A tool_choice that forces a call."""

    name: str | None  # of the function; None: any
    is_single: bool  # whether there is one call alone


class Calls(NamedTuple):
    """The calls that an assistant may make."""

    tools: messages_lib.Tools  # that the model is shown
    choice: Forced | None
    is_strict: bool  # whether calls follow the tools' schemas, forced or not
    is_parallel: bool  # whether there may be several


def field_of(body: Any) -> Field | None:
    """Returns the grammar that a body asks for; None if it asks for none.

    Args:
        body: with the fields of `bodies.Sampling`.

    Raises:
        ApiError: a field is malformed, or several fields ask.
    """
    found = [
        *_of_response_format(body.response_format),
        *_of_vllm(body.structured_outputs, "structured_outputs."),
        *_of_vllm(
            {name: getattr(body, f"guided_{name}") for name in _KINDS}, "guided_"
        ),
    ]
    if len(found) > 1:
        names = " and ".join(field.name for field in found)
        raise errors.bad_request(f"Only one of {names} may be given.")
    return found[0] if found else None


def forced(choice: Any, is_parallel: bool | None) -> Forced | None:
    """Returns the call that a tool_choice forces; None if it forces none.

    Args:
        choice: in OpenAI's form, of chat completions or of responses.
        is_parallel: parallel_tool_calls.

    Raises:
        ApiError: it has another form.
    """
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        return Forced(None, is_parallel is False)
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = (function if isinstance(function, Mapping) else choice).get("name")
        if isinstance(name, str):
            return Forced(name, True)
    raise errors.bad_request(
        f"tool_choice must be 'auto', 'none', 'required' or name a function, got "
        f"{str(choice)[:80]!r}."
    )


async def of_text(
    model: served.Served, field: Field | None, ends: frozenset[int]
) -> constraints.Constraint | None:
    """Returns the constraint of a text; None if there is none.

    Args:
        model: that is served.
        field: of the body.
        ends: ids that end a text.

    Raises:
        ApiError: the grammar cannot be used.
    """
    if field is None:
        return None
    with _named(field.name):
        return await _compiled(model, [field.source], ends)


async def of_chat(
    model: served.Served,
    field: Field | None,
    calls: Calls,
    prompt: Sequence[int],
    ends: frozenset[int],
) -> constraints.Constraint | None:
    """Returns the constraint of an assistant's turn; None if there is none.

    A call that is forced comes before the form of the answer. Without one, the model
    may call its tools or answer in the form. Both follow the thought. Strict calls
    follow their schemas wherever the model begins one.

    Args:
        model: that is served.
        field: of the body.
        calls: that the model may make.
        prompt: with its generation prompt.
        ends: ids that end a turn.

    Raises:
        ApiError: a grammar cannot be used.
    """
    tools, choice, is_single = calls.tools, calls.choice, not calls.is_parallel
    if choice is not None:
        with _named("tool_choice"):
            source = tool_grammar.source(tools, choice.name, is_single=choice.is_single)
            inner = await _compiled(model, [source], ends)
    elif field is not None:
        with _named(field.name):
            sources = [field.source]
            if tools:
                sources.append(tool_grammar.source(tools, is_single=is_single))
            inner = await _compiled(model, sources, ends)
    elif tools and calls.is_strict:
        with _named("tools"):
            source = tool_grammar.source(tools, is_single=is_single, has_begun=True)
            inner = await _compiled(model, [source], ends)
        call = model.text.special_ids["<tool_call>"]
        return constraints.After(inner, call, may_end=True)
    else:
        return None
    special = model.text.special_ids
    if prompt[-1] != special["<think>"]:
        return inner
    forbidden = frozenset(special[name] for name in _NOT_IN_THOUGHTS)
    return constraints.After(inner, special["</think>"], forbidden)


async def _compiled(
    model: served.Served, sources: Sequence[grammars.Source], ends: frozenset[int]
) -> grammars.Grammar:
    """Compiles grammars in a thread, as large ones take a second."""
    ends = ends or frozenset([model.text.eos_id])
    return await asyncio.to_thread(model.grammars.compile, sources, ends)


@contextlib.contextmanager
def _named(field: str) -> Iterator[None]:
    """Names the field in the error of a grammar."""
    try:
        yield
    except grammars.GrammarError as error:
        raise errors.bad_request(f"{field} cannot be used: {error}.") from error


def _of_response_format(given: Mapping[str, Any] | None) -> Iterator[Field]:
    """Yields the grammar of a response_format.

    Raises:
        ApiError: it is malformed.
    """
    kind = (given or {}).get("type", "text")
    if given is None or kind == "text":
        return
    if kind == "json_object":
        source = grammars.Source("json_schema", _ANY_OBJECT)
        yield Field("response_format", source)
        return
    if kind != "json_schema":
        raise errors.bad_request(
            f"response_format.type must be text, json_object or json_schema, got "
            f"{kind!r}."
        )
    inner = given.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise errors.bad_request("response_format.json_schema must have a schema.")
    source = grammars.Source("json_schema", inner["schema"])
    yield Field("response_format.json_schema.schema", source)


def _of_vllm(given: Mapping[str, Any] | None, prefix: str) -> Iterator[Field]:
    """Yields the grammars of vLLM's fields.

    Raises:
        ApiError: there is an unknown one.
    """
    for name, value in (given or {}).items():
        if value is None or value is False:
            continue
        if name == "json_object":
            source = grammars.Source("json_schema", _ANY_OBJECT)
        elif name in _KINDS:
            is_text = name == "json" and isinstance(value, str)
            value = _read_json(value, f"{prefix}{name}") if is_text else value
            source = grammars.Source(_KINDS[name], value)
        else:
            raise errors.bad_request(
                f"{prefix}{name} is not supported; json, json_object, "
                f"{', '.join([*_KINDS][1:])} are."
            )
        yield Field(f"{prefix}{name}", source)


def _read_json(text: str, field: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
        ApiError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise errors.bad_request(f"{field} is not JSON: {error}.") from error
