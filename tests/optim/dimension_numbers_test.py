"""Which matrices an array holds, by dimension numbers and by dim names."""

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax.optim import dimension_numbers
from tests import environment


class FromNamesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("up_projection", "L Q N H", True, (0, 2), (1,), (3,)),
        ("up_projection_whole", "L Q N H", False, (0,), (1,), (2, 3)),
        ("key", "C N P", True, (1,), (0,), (2,)),
        ("key_whole", "C N P", False, (), (0,), (1, 2)),
        ("value", "L C N O", True, (0, 2), (1,), (3,)),
        ("value_whole", "L C N O", False, (0,), (1,), (2, 3)),
        ("output", "L N O D", True, (0,), (1, 2), (3,)),
        ("index_query", "L Q I J", True, (0,), (1,), (2, 3)),
        ("index_weights", "L D I", True, (0,), (1,), (2,)),
        ("expert", "L E D F", True, (0, 1), (2,), (3,)),
        ("router", "L D E", True, (0,), (1,), (2,)),
        ("plain", "D+D D", True, (), (0,), (1,)),
    )
    def test_dims_decide(self, dims, split, batch, rows, cols):
        names = tuple(dims.split())
        numbers = dimension_numbers.from_names(names, split, {})
        layout = numbers.layout(len(names))
        self.assertEqual(layout, dimension_numbers.Layout(batch, rows, cols))

    @parameterized.parameters("D", "L D", "D F Q", "L E F")
    def test_arrays_without_matrices_are_refused(self, dims):
        with self.assertRaisesRegex(ValueError, "needs matrices"):
            dimension_numbers.from_names(tuple(dims.split()), True, {})

    @parameterized.parameters(("Q N H", (2, 192)), ("L D C+R", (2, 512)), ("D F", None))
    def test_fused_weights_are_cut(self, dims, cut):
        cuts = {"H": 192, "C+R": 512}
        numbers = dimension_numbers.from_names(tuple(dims.split()), True, cuts)
        self.assertEqual(numbers.cut, cut)


class DimensionNumbersTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("plain", 0, 1, 2, ((), (0,), (1,))),
        ("from_the_end", -2, -1, 4, ((0, 1), (2,), (3,))),
        ("from_the_end_to_the_first", -2, -1, 2, ((), (0,), (1,))),
        ("merged", (0, 1), 2, 3, ((), (0, 1), (2,))),
        ("merged_in_this_order", 1, (2, 0), 3, ((), (1,), (2, 0))),
        ("scattered", -1, (1,), 5, ((0, 2, 3), (4,), (1,))),
    )
    def test_dims_without_a_name_are_batch_dims(self, rows, cols, ndim, expected):
        numbers = dimension_numbers.DimensionNumbers(rows, cols)
        layout = numbers.layout(ndim)
        self.assertEqual((layout.batch, layout.rows, layout.cols), expected)

    @parameterized.parameters(2, -1)
    def test_a_cut_may_count_from_the_last_dim_too(self, dim):
        numbers = dimension_numbers.DimensionNumbers(1, 2, cut=(dim, 4))
        self.assertEqual(numbers.layout(3).cut, (2, 4))

    @parameterized.parameters((0, 2, 2), (0, 0, 2), (0, -2, 2), ((), 0, 2), (0, 1, 0))
    def test_arrays_without_matrices_are_refused(self, rows, cols, ndim):
        numbers = dimension_numbers.DimensionNumbers(rows, cols)
        with self.assertRaisesRegex(ValueError, "must name different dims"):
            numbers.layout(ndim)


class LayoutTest(parameterized.TestCase):
    def test_split_hands_out_the_matrices_and_join_puts_them_back(self):
        w_LQNH = jax.random.normal(jax.random.key(0), (2, 5, 3, 10))
        layout = dimension_numbers.DimensionNumbers(1, 3).layout(4)
        (matrices,) = layout.split(w_LQNH)
        np.testing.assert_array_equal(matrices, w_LQNH.transpose(0, 2, 1, 3))
        result = layout.join([2 * matrices], w_LQNH.shape)
        np.testing.assert_array_equal(result, 2 * w_LQNH)


if __name__ == "__main__":
    environment.main()
