"""Integer arithmetic from a string that nobody vouches for; nothing is executed."""

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
    """The text is no expression of integers; a few words that a model may read."""


def evaluate(text: str) -> int:
    """The value of an expression of integers, + - * // % and parentheses.

    Raises:
        ExpressionError: it is something else, or too large.
    """
    return _value(_parse(text))


def integers(text: str) -> list[int]:
    """The integers that an expression is made of, in ascending order.

    Raises:
        ExpressionError: it is no expression.
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
    # Nothing else is known to come out of so few characters; a limit of the parser
    # must not look like a fault of the environment, though.
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError("not an expression") from error


def _value(node: ast.expr) -> int:
    """The value of a node; as deep as the text is long, at most."""
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
