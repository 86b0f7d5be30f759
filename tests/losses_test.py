"""Chunked losses against the whole softmax."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from glm5_jax import losses

CHUNKED_RTOL = 1e-6  # the same sums in another order


def make_inputs():
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(3, 7, 8)), jnp.float32),
        jnp.asarray(rng.normal(size=(8, 33)), jnp.float32),
        jnp.asarray(rng.integers(0, 33, (3, 7)), jnp.int32),
        jnp.asarray(rng.random((3, 7)), jnp.float32),
    )


def whole_loss(hidden, head, targets, mask, z_weight=0.0):
    logits = hidden @ head
    norm = jax.nn.logsumexp(logits, axis=-1)
    nll = norm - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.sum((nll + z_weight * norm**2) * mask) / jnp.sum(mask)


class NextTokenLossTest(parameterized.TestCase):
    @parameterized.product(chunk_tokens=(1, 5, 21, 1000), z_weight=(0.0, 0.1))
    def test_chunked_equals_whole_with_gradients(self, chunk_tokens, z_weight):
        hidden, head, targets, mask = make_inputs()
        with jax.enable_x64(True):
            hidden, head = hidden.astype(jnp.float64), head.astype(jnp.float64)
            want = jax.value_and_grad(whole_loss, argnums=(0, 1))(
                hidden, head, targets, mask, z_weight
            )

        def chunked(hidden, head):
            return losses.next_token_loss(
                hidden,
                head,
                targets,
                losses.mean_weights(mask),
                chunk_tokens=chunk_tokens,
                z_weight=z_weight,
            )

        args = hidden.astype(jnp.float32), head.astype(jnp.float32)
        got = jax.value_and_grad(chunked, argnums=(0, 1))(*args)
        np.testing.assert_allclose(got[0], want[0], rtol=CHUNKED_RTOL)
        np.testing.assert_allclose(chunked(*args), want[0], rtol=CHUNKED_RTOL)
        for g, w in zip(got[1], want[1], strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-7)

    def test_token_nll_sums_to_the_loss(self):
        hidden, head, targets, mask = make_inputs()
        nll = losses.token_nll(hidden, head, targets, 5)
        want = whole_loss(hidden, head, targets, mask)
        got = jnp.sum(nll * mask) / jnp.sum(mask)
        np.testing.assert_allclose(got, want, rtol=CHUNKED_RTOL)

    def test_logits_of_all_tokens_never_exist_at_once(self):
        hidden, head = jnp.zeros((4, 256, 8)), jnp.zeros((8, 4096))
        targets, mask = jnp.zeros((4, 256), jnp.int32), jnp.ones((4, 256))

        def memory(chunk_tokens):
            def loss(hidden, head):
                weights = losses.mean_weights(mask)
                return losses.next_token_loss(
                    hidden, head, targets, weights, chunk_tokens=chunk_tokens
                )

            step = jax.jit(jax.grad(loss, argnums=(0, 1)))
            return step.lower(hidden, head).compile().memory_analysis()

        all_logits = 4 * 256 * 4096 * 4
        self.assertLess(memory(64).temp_size_in_bytes, all_logits / 2)
        self.assertGreater(memory(1024).temp_size_in_bytes, all_logits)


class MtpLossTest(absltest.TestCase):
    def test_equals_a_loop_over_positions(self):
        hidden, head, targets, mask = make_inputs()
        segments = jnp.asarray([[1] * 7, [1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0]])
        mask = jnp.where(segments > 0, mask, 0)
        states = jnp.stack([hidden, hidden * 0.5])
        ahead, counts = losses.mtp_targets(targets, mask, segments, 2)
        weights = losses.mean_weights(counts)
        got = losses.mtp_loss(states, head, ahead, weights, chunk_tokens=4)
        means = []
        for k in (1, 2):
            total = weights = 0.0
            log_probs = jax.nn.log_softmax(states[k - 1] @ head)
            for b, i in np.ndindex(3, 7 - k):
                if segments[b, i] == segments[b, i + k]:
                    weight = mask[b, i + k]
                    total -= weight * log_probs[b, i, targets[b, i + k]]
                    weights += weight
            means.append(total / weights)
        np.testing.assert_allclose(got, np.mean(means), rtol=1e-5)


if __name__ == "__main__":
    absltest.main()
