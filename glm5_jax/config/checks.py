"""How a section of the config checks itself: every broken rule in one error."""


class InputError(ValueError):
    """What the user gave is wrong; the message says what, and what to do."""


def require(*rules: tuple[bool, str]) -> None:
    """Raises one InputError with the message of every rule that does not hold."""
    errors = [message for holds, message in rules if not holds]
    if errors:
        raise InputError("\n".join(errors))


def positive(section: object, *names: str) -> list[tuple[bool, str]]:
    """Rules: each named field is at least 1."""
    values = {name: getattr(section, name) for name in names}
    return [(v >= 1, f"{n} must be at least 1, got {v}.") for n, v in values.items()]
