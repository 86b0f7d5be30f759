"""Integer arithmetic on untrusted strings; nothing is executed."""

import ast
import operator
import re
from collections.abc import Callable, Mapping

MAX_CHARACTERS = 200
MAX_VALUE = 10**30  # of every intermediate result

_ALLOWED = re.compile(r"[0-9+\-*/%() ]*")  # no letter: no name, call or attribute
_BINARY: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: Mapping[type, Callable[[int], int]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ExpressionError(ValueError):
    """Raised for a text that is no integer expression; the model may read why."""


def evaluate(text: str) -> int:
    """Returns the value of an expression of integers, + - * // % and parentheses.

    Raises:
        ExpressionError: the text is no such expression, or a value is too large.
    """
    return _value(_parse(text))


def integers(text: str) -> list[int]:
    """Returns the integers in an expression, in ascending order.

    Raises:
        ExpressionError: the text is no expression.
    """
    tree = _parse(text)
    found = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return sorted(value for value in found if isinstance(value, int))


def _parse(text: str) -> ast.expr:
    text = text.strip()
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError("too long")
    if not _ALLOWED.fullmatch(text):
        raise ExpressionError("only integers, + - * // % and parentheses")
    try:
        return ast.parse(text, mode="eval").body
    # So short a text is not known to raise anything else. A limit of the parser must
    # not look like an error of the environment.
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError("not an expression") from error


def _value(node: ast.expr) -> int:
    """Returns the value of a node; the length of the text bounds the recursion."""
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            result = _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if b == 0 and isinstance(op, ast.FloorDiv | ast.Mod):
                raise ExpressionError("division by zero")
            result = _BINARY[type(op)](a, b)
        case _:
            raise ExpressionError("only integers, + - * // % and parentheses")
    if abs(result) > MAX_VALUE:
        raise ExpressionError("too large")
    return result
