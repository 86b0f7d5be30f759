"""The check of types finds what is wrong, and is prepared once for equal functions."""

from unittest import mock

import beartype
import jaxtyping
import numpy as np
from absl.testing import parameterized
from jaxtyping import Float

from tests import environment, typecheck


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

    def test_equal_functions_share_their_checks(self):
        made = mock.Mock(wraps=beartype.beartype)
        with (
            mock.patch.object(beartype, "beartype", made),
            mock.patch.dict(typecheck._CHECKS, clear=True),
        ):
            functions = [define() for _ in range(3)]
            made.assert_not_called()
            for function in functions:
                function(np.ones((2, 4)))
        self.assertEqual(made.call_count, 2)  # of arguments; of arguments and result


if __name__ == "__main__":
    environment.main()
