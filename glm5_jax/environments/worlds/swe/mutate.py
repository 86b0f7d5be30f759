"""Small breaks of a source file: an operator, a bound, a condition or a line.

Python is cut by its syntax tree, other languages by tokens outside of comments and
strings. What a break does is decided by the tests alone.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

_COMPARES: Mapping[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_OPERATORS: Mapping[type, tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
# Comments and strings first: what they hold is not touched.
_QUOTED = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
_SKIPPED = {
    "c": rf"//[^\n]*|/\*.*?\*/|{_QUOTED}|^[ \t]*#[^\n]*",
    "javascript": rf"//[^\n]*|/\*.*?\*/|{_QUOTED}|`[^`]*`",
    "java": rf"//[^\n]*|/\*.*?\*/|{_QUOTED}",
    "go": rf"//[^\n]*|/\*.*?\*/|{_QUOTED}|`[^`]*`",
    "php": r"//[^\n]*|#[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|"
    r"<<<\s*['\"]?(?P<word>\w+).*?^\s*(?P=word)\b|\?>.*?(?:<\?php|\Z)",
    "ruby": rf"^=begin.*?^=end|^__END__.*\Z|#[^\n]*|{_QUOTED}|"
    r"%[wWiIqQr]?[\[({|!/][^\n]*|(?:=~|[(,=]|\bwhen|\bif|\bunless) */[^/\n]*/",
    "perl": rf"^=\w.*?^=cut[^\n]*|^__(?:END|DATA)__.*\Z|#[^\n]*|{_QUOTED}|"
    r"\b(?:q[qrw]?|[my]|tr|s)\s*[/{(|!\[][^\n]*",
}
_LIKE = {"c++": "c", "typescript": "javascript"}  # that have another's tokens
_SWAPS = {
    " == ": " != ",
    " != ": " == ",
    " === ": " !== ",
    " !== ": " === ",
    " < ": " <= ",
    " <= ": " < ",
    " > ": " >= ",
    " >= ": " > ",
    " + ": " - ",
    " - ": " + ",
    " && ": " || ",
    " || ": " && ",
    "++": "--",
    "+= ": "-= ",
    "return ": "return !",
    "if (": "if (!",
    "true": "false",
    "false": "true",
    " + 1": " + 2",
    " - 1": " - 2",
    "[0]": "[1]",
    "[1]": "[0]",
}
# Where only a truth value can be negated.
_NO_SWAPS = {"go": ("return ", "if ("), "java": ("return ",)}
_MORE_SWAPS = {
    "perl": {" eq ": " ne ", " ne ": " eq ", "unless ": "if "},
    "ruby": {
        "unless ": "if ",
        " if ": " unless ",
        ".empty?": ".nil?",
        ".first": ".last",
        ".last": ".first",
        " and ": " or ",
        " or ": " and ",
    },
    "go": {"if !": "if "},
}


@dataclasses.dataclass(frozen=True)
class Break:
    """A replacement in a text."""

    start: int
    end: int
    new: str
    operator: str  # what is done, e.g. "compare"

    def apply(self, text: str) -> str:
        """Returns the broken text."""
        return text[: self.start] + self.new + text[self.end :]


def breaks(text: str, language: str) -> list[Break]:
    """Returns every break of a source file, in the order of the text.

    Args:
        text: of the file.
        language: of kinds.ENDINGS.
    """
    if language == "python":
        try:
            tree = ast.parse(text)
        except SyntaxError:  # of another version of Python
            return []
        found = set(_PythonBreaks(text).of_tree(tree))
    else:
        found = set(_token_breaks(text, _LIKE.get(language, language)))
    return sorted(found, key=lambda each: (each.start, each.end, each.new))


def _token_breaks(text: str, language: str) -> Iterator[Break]:
    swaps = {**_SWAPS, **_MORE_SWAPS.get(language, {})}
    for token in _NO_SWAPS.get(language, ()):
        del swaps[token]
    tokens = "|".join(re.escape(t) for t in sorted(swaps, key=len, reverse=True))
    pattern = re.compile(
        f"(?P<skipped>{_SKIPPED[language]})|(?P<token>{tokens})",
        re.DOTALL | re.MULTILINE,
    )
    for match in pattern.finditer(text):
        if token := match["token"]:
            yield Break(*match.span(), swaps[token], f"token {token.strip()}")


class _PythonBreaks:
    def __init__(self, text: str) -> None:
        self._text = text
        lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._lines = lines

    def of_tree(self, tree: ast.Module) -> Iterator[Break]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                words = _COMPARES[type(node.ops[0])]
                yield from self._between(
                    node.left, node.comparators[0], words, "compare"
                )
            elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
                words = _OPERATORS[type(node.op)]
                yield from self._between(node.left, node.right, words, "arithmetic")
            elif isinstance(node, ast.BoolOp):
                words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                yield from self._between(node.values[0], node.values[1], words, "logic")
            elif isinstance(node, ast.If | ast.While | ast.IfExp):
                yield self._around(node.test, "not (", ")", "negated condition")
            elif isinstance(node, ast.Constant) and type(node.value) is int:
                yield self._instead(node, str(node.value + 1), "number")
            elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
                yield self._instead(node, str(not node.value), "truth value")
            elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
                yield self._around(node.operand, "(", ")", "lost not", node)
            elif isinstance(node, ast.FunctionDef):
                yield from self._lost_lines(node)

    def _lost_lines(self, function: ast.FunctionDef) -> Iterator[Break]:
        for node in ast.walk(function):
            is_simple = isinstance(node, ast.AugAssign | ast.Raise | ast.Continue)
            is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            if is_simple or is_call:
                yield self._instead(node, "pass", "lost line")
            elif isinstance(node, ast.If) and not node.orelse and len(node.body) == 1:
                yield self._instead(node, "pass", "lost condition")

    def _offset(self, line: int, column: int) -> int:
        """Returns the index of a place that ast gives in bytes of UTF-8."""
        head = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(head)

    def _span(self, node: Any) -> tuple[int, int]:
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno, node.end_col_offset),
        )

    def _instead(self, node: ast.AST, new: str, operator: str) -> Break:
        return Break(*self._span(node), new, operator)

    def _around(
        self, node: ast.AST, before: str, after: str, operator: str, outer: Any = None
    ) -> Break:
        start, end = self._span(node)
        new = before + self._text[start:end] + after
        return Break(*self._span(outer or node), new, operator)

    def _between(
        self, left: ast.AST, right: ast.AST, words: tuple[str, str], operator: str
    ) -> Iterator[Break]:
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._text[start:end]
        pattern = r"\s+".join(map(re.escape, words[0].split()))
        found = [m for m in re.finditer(pattern, gap) if "#" not in gap[: m.start()]]
        if len(found) == 1:
            a, b = found[0].span()
            yield Break(start + a, start + b, words[1], operator)
