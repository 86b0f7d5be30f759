r"""Comparison of answers that are numbers: integers, decimals, fractions, LaTeX.

The comparison is exact, takes microseconds and never raises. It ignores percent signs,
dollar signs, Markdown's emphasis and the commas of thousands: "**$1,234.50**" is 1234.5
and "50\%" is 50.
"""

import fractions
import re

_MAX_CHARACTERS = 4000  # read from the end of a text; int() takes as many digits

_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = (
    rf"(?P<sign>[-+]?)(?:(?P<whole>[0-9]+) +(?P<n>[0-9]+)/(?P<d>[0-9]+)"
    rf"|(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>[-+]?{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL}(?:[eE][-+]?[0-9]{{1,2}})?))"
)
_WHOLE = re.compile(_NUMBER)
# Does not match the end of a name or parts of an expression: "x2", "5-3", "2^10".
_WITHIN = re.compile(rf"(?<![\w.^/*+)-]){_NUMBER}(?![\w^*/(]|\.[0-9])")

_SAYS_ANSWER = re.compile(r"answer *(?:is|:|=)[ :=]*", re.IGNORECASE)
_BOXED = "\\boxed{"

# What Markdown emphasises: `12` and __12__, but not 2**12.
_EMPHASIS = [
    rf"(?<![\w{x}])([{x}]{{1,3}})(?=\S)([^{x}\n]+)(?<=\S)\1(?![\w{x}])" for x in "`_*"
]
_SPELLINGS = (
    *((re.compile(pattern), r"\2") for pattern in _EMPHASIS),
    (re.compile("[\u2212\u2013]"), "-"),  # minus sign, en dash
    (re.compile("[\u00a0\u2009\u202f]|\\\\[ ;:]|~"), " "),
    (re.compile(r"\\(?:text|mathrm)\{[^{}]*\}"), ""),
    (re.compile(r"\\left|\\right|\\[,!()\[\]]|\\?[$%]"), ""),
    (re.compile(r"(?<=[0-9])(?:,|\{,\})(?=[0-9]{3}(?![0-9]))"), ""),  # thousands
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"(?<=[0-9]) *(?=\\frac)"), " "),  # 1\frac{1}{2} is 1 1/2
    (re.compile(r"\\frac *([0-9]) *([0-9])"), r"\1/\2"),
    (re.compile(r"\\frac *\{ *([^{}]*?) *\} *\{ *([^{}]*?) *\}"), r"\1/\2"),
)


def is_equal(reference: str, given: object) -> bool:
    r"""Tells whether the answer ends in the reference's number, or is the same text.

    Args:
        reference: the right answer. If it is no number, the texts are compared without
            whitespace.
        given: the answer to check. It may be a sentence, an equation, or LaTeX with
            \boxed. A value that is no string is wrong.
    """
    if not isinstance(given, str):
        return False
    right = number(reference)
    if right is not None:
        return final_number(given) == right
    answer = boxed(given)
    answer = given if answer is None else answer
    return "".join(answer.split()) == "".join(reference.split())


def number(text: str) -> fractions.Fraction | None:
    """Returns the number that the whole text spells, or None."""
    if len(text) > _MAX_CHARACTERS:
        return None
    return _value(_WHOLE.fullmatch(_spelt(text).rstrip(". ")))


def final_number(text: str) -> fractions.Fraction | None:
    r"""Returns the number that a text gives as its answer, or None.

    It is in the last \boxed, else after the last "answer is", else the last number.
    """
    text = text[-_MAX_CHARACTERS:]
    answer = boxed(text)
    if answer is not None:
        return number(answer.rpartition("=")[2])
    whole = number(text)
    if whole is not None:
        return whole
    text = _spelt(text)
    for said in reversed(list(_SAYS_ANSWER.finditer(text))):
        found = _WITHIN.match(text, said.end())
        if found:
            return _value(found)
    found = list(_WITHIN.finditer(text))
    return _value(found[-1]) if found else None


def _spelt(text: str) -> str:
    """Returns the text with its numbers rewritten in the notation of _NUMBER."""
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip()


def _value(found: re.Match[str] | None) -> fractions.Fraction | None:
    """Returns the matched number; None without a match or if it divides by zero."""
    if found is None:
        return None
    parts = found.groupdict()
    try:
        if parts["whole"]:
            part = fractions.Fraction(int(parts["n"]), int(parts["d"]))
            size = int(parts["whole"]) + part
        elif parts["top"]:
            bottom = fractions.Fraction(parts["bottom"])
            size = fractions.Fraction(parts["top"]) / bottom
        else:
            size = fractions.Fraction(parts["decimal"])
    except ZeroDivisionError:
        return None
    return -size if parts["sign"] == "-" else size


def boxed(text: str) -> str | None:
    r"""Returns the text between the braces of the last \boxed, or None."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None
