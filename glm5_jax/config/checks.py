"""Rules with which a section of the config checks itself, all in one error."""

import functools
import re
import typing

MAX_INT = 2**31 - 1  # largest integer that devices compute with
MAX_SIZE = 2**24  # largest dim or number of rows; a larger one is a typing error


class InputError(ValueError):
    """An error in the user's input; the message says what is wrong and what to do."""


class DamagedError(RuntimeError):
    """Damaged data on disk; the message names the files."""


def require(*rules: tuple[bool, str]) -> None:
    """Raises one InputError with the message of every rule that does not hold."""
    errors = [message for holds, message in rules if not holds]
    if errors:
        raise InputError("\n".join(dict.fromkeys(errors)))


def require_local(path: str, name: str = "") -> None:
    """Checks that a folder is on a file system, which can rename and sync files.

    Args:
      path: the folder.
      name: the flag that gave it.

    Raises:
      InputError: it is the address of an object store, e.g. gs://bucket/folder, or
        empty.
    """
    if not path:
        raise InputError(f"{name or 'the path'} is empty; give a folder.")
    require(local_rule(path, name))


def local_rule(path: str, name: str = "") -> tuple[bool, str]:
    """Returns a rule: the path is no address of an object store."""
    given = f"{name}={path}" if name else path
    return (
        not re.match(r"\w{2,}:/", path),  # pathlib makes gs:/ of gs://
        f"{given} is no path of a file system. docs/storage.md says what takes "
        f"addresses of buckets; for the rest, mount one and give the folder.",
    )


_hints = functools.cache(typing.get_type_hints)


def choices(section: object) -> list[tuple[bool, str]]:
    """Returns rules: each field of a Literal type has one of its values."""
    hints = _hints(type(section))
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


def positive(
    section: object, *names: str, most: int = MAX_INT
) -> list[tuple[bool, str]]:
    """Returns rules: each named field lies between 1 and `most`."""
    values = {name: getattr(section, name) for name in names}
    return [
        rule
        for name, value in values.items()
        for rule in (
            (value >= 1, f"{name} must be at least 1, got {value}."),
            (value <= most, f"{name} must be at most {most}, got {value}."),
        )
    ]


def seed_rule(seed: int) -> tuple[bool, str]:
    """Returns the rule that a seed has 31 bits: jax and the engine cut larger ones."""
    return (
        0 <= seed <= MAX_INT,
        f"seed must not be negative, nor larger than {MAX_INT}, got {seed}.",
    )


def divisible(
    name: str, number: int, axes: str, parts: int, remedy: str
) -> tuple[bool, str]:
    """Returns the rule that a number is divisible by the devices that share it.

    Args:
      name: field that is shared, e.g. "data.batch_size".
      number: its value.
      axes: mesh axes whose devices share it, e.g. "data * fsdp * expert".
      parts: number of these devices.
      remedy: what to do other than changing the number.
    """
    return (
        number % parts == 0,
        f"{name} must be divisible by {axes} of mesh, got {number} on {parts}; set it "
        f"to {listed(nearest_multiples(number, parts))}, or {remedy}.",
    )


def nearest_multiples(number: int, of: int) -> list[int]:
    """Returns the positive multiples of `of` next to a number, below and above."""
    below = number // of * of
    return [n for n in dict.fromkeys((below, -(-number // of) * of)) if n > 0]


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """Returns the divisors of a number next to `wanted`, below and above, or itself."""
    found = _divisors(number)
    if wanted in found:
        return [wanted]
    below = [n for n in found if n < wanted][-1:]
    return below + [n for n in found if n > wanted][:1]


def listed(choices: list[int]) -> str:
    """Returns choices in the words of a message: "4 or 8"."""
    return " or ".join(map(str, choices))


@functools.cache  # a search for a mesh builds thousands of configs
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
