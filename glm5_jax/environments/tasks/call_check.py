"""Judges calls of functions against possible answers, as BFCL writes them.

A possible answer is {NAME: {PARAMETER: [VALUE, ...]}}; the value "" means that the
parameter may be left out. Texts are equal if they differ in capitals, blanks, quotes
and , . / - _ * ^ alone; all else is exact. The rules are those of BFCL's check of
abstract syntax trees for Python, without its pardon for names of variables. Of
calls that fit several answers, BFCL gives each answer the first, here any match counts.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]  # name and arguments
Possible = Mapping[str, Mapping[str, Sequence[Any]]]
_IGNORED = re.compile(r"[ ,./\-_*^]")
_OMITTED = ""


def is_right(calls: Sequence[Call], wanted: Sequence[Possible]) -> bool:
    """Returns whether calls match the possible answers one to one, in any order."""
    if len(calls) != len(wanted):
        return False
    fitting = []  # places of the calls that fit each possible answer
    for possible in wanted:
        ((name, parameters),) = possible.items()
        fits = [call[0] == name and _fit(call[1], parameters) for call in calls]
        fitting.append([i for i, fit in enumerate(fits) if fit])
    answers: dict[int, int] = {}  # by the place of the call that has it
    return all(_has_call(i, fitting, answers, set()) for i in range(len(wanted)))


def _has_call(
    answer: int,
    fitting: Sequence[Sequence[int]],
    answers: dict[int, int],
    seen: set[int],
) -> bool:
    """Gives a possible answer a call, for which others may change theirs.

    Args:
        answer: its place.
        fitting: places of the calls that fit each.
        answers: that have a call, by its place; it is changed.
        seen: places of calls that were tried; it is changed.
    """
    for place in fitting[answer]:
        if place in seen:
            continue
        seen.add(place)
        other = answers.get(place)
        if other is None or _has_call(other, fitting, answers, seen):
            answers[place] = answer
            return True
    return False


def right_call(possible: Possible) -> Call:
    """Returns a call that a possible answer allows: the first value of each."""
    ((name, parameters),) = possible.items()
    return name, _filled(parameters)


def _fit(given: Mapping[str, Any], wanted: Mapping[str, Sequence[Any]]) -> bool:
    """Returns whether every value is one of those possible, and none is missing."""
    return all(
        any(_same(value, one) for one in wanted.get(key, ()))
        for key, value in given.items()
    ) and all(key in given or _OMITTED in values for key, values in wanted.items())


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if not isinstance(value, Mapping):
            return False
        is_nested = all(isinstance(one, list) for one in wanted.values())
        return value == wanted or (is_nested and _fit(value, wanted))
    if isinstance(wanted, list):
        return (
            isinstance(value, list)
            and len(value) == len(wanted)
            and all(map(_same, value, wanted))
        )
    if isinstance(wanted, str):
        return isinstance(value, str) and _plain(value) == _plain(wanted)
    if isinstance(wanted, float):  # an integer of the same value is one, too
        return type(value) in (int, float) and value == wanted
    return type(value) is type(wanted) and value == wanted


def _plain(text: str) -> str:
    return _IGNORED.sub("", text).lower().replace("'", '"')


def _filled(wanted: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    chosen = {
        key: next((one for one in values if one != _OMITTED), _OMITTED)
        for key, values in wanted.items()
    }
    return {key: _example(one) for key, one in chosen.items() if one != _OMITTED}


def _example(wanted: Any) -> Any:
    if isinstance(wanted, Mapping):
        is_nested = all(isinstance(one, list) for one in wanted.values())
        return _filled(wanted) if is_nested else wanted
    return [*map(_example, wanted)] if isinstance(wanted, list) else wanted
