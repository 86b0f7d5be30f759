"""Publication of weights: the engine gets copies, rounded on request."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import requests
from glm5_jax.rl import publisher
from tests import environment
from tests.model import tiny

MODEL = tiny.model(
    num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0
)
FLOAT32 = 1e-6  # relative: a division and a product


def rounded_by_loop(weight):
    """Rounds vector by vector in float64."""
    out = np.zeros(weight.shape)
    for index in np.ndindex(weight.shape[:-1]):
        vector = weight[index].astype(np.float64)
        scale = np.abs(vector).max() / 127
        if scale > 0:
            out[index] = np.round(vector / scale) * scale
    return out


def make_engine(params):
    return engine_lib.Engine(params, MODEL, num_slots=1, capacity=16, num_steps=4)


def answer(engine):
    engine.submit(requests.Request(7, [5, 6, 7], 8))
    finished = []
    while engine.num_pending:
        finished += engine.step()
    return finished[0][1]


class PublisherTest(parameterized.TestCase):
    def test_rounding_equals_a_loop(self):
        weight = np.random.default_rng(0).normal(size=(3, 5, 33)).astype(np.float32)
        weight[0, 1] = 0  # stays 0: its scale of 0 divides nothing
        weight[2, 4] *= 1e-30
        got = np.asarray(publisher.rounded_to_int8(jnp.asarray(weight)))
        wanted = rounded_by_loop(weight)
        np.testing.assert_allclose(got, wanted, rtol=FLOAT32, atol=1e-38)
        self.assertGreater(np.abs(got - weight).max(), 1e-3)
        for vector in got.reshape(-1, 33):
            self.assertLessEqual(len(np.unique(np.abs(vector))), 128)

    @parameterized.parameters(0.0, 1e-38, 1e-45)
    def test_vectors_that_are_next_to_nothing_stay_finite(self, value):
        weight = jnp.full((2, 3), value, jnp.float32)
        got = np.asarray(jax.jit(publisher.rounded_to_int8)(weight))
        np.testing.assert_allclose(got, value, rtol=0, atol=2e-38)

    def test_int8_rounds_the_matrices_of_the_layers_alone(self):
        params = tiny.params(MODEL)
        engine = make_engine(params)
        publisher.publish(engine, params, 3, "int8")
        self.assertEqual(engine.version, 3)
        before = jax.tree_util.tree_leaves_with_path(params)
        kept = set()
        for (path, old), new in zip(
            before, jax.tree.leaves(engine._weights.params), strict=True
        ):
            names = [key.key for key in path]
            is_matrix = names[0] == "layers_0" and old.ndim > 2  # L and two more
            if is_matrix and names[-1] != "gate" and "weights_proj" not in names:
                wanted = rounded_by_loop(np.asarray(old))
                np.testing.assert_allclose(new, wanted, rtol=FLOAT32)
                self.assertGreater(np.abs(new - old).max(), 0, names)
            else:
                np.testing.assert_array_equal(new, old, err_msg=str(names))
                kept.add(names[-1])
        self.assertContainsSubset({"embed_tokens", "lm_head", "norm", "gate"}, kept)

    @parameterized.parameters("same", "int8")
    def test_the_engine_survives_that_the_trainer_takes_its_buffers_back(self, weights):
        params = tiny.params(MODEL)
        engine = make_engine(params)
        publisher.publish(engine, params, 1, weights)
        before = answer(engine)
        step = jax.jit(
            lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0
        )
        step(params)
        self.assertTrue(all(x.is_deleted() for x in jax.tree.leaves(params)))
        after = answer(engine)
        self.assertEqual(after.tokens, before.tokens)
        # The slot still holds other tokens, so float32 sums change their order.
        np.testing.assert_allclose(after.logprobs, before.logprobs, atol=1e-5)
        self.assertEqual(set(after.versions), {1})


if __name__ == "__main__":
    environment.main()
