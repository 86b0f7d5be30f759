"""The grammar of the chat template's tool calls, of the tools that a request has.

<tool_call>NAME(<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>)*</tool_call>

Declared arguments come in the order of their schema. As in the template, a string is
written without quotes, and any other value as JSON.
"""

from collections.abc import Mapping
from typing import Any

from glm5_jax import messages
from glm5_jax.inference import grammars

_WHOLE = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")  # of parameters
_OF_STRINGS = ("enum", "const", "pattern", "minLength", "maxLength")
_ANYTHING = "(?s:.)"  # any character


def source(
    tools: messages.Tools,
    name: str | None = None,
    *,
    is_single: bool = False,
    has_begun: bool = False,
) -> grammars.Source:
    """Returns the grammar of one call or more.

    Args:
      tools: JSON schemas of the functions.
      name: of the function to call; None allows all.
      is_single: whether there is exactly one call.
      has_begun: whether the text begins after the first <tool_call>.

    Raises:
      GrammarError: there is no such tool, or a schema cannot be written as a call.
    """
    functions = [tool.get("function", tool) for tool in tools]
    used = [f for f in functions if name in (None, f.get("name"))]
    if not used:
        raise grammars.GrammarError(
            f"there is no tool named {name!r}" if name else "there are no tools"
        )
    first = "rest" if has_begun else "<tool_call> rest"
    rules = [f"start: {first}" + ("" if is_single else " (<tool_call> rest)*")]
    names = [f"call_{i}" for i in range(len(used))]
    rules.append(f"rest: ({' | '.join(names)}) </tool_call>")
    for rule, function in zip(names, used, strict=True):
        rules += _function(rule, function)
    return grammars.Source("lark", "\n".join(rules))


def _function(rule: str, function: Mapping[str, Any]) -> list[str]:
    """Returns the rules of one function's call."""
    name, parameters = str(function.get("name")), function.get("parameters") or {}
    where = f"the parameters of {name!r}"
    if not isinstance(parameters, Mapping):
        raise grammars.GrammarError(f"{where} must be a JSON schema of an object")
    for keyword in _WHOLE:
        if keyword in parameters:
            raise grammars.GrammarError(
                f"{where} must list their properties; {keyword} is not supported there"
            )
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise grammars.GrammarError(f"{where} are not a JSON schema of an object")
    if missing := [key for key in required if key not in properties]:
        raise grammars.GrammarError(f"{where} require {missing[0]!r}, but declare none")
    shared = {
        key: parameters[key] for key in ("$defs", "definitions") if key in parameters
    }
    parts, rules = [grammars.literal(name)], []
    for i, (key, schema) in enumerate(properties.items()):
        value = f"{rule}_{i}"
        argument = (
            f"<arg_key> {grammars.literal(key)} </arg_key> "
            f"<arg_value> {value} </arg_value>"
        )
        parts.append(argument if key in required else f"({argument})?")
        rules.append(f"{value}: {_value(schema, shared, f'{where}.{key}')}")
    return [f"{rule}: {' '.join(parts)}", *rules]


def _value(schema: Any, shared: Mapping[str, Any], where: str) -> str:
    """Returns the expression of a value.

    Args:
      schema: of the value.
      shared: definitions that it may refer to.
      where: it stands, for messages.
    """
    is_string = isinstance(schema, Mapping) and schema.get("type") in (
        "string",
        ["string"],
    )
    if not is_string:
        whole = {**schema, **shared} if isinstance(schema, Mapping) else schema
        return grammars.json_rule(whole)
    found = [keyword for keyword in _OF_STRINGS if keyword in schema]
    if not found:
        return f"/{_ANYTHING}*/"
    if found == ["enum"]:
        return grammars.alternatives(schema["enum"])
    if found == ["const"]:
        return grammars.alternatives([schema["const"]])
    if found == ["pattern"]:
        return _pattern(str(schema["pattern"]))
    if {"minLength", "maxLength"} >= {*found}:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return f"/{_ANYTHING}{{{least},{most}}}/"
    raise grammars.GrammarError(f"{where} cannot have {' and '.join(found)} together")


def _pattern(pattern: str) -> str:
    """Returns the expression of texts in which a pattern is found."""
    begin = "" if pattern.startswith("^") else f"{_ANYTHING}*"
    end = "" if pattern.endswith("$") else f"{_ANYTHING}*"
    inner = pattern.removeprefix("^").removesuffix("$")
    return grammars.regex(f"{begin}({inner}){end}")
