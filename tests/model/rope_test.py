"""Rotations against complex numbers."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax.model import rope
from tests import environment
from tests.model import tiny

DIM, THETA = 8, 1e4
FREQUENCIES = rope.frequencies(tiny.model(qk_rope_head_dim=DIM, rope_theta=THETA))
RTOL = 1e-5  # float32 angles up to 100


class RopeTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(0)
        self.positions = np.array([[0, 1, 2, 0, 1], [7, 30, 100, 5, 3]])
        self.x, self.y = rng.normal(size=(2, 2, 5, DIM))

    def tables(self):
        return rope.tables(jnp.asarray(self.positions), FREQUENCIES)

    def test_tables_are_powers_of_theta(self):
        cos, sin = self.tables()
        frequencies = THETA ** (-np.arange(0, DIM, 2) / DIM)
        angles = self.positions[..., None] * frequencies
        np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=RTOL)
        np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=RTOL)

    def test_turns_neighbouring_pairs(self):
        """(x0 + i x1) e^{i angle}, (x2 + i x3) ...; all real parts come first."""
        cos, sin = self.tables()
        x = rope.halves(jnp.asarray(self.x, jnp.float32))
        turned = rope.rotate(x, cos, sin)
        pairs = self.x[..., ::2] + 1j * self.x[..., 1::2]
        frequencies = THETA ** (-np.arange(0, DIM, 2) / DIM)
        want = pairs * np.exp(1j * self.positions[..., None] * frequencies)
        want = np.concatenate([want.real, want.imag], axis=-1)
        np.testing.assert_allclose(turned, want, rtol=0, atol=10 * RTOL)

    def test_products_depend_on_the_distance_alone(self):
        def product(shift):
            parts = []
            for values, distance in ((self.x, 0), (self.y, 3)):
                moved = jnp.asarray(self.positions + distance + shift)
                cos, sin = rope.tables(moved, FREQUENCIES)
                halves = rope.halves(jnp.asarray(values, jnp.float32))
                parts.append(rope.rotate(halves, cos, sin))
            return np.sum(parts[0] * parts[1], axis=-1)

        np.testing.assert_allclose(product(50), product(0), rtol=0, atol=1e-4)
        self.assertGreater(np.abs(product(0) - np.sum(self.x * self.y, -1)).max(), 0.1)


class YarnTest(absltest.TestCase):
    def test_pairs_of_many_turns_stay_and_of_few_are_divided(self):
        """200 pi positions of theta 10^4: pair i turns 100 * 10^(-i) times."""
        scaling = config_lib.RopeScaling(
            rope_type="yarn",
            factor=5.0,
            original_max_position_embeddings=628,
            beta_fast=100.0,
            beta_slow=1.0,
            truncate=False,
        )
        model = tiny.model(qk_rope_head_dim=DIM, rope_theta=THETA, rope_scaling=scaling)
        share = np.array([0, 0.5, 1, 1])
        want = FREQUENCIES * (share / 5 + 1 - share)
        np.testing.assert_allclose(rope.frequencies(model), want, rtol=1e-3)

    def test_ends_are_whole_numbers_of_pairs_within_the_head(self):
        """Pairs 0.52 to 1.52 are cut as 0 to 2, and pairs -1 to 9 as 0 to 7."""
        for positions, fast, slow, truncate, share in (
            (628, 30.0, 3.0, True, [0, 0.5, 1, 1]),
            (6283185, 1e7, 1e-3, False, [0, 1 / 7, 2 / 7, 3 / 7]),
        ):
            scaling = config_lib.RopeScaling(
                rope_type="yarn",
                factor=5.0,
                original_max_position_embeddings=positions,
                beta_fast=fast,
                beta_slow=slow,
                truncate=truncate,
            )
            sizes = {"qk_rope_head_dim": DIM, "rope_theta": THETA}
            model = tiny.model(**sizes, rope_scaling=scaling)
            share = np.array(share)
            want = FREQUENCIES * (share / 5 + 1 - share)
            np.testing.assert_allclose(rope.frequencies(model), want, rtol=1e-5)

    def test_where_both_ends_are_one_a_pair_stays_or_is_divided(self):
        """As transformers, which puts 0.001 between ends that are equal."""
        scaling = config_lib.RopeScaling(
            rope_type="yarn",
            factor=5.0,
            original_max_position_embeddings=628,
            beta_fast=3.0,  # of pair 1.52
            beta_slow=3.0,
            truncate=False,
        )
        model = tiny.model(qk_rope_head_dim=DIM, rope_theta=THETA, rope_scaling=scaling)
        want = FREQUENCIES / np.array([1, 1, 5, 5])
        np.testing.assert_allclose(rope.frequencies(model), want, rtol=1e-6)


if __name__ == "__main__":
    environment.main()
