"""How a section of the config checks itself: every broken rule in one error."""

import typing


class InputError(ValueError):
    """What the user gave is wrong; the message says what, and what to do."""


class DamagedError(RuntimeError):
    """What is on disk is not what was written; the message names the files."""


def require(*rules: tuple[bool, str]) -> None:
    """Raises one InputError with the message of every rule that does not hold."""
    errors = [message for holds, message in rules if not holds]
    if errors:
        raise InputError("\n".join(errors))


def choices(section: object) -> list[tuple[bool, str]]:
    """Rules: each field of a Literal type has one of its values."""
    hints = typing.get_type_hints(type(section))
    options = {
        name: typing.get_args(hint)
        for name, hint in hints.items()
        if typing.get_origin(hint) is typing.Literal
    }
    return [
        (
            getattr(section, name) in known,
            f"{name} must be one of {', '.join(known)}, got "
            f"{getattr(section, name)!r}.",
        )
        for name, known in options.items()
    ]


def positive(section: object, *names: str) -> list[tuple[bool, str]]:
    """Rules: each named field is at least 1."""
    values = {name: getattr(section, name) for name in names}
    return [(v >= 1, f"{n} must be at least 1, got {v}.") for n, v in values.items()]
