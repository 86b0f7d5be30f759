"""The check of types finds what is wrong, and is prepared once for equal functions."""

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Literal
from unittest import mock

import beartype
import jaxtyping
import numpy as np
from absl.testing import parameterized
from jaxtyping import Float

from tests import environment, typecheck

checked = typecheck.jaxtyped(typechecker=typecheck.check)


@checked
def add(x: Float[np.ndarray, "B T"], y: Float[np.ndarray, "B T"]) -> float:
    """Names arrays: jaxtyping remembers their sizes."""
    return (x + y).sum()


@checked
def half_of(x: int) -> int:
    """Names none; half of an odd number is of another type."""
    return x // 2 if x % 2 == 0 else x / 2


@checked
async def half_later(x: int) -> int:
    return x // 2


@checked
def halves(x: int) -> Iterator[int]:
    yield x // 2


@checked
async def halves_later(x: int) -> AsyncIterator[int]:
    yield x // 2


@checked
def opposite(x: Literal["up", "down"]) -> str:
    """Names strings, which are no types."""
    return "down" if x == "up" else "up"


@checked
@dataclasses.dataclass
class Size:
    rows: int


@checked
@dataclasses.dataclass
class Pair:
    one: Float[np.ndarray, " T"]
    other: Float[np.ndarray, " T"]


def define():
    """Returns a function that is defined anew at each call."""

    @jaxtyping.jaxtyped(typechecker=typecheck.check)
    def half(
        x: Float[np.ndarray, "B T"], even: bool = True
    ) -> Float[np.ndarray, "B T/2"]:
        return x[:, ::2] if even else x[:, 1:]

    return half


class TypecheckTest(parameterized.TestCase):
    def test_a_sound_call_returns_what_the_function_does(self):
        x = np.arange(8.0).reshape(2, 4)
        np.testing.assert_array_equal(define()(x), x[:, ::2])

    @parameterized.named_parameters(
        ("rank", (np.ones(4),), "parameter x="),
        ("dtype", (np.ones((2, 4), int),), "parameter x="),
        ("type", (np.ones((2, 4)), 1), "parameter even="),
        ("result", (np.ones((2, 4)), False), "return "),
    )
    def test_a_wrong_call_is_refused_at_each_definition(self, args, part):
        for _ in range(2):
            with self.assertRaises(beartype.roar.BeartypeCallHintViolation) as caught:
                define()(*args)
            self.assertRegex(str(caught.exception), part)

    @parameterized.named_parameters(
        ("arrays", add, (np.ones((2, 4)), np.ones((2, 3)))),
        ("number", half_of, ("2",)),
        ("result", half_of, (3,)),
        ("literal", opposite, ("left",)),
        ("class", Size, (0.5,)),
        ("class_of_arrays", Pair, (np.ones(4), np.ones(3))),
    )
    def test_it_is_refused_where_nothing_is_nested(self, function, args):
        for _ in range(2):
            with self.assertRaises(beartype.roar.BeartypeCallHintViolation):
                function(*args)

    def test_sound_calls_pass_where_nothing_is_nested(self):
        self.assertEqual(add(np.ones((2, 4)), np.ones((2, 4))), 16)
        self.assertEqual(half_of(4), 2)
        self.assertEqual(Size(3).rows, 3)
        self.assertLen(Pair(np.ones(4), np.ones(4)).one, 4)

    def test_only_what_names_arrays_takes_the_time_of_jaxtyping(self):
        with mock.patch.object(typecheck, "_scoped") as scoped:
            typecheck.jaxtyped(typechecker=typecheck.check)(opposite.__wrapped__)
            scoped.assert_not_called()
            typecheck.jaxtyped(typechecker=typecheck.check)(add.__wrapped__)
            scoped.assert_called_once()

    def test_the_sizes_of_a_call_are_told_where_it_is_refused(self):
        with self.assertRaises(beartype.roar.BeartypeCallHintViolation) as caught:
            add(np.ones((2, 4)), np.ones((2, 3)))
        (note,) = caught.exception.__notes__
        self.assertIn("B=2\nT=4", note)

    def test_a_test_can_switch_it_off(self):
        for _ in range(2):  # the second time with code that was beartype's
            with typecheck.off():
                self.assertEqual(half_of(3), 1.5)
                self.assertEqual(add(np.ones((2, 4)), np.ones((1, 4))), 16)
                self.assertLen(define()(np.ones((3, 4)), 0), 3)
            self.assertEqual(half_of(4), 2)
            with self.assertRaises(beartype.roar.BeartypeCallHintViolation):
                half_of(3)

    @parameterized.named_parameters(
        ("coroutine", inspect.iscoroutinefunction, half_later),
        ("generator", inspect.isgeneratorfunction, halves),
        ("async_generator", inspect.isasyncgenfunction, halves_later),
    )
    def test_what_is_awaited_or_iterated_is_checked(self, is_so, function):
        async def listed(x):
            """Returns what comes of a call, whatever it is."""
            if inspect.isawaitable(made := function(x)):
                return [await made]
            if hasattr(made, "__aiter__"):
                return [y async for y in made]
            return list(made)

        for _ in range(2):
            self.assertEqual(asyncio.run(listed(4)), [2])
            with self.assertRaises(beartype.roar.BeartypeCallHintViolation):
                asyncio.run(listed("4"))
        self.assertTrue(is_so(function.__wrapped__))

    def test_a_call_passes_through_one_function(self):
        """From the second on, whose code is beartype's."""
        self.assertEqual([half_of(4), half_of(x=6)], [2, 3])
        self.assertIn("beartype", half_of.__code__.co_filename)
        asyncio.run(half_later(4))
        self.assertIn("beartype", half_later.__code__.co_filename)

    def test_a_nested_function_keeps_what_is_its_own(self):
        """Its variables and defaults, also where it calls another definition."""

        def define(factor, inner=None, least=0):
            @jaxtyping.jaxtyped(typechecker=typecheck.check)
            def scaled(x: Float[np.ndarray, " T"], more: int = least) -> float:
                return factor * x.sum() + more + (inner(x) if inner else 0)

            return scaled

        two, three = define(2.0), define(3.0, define(10.0), least=1)
        x = np.arange(3.0)
        self.assertEqual([two(x), three(x), two(x)], [6, 9 + 1 + 30, 6])
        with self.assertRaises(beartype.roar.BeartypeCallHintViolation):
            three(1)
        self.assertEqual(two(x, more=5), 11)
        with self.assertRaises(ZeroDivisionError):
            define(1.0, lambda x: 1 / 0)(x)
        self.assertEqual(three(x), 40)

    def test_equal_functions_share_their_checks(self):
        made = mock.Mock(wraps=beartype.beartype)
        with (
            mock.patch.object(beartype, "beartype", made),
            mock.patch.dict(typecheck._CHECKS, clear=True),
        ):
            for function in [define() for _ in range(3)]:
                function(np.ones((2, 4)))
        made.assert_called_once()


if __name__ == "__main__":
    environment.main()
