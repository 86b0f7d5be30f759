"""Chunked losses against the whole softmax."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import PartitionSpec as P

from glm5_jax import collectives, losses
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from tests import environment

WORDS = ("tensor", "expert")  # axes that shard the vocabulary
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


whole_gradient = jax.jit(jax.value_and_grad(whole_loss, argnums=(0, 1)))


class NextTokenLossTest(parameterized.TestCase):
    @parameterized.product(chunk_tokens=(1, 5, 21, 1000), z_weight=(0.0, 0.1))
    def test_chunked_equals_whole_with_gradients(self, chunk_tokens, z_weight):
        hidden, head, targets, mask = make_inputs()
        with jax.enable_x64(True):
            hidden, head = hidden.astype(jnp.float64), head.astype(jnp.float64)
            want = whole_gradient(hidden, head, targets, mask, z_weight)

        @jax.jit
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
        got = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(*args)
        np.testing.assert_allclose(got[0], want[0], rtol=CHUNKED_RTOL)
        np.testing.assert_allclose(chunked(*args), want[0], rtol=CHUNKED_RTOL)
        for g, w in zip(got[1], want[1], strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-7)

    def test_weights_of_each_batch_sum_to_one_or_are_zero(self):
        mask = jnp.asarray([[[0.0, 1], [0, 0]], [[1, 1], [1, 1]], [[0, 0], [0, 0]]])
        got = losses.mean_weights(mask)
        np.testing.assert_array_equal(got[0], mask[0])
        np.testing.assert_array_equal(got[1], mask[1] / 4)
        np.testing.assert_array_equal(got[2], 0)

    def test_token_nll_sums_to_the_loss(self):
        hidden, head, targets, mask = make_inputs()
        run = jax.jit(losses.token_nll, static_argnums=3)
        nll = run(hidden, head, targets, 5)
        want = jax.jit(whole_loss)(hidden, head, targets, mask)
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


class EntropyTest(absltest.TestCase):
    def test_it_is_that_of_the_tempered_distribution_with_gradients(self):
        """The gradient by a logit is -p (log p + entropy) / temperature."""
        hidden, head, _, weights = jax.device_get(make_inputs())
        logits = (hidden.astype(np.float64) @ head) / 0.7
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        want = -np.sum(p * np.log(p), axis=-1)
        d_logits = -p * (np.log(p) + want[..., None]) / 0.7 * weights[..., None]
        d_head = np.einsum("btd,btv->dv", hidden, d_logits)

        def total(hidden, head):
            found = losses.token_entropies(
                hidden, head, temperature=0.7, chunk_tokens=5
            )
            return jnp.sum(weights * found), found

        gradient = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))
        grads, found = gradient(jnp.asarray(hidden), jnp.asarray(head))
        np.testing.assert_allclose(found, want, rtol=1e-4)
        wanted = d_logits @ head.T, d_head
        for g, w in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


class ShardsTest(absltest.TestCase):
    def test_four_shards_of_the_vocabulary_equal_the_whole(self):
        """Two of them hold other rows; the targets are all words, borders included."""
        rng = np.random.default_rng(0)
        rows, words = P(("data", "fsdp", "expert"), "context"), P(None, WORDS)
        given = (
            jnp.asarray(rng.normal(size=(4, 8, 6)), jnp.float32),
            jnp.asarray(rng.normal(size=(6, 32)), jnp.float32),
            jnp.asarray(rng.permutation(32).reshape(4, 8), jnp.int32),
            jnp.asarray(rng.random((4, 8)), jnp.float32),
        )

        def local(hidden, head, targets, weights):
            def loss(hidden, head):
                return losses.next_token_loss(
                    hidden, head, targets, weights, chunk_tokens=6, z_weight=0.1
                )

            total, slopes = jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)
            # Each device returns the sum of all, so the gradients are summed so often.
            d_hidden = collectives.total(slopes[0], collectives.SHARES)
            slopes = [x / collectives.num_devices() for x in (d_hidden, slopes[1])]
            nll = losses.token_nll(hidden, head, targets, 6)
            return (
                total,
                slopes,
                nll,
                losses.token_entropies(hidden, head, chunk_tokens=6),
            )

        config = config_lib.MeshConfig(data=1, expert=2, tensor=2)
        with jax.set_mesh(mesh_lib.make_mesh(config, jax.devices()[:4])):
            specs = (rows, words, rows, rows), (P(), [rows, words], rows, rows)
            got = jax.jit(collectives.on_shards(local, *specs))(*given)
        want = jax.jit(local)(*given)
        for g, w in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


class MtpLossTest(absltest.TestCase):
    def test_equals_a_loop_over_positions(self):
        hidden, head, targets, mask = make_inputs()
        segments = jnp.asarray([[1] * 7, [1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0]])
        mask = jnp.where(segments > 0, mask, 0)
        states = jnp.stack([hidden, hidden * 0.5])

        @jax.jit
        def loss(states, head, targets, mask, segments):
            ahead, counts = losses.mtp_targets(targets, mask, segments, 2)
            weights = losses.mean_weights(counts)
            return losses.mtp_loss(states, head, ahead, weights, chunk_tokens=4)

        got = loss(states, head, targets, mask, segments)
        arrays = states, head, targets, mask, segments
        states, head, targets, mask, segments = map(np.asarray, arrays)
        means = []
        for k in (1, 2):
            total = weights = 0.0
            log_probs = states[k - 1] @ head
            log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
            for b, i in np.ndindex(3, 7 - k):
                if segments[b, i] == segments[b, i + k]:
                    weight = mask[b, i + k]
                    total -= weight * log_probs[b, i, targets[b, i + k]]
                    weights += weight
            means.append(total / weights)
        np.testing.assert_allclose(got, np.mean(means), rtol=1e-5)


class RejectionTest(parameterized.TestCase):
    @parameterized.product(is_end_to_end=(False, True), chunk_tokens=(4, 1000))
    def test_equals_a_loop_with_gradients(self, is_end_to_end, chunk_tokens):
        hidden, head, _, _ = make_inputs()
        rng = np.random.default_rng(1)
        states = jnp.asarray(rng.normal(size=(2, *hidden.shape)), jnp.float32)
        mask = rng.random((2, *hidden.shape[:2])) < 0.8
        mask[0, :, -1:] = mask[1, :, -2:] = False  # beyond the row
        weights = jnp.asarray(mask, jnp.float32)

        def loss(states, hidden, head):
            return losses.mtp_rejection(
                states,
                hidden,
                head,
                losses.mean_weights(weights),
                is_end_to_end=is_end_to_end,
                chunk_tokens=chunk_tokens,
            )

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        got = run(states, hidden, head)
        want = rejection(*map(np.float64, (states, hidden, head, mask)), is_end_to_end)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
        self.assertEqual(np.abs(got[1][1]).max(), 0)  # p is constant
        for g, w in ((got[1][0], want[1]), (got[1][2], want[2])):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-7)


def rejection(states, hidden, head, mask, is_end_to_end):
    """Returns the loss, and its gradients by states and head, token by token."""
    num_steps, rows, size = mask.shape

    def softmax(x):
        e = np.exp(x - x.max())
        return e / e.sum()

    total, d_states, d_head = 0.0, np.zeros_like(states), np.zeros_like(head)
    weights = mask / mask.sum((1, 2), keepdims=True) / num_steps
    for b in range(rows):
        for t in range(size):
            kept, slopes = np.ones(num_steps), np.zeros((num_steps, head.shape[1]))
            for k in range(num_steps):
                if t + k + 1 < size:
                    p = softmax(hidden[b, t + k + 1] @ head)
                    q = softmax(states[k, b, t] @ head)
                    kept[k] = np.minimum(p, q).sum()
                    slopes[k] = q * ((q < p) - (q * (q < p)).sum())
            for k in range(num_steps):
                steps = range(k + 1) if is_end_to_end else [k]
                total += weights[k, b, t] * (1 - np.prod(kept[[*steps]]))
                for j in steps:
                    others = np.prod([kept[i] for i in steps if i != j])
                    d_logits = -weights[k, b, t] * others * slopes[j]
                    d_states[j, b, t] += head @ d_logits
                    d_head += np.outer(states[j, b, t], d_logits)
    return total, d_states, d_head


if __name__ == "__main__":
    environment.main()
