"""Publication of weights: the engine gets copies, quantized on request."""

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax.inference import engine as engine_lib
from glm5_jax.inference import requests
from glm5_jax.model import transformer
from glm5_jax.quantization import schemes
from glm5_jax.rl import publisher
from tests import environment
from tests.model import tiny

MODEL = tiny.model(
    num_hidden_layers=1,
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    attention="dense",
)


def make_engine(params):
    return engine_lib.Engine(params, MODEL, num_slots=1, capacity=16, num_steps=4)


def answer(engine):
    engine.submit(requests.Request(7, [5, 6, 7], 8))
    finished = []
    while engine.num_pending:
        finished += engine.step()
    return finished[0][1]


class PublisherTest(parameterized.TestCase):
    @parameterized.parameters("int8", "w4a8")
    def test_a_scheme_quantizes_the_copy_alone(self, weights):
        params = tiny.params(MODEL)
        engine = make_engine(params)
        publisher.publish(engine, params, 3, weights)
        self.assertEqual(engine.version, 3)
        dims, scheme = transformer.param_dims(MODEL), schemes.SCHEMES[weights]
        wanted = schemes.quantized(params, dims, scheme)
        got = engine._weights.params
        self.assertEqual(jax.tree.structure(got), jax.tree.structure(wanted))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)

    @parameterized.parameters("same", "w4a8")
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
