"""Checks types at run time with beartype and jaxtyping, at less cost than they alone.

jaxtyping's import hook puts `jaxtyping.jaxtyped` above every function of a package. A
call then takes some 30 microseconds, which tests of plain Python feel: a plan of the
planner makes 200,000 calls. `install` leaves it where a hint names an array.
"""

import contextlib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import beartype
import jaxtyping
from jaxtyping import _storage

_JAXTYPED = jaxtyping.jaxtyped
_CHECKS: dict[Hashable, Callable] = {}  # by signature
# Functions whose code is beartype's, with the code that they had before.
_CHECKED: list[tuple[types.FunctionType, types.CodeType]] = []
# What the code of two functions must have in common.
_KIND = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FUNCTION = "__beartype_func"  # what beartype's code calls, among its defaults


def install() -> None:
    """Replaces what the import hook puts above functions and classes."""
    jaxtyping.jaxtyped = jaxtyped
    # Python 3.11 collects them at each check of a value against a protocol.
    if not hasattr(typing._get_protocol_attrs, "cache_info"):
        typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Leaves types unchecked, as they are for users."""
    jaxtyping.config.update("jaxtyping_disable", True)
    while _CHECKED:
        function, code = _CHECKED.pop()
        function.__code__ = code
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


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
        if _has(hints, _is_forward):
            return _JAXTYPED(decorated, typechecker=typechecker)
        is_nested = "<locals>" in decorated.__qualname__
        checked = _checked_as_its_equals(decorated) if is_nested else _later(decorated)
        if not _has(hints, _can_be_array):
            return checked
        if inspect.isgeneratorfunction(decorated):
            return _JAXTYPED(checked, typechecker=None)
        return _scoped(checked)  # one memory of sizes, one check of the arguments

    return decorate


def check(function: Callable) -> Callable:
    """Returns a function that checks its arguments and its result.

    jaxtyping calls this twice for each function whose hints it leaves to it, with
    stand-ins that have a signature and nothing else. beartype takes a millisecond to
    write a check, so this one waits for the first call.
    """
    return _later(function)


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


def _checked_as_its_equals(function: types.FunctionType) -> Callable:
    """Returns a function that is defined again and again, checked as the first one.

    beartype's code for the first one calls this one here.
    """
    if jaxtyping.config.jaxtyping_disable:
        return function
    key = _signature(function)
    found = _CHECKS.get(key)
    if found is None:
        found = _CHECKS[key] = beartype.beartype(function)
    if _FUNCTION not in (found.__kwdefaults__ or {}):  # nothing to check
        return function
    checked = types.FunctionType(found.__code__, found.__globals__)
    functools.update_wrapper(checked, function)
    checked.__kwdefaults__ = {**found.__kwdefaults__, _FUNCTION: function}
    return checked


def _signature(function: Callable) -> Hashable:
    """Returns an equal value for equal definitions of a function."""
    hints = tuple((n, _key(h)) for n, h in function.__annotations__.items())
    return function.__module__, function.__qualname__, function.__code__, hints


def _later(function: types.FunctionType) -> Callable:
    """Returns the function, which beartype checks from its first call on.

    Its code becomes beartype's then: a call passes through no function between them.
    """
    found = None
    first = _first_coroutine if inspect.iscoroutinefunction(function) else _first

    def call(args: tuple, kwargs: dict[str, Any]) -> Any:
        nonlocal found
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if found is None:
            found = beartype.beartype(function)
        is_other_kind = (found.__code__.co_flags ^ first.__code__.co_flags) & _KIND
        has_nothing_to_check = found is function
        if not (is_other_kind or has_nothing_to_check):
            # Defaults that code does not name are none to it.
            checked.__kwdefaults__ = {**found.__kwdefaults__, "_call": call}
            checked.__code__ = found.__code__
            _CHECKED.append((checked, first.__code__))
        return found(*args, **kwargs)

    checked = types.FunctionType(first.__code__, function.__globals__)
    functools.update_wrapper(checked, function)
    checked.__kwdefaults__ = {"_call": call}
    return checked


def _first(*args: Any, _call: Callable, **kwargs: Any) -> Any:
    """Is the code of a function that `_later` returns, until its first call."""
    return _call(args, kwargs)


async def _first_coroutine(*args: Any, _call: Callable, **kwargs: Any) -> Any:
    return await _call(args, kwargs)


def _has(hint: Any, predicate: Callable[[Any], bool]) -> bool:
    """Returns whether a hint, one of a list or a part of one is as asked."""
    parts = hint if isinstance(hint, list) else typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:  # its strings name no types
        parts = ()
    return predicate(hint) or any(_has(part, predicate) for part in parts)


def _is_forward(hint: Any) -> bool:
    return isinstance(hint, typing.ForwardRef)  # a library's, of its own names


def _can_be_array(hint: Any) -> bool:
    return _is_array(hint) or isinstance(hint, str)


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
