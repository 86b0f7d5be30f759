"""Reads the explanation of each config field from its comment, for `--help`."""

import ast
import dataclasses
import functools
import inspect
import io
import textwrap
import tokenize
import typing


def of(cls: type, prefix: str = "") -> dict[str, str]:
    """Returns the explanation of every field by dotted path; sections have none.

    It is the comment on the field's line, or else the one above it.
    """
    hints = typing.get_type_hints(cls)
    texts, found = _comments(cls), {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            found |= of(hints[field.name], f"{prefix}{field.name}.")
        else:
            text = texts[field.name].removesuffix(".")
            found[prefix + field.name] = text[:1].upper() + text[1:]
    return found


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """Returns the comment of each field of one class, or an empty text."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip()[0] == "#")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if not isinstance(node, ast.AnnAssign):
            continue
        assert isinstance(node.target, ast.Name)
        beside = lines.get(node.end_lineno or 0)
        above, line = [], node.lineno - 1
        while line in lines and lines[line][1]:
            above.insert(0, lines[line][0])
            line -= 1
        found[node.target.id] = beside[0] if beside else " ".join(above)
    return found
