"""The check of types finds what is wrong, and is prepared once for equal functions."""

import dataclasses
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
        ("rank", (np.ones(4),), "parameters"),
        ("dtype", (np.ones((2, 4), int),), "parameters"),
        ("type", (np.ones((2, 4)), 1), "parameters"),
        ("result", (np.ones((2, 4)), False), "return value"),
    )
    def test_a_wrong_call_is_refused_at_each_definition(self, args, part):
        for _ in range(2):
            with self.assertRaisesRegex(
                jaxtyping.TypeCheckError, f"checking the {part}"
            ):
                define()(*args)

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
        jaxtyping.config.update("jaxtyping_disable", True)
        self.addCleanup(jaxtyping.config.update, "jaxtyping_disable", False)
        self.assertEqual(half_of(3), 1.5)
        self.assertEqual(add(np.ones((2, 4)), np.ones((1, 4))), 16)

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
        with self.assertRaises(jaxtyping.TypeCheckError):
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
            mock.patch.dict(typecheck._NESTED, clear=True),
        ):
            functions = [define() for _ in range(3)]
            made.assert_not_called()
            for function in functions:
                function(np.ones((2, 4)))
        self.assertEqual(made.call_count, 2)  # of arguments; of arguments and result


if __name__ == "__main__":
    environment.main()
