"""Checks types at run time with beartype and jaxtyping, at less cost than they alone.

jaxtyping's import hook puts `jaxtyping.jaxtyped` above every function of a package. A
call then takes some 30 microseconds, which tests of plain Python feel: a plan of the
planner makes 200,000 calls. `install` leaves it where a hint names an array.
"""

import functools
import inspect
import threading
import typing
from collections.abc import Callable, Hashable
from typing import Any

import beartype
import jaxtyping
from jaxtyping import _storage

_JAXTYPED = jaxtyping.jaxtyped
_CHECKS: dict[Hashable, Callable] = {}  # by signature
_NESTED: dict[Hashable, Callable] = {}  # what checks such a function, by signature
_CALLED = threading.local()  # functions whose check calls them next, the last one first


def install() -> None:
    """Replaces what the import hook puts above functions and classes."""
    jaxtyping.jaxtyped = jaxtyped
    # Python 3.11 collects them at each check of a value against a protocol.
    if not hasattr(typing._get_protocol_attrs, "cache_info"):
        typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)


def jaxtyped(*, typechecker: Callable) -> Callable:
    """Returns a decorator like jaxtyping's, which gives it what has arrays."""

    def decorate(decorated: Any) -> Any:
        if inspect.isclass(decorated):
            if "__init__" in vars(decorated) and hasattr(
                decorated, "__dataclass_fields__"
            ):
                decorated.__init__ = decorate(decorated.__init__)
            return decorated
        hints = [*getattr(decorated, "__annotations__", {}).values()]
        if _has(hints, _is_unknown):
            return _JAXTYPED(decorated, typechecker=typechecker)
        if "<locals>" in decorated.__qualname__:
            return _nested(decorated, typechecker)
        checked = _checked_later(decorated)
        if not _has(hints, _is_array):
            return checked
        if inspect.isgeneratorfunction(decorated):
            return _JAXTYPED(checked, typechecker=None)
        return _scoped(checked)  # one memory of sizes, one check of the arguments

    return decorate


def _scoped(function: Callable) -> Callable:
    """Returns the function, each call of which has a memory of sizes of its own.

    jaxtyping also binds the arguments, for sizes that name them: we have none.
    """

    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        sizes = _storage.push_shape_memo({})
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not hasattr(error, "__notes__") and (told := _storage.shape_str(sizes)):
                error.add_note(told)
            raise
        finally:
            _storage.pop_shape_memo()

    return scoped


def check(function: Callable) -> Callable:
    """Returns a function that checks its arguments and its result.

    jaxtyping calls this twice for each function, and again each time that a nested
    function is defined, with stand-ins that have a signature and nothing else.
    beartype takes a millisecond to write a check, so this one waits for the first
    call, and equal signatures share it.
    """
    found = None

    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if found is None:
            key = _signature(function)
            found = _CHECKS.get(key)
            if found is None:
                found = _CHECKS[key] = beartype.beartype(function)
        return found(*args, **kwargs)

    return checked


def _nested(function: Callable, typechecker: Callable) -> Callable:
    """Returns a function that is defined again and again, with the check of its equals.

    jaxtyping takes half a millisecond for each definition. Here it decorates the first
    one's signature, and what it has decorated calls the function of the moment.
    """
    key = _signature(function), inspect.isgeneratorfunction(function)
    if key not in _NESTED:

        def call(*args: Any, **kwargs: Any) -> Any:
            return _CALLED.functions.pop()(*args, **kwargs)

        call.__module__, call.__qualname__ = function.__module__, function.__qualname__
        call.__name__ = function.__name__
        call.__signature__ = inspect.signature(function)
        _NESTED[key] = _JAXTYPED(call, typechecker=typechecker)
    checked = _NESTED[key]

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        functions = vars(_CALLED).setdefault("functions", [])
        number = len(functions)
        functions.append(function)
        try:
            return checked(*args, **kwargs)
        finally:
            del functions[number:]  # the arguments were refused

    return run


def _signature(function: Callable) -> Hashable:
    """Returns an equal value for equal definitions of a function."""
    hints = tuple((n, _key(h)) for n, h in function.__annotations__.items())
    return function.__module__, function.__qualname__, function.__code__, hints


def _checked_later(function: Callable) -> Callable:
    """Returns the function, which beartype checks from its first call on."""
    found = None

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        nonlocal found
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if found is None:
            found = beartype.beartype(function)
        return found(*args, **kwargs)

    return checked


def _has(hint: Any, predicate: Callable[[Any], bool]) -> bool:
    """Returns whether a hint, one of a list or a part of one is as asked."""
    parts = hint if isinstance(hint, list) else typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:  # its strings name no types
        parts = ()
    return predicate(hint) or any(_has(part, predicate) for part in parts)


def _is_unknown(hint: Any) -> bool:
    return isinstance(hint, (str, typing.ForwardRef))  # not evaluated yet


def _is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def _key(hint: Any) -> Hashable:
    """Returns an equal value for equal hints, which jaxtyping's own are not."""
    if _is_array(hint):
        return hint.array_type, hint.dtype, hint.dim_str
    if isinstance(hint, list):  # the arguments of a Callable
        return tuple(map(_key, hint))
    if parts := typing.get_args(hint):
        return typing.get_origin(hint), *map(_key, parts)
    return hint
