"""Objectives against float64 loops, and identities between objectives."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from glm5_jax import config
from glm5_jax.config import rl
from glm5_jax.rl import objectives
from tests import environment

NAMES = ("grpo", "icepop", "tis", "dis", "cispo", "gspo")
EACH = tuple((name, name) for name in NAMES)
FLOAT32 = 1e-5  # relative: differences of log-probs of order 1, then an exp
SPLITS = 1e-6  # absolute, of sums of order 0.1 in another order


@functools.cache
def objective(name):
    return jax.jit(objectives.of(config.RLConfig(objective=name)))


def make_tokens(seed=0, shape=(16, 40), gap=0.5, moved=0.3):
    """Returns float64 log-probs whose ratios lie on both sides of every band."""
    rng = np.random.default_rng(seed)
    rollout = np.log(rng.uniform(0.01, 0.9, shape))
    old = rollout + gap * rng.standard_normal(shape)
    logprobs = old + moved * rng.standard_normal(shape)
    advantages = rng.standard_normal(shape)
    mask = rng.random(shape) < 0.7
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "advantages": advantages,
        "mask": mask,
    }


def to_jax(tokens):
    return {
        k: None if v is None else jnp.asarray(v, bool if k == "mask" else jnp.float32)
        for k, v in tokens.items()
    }


def token_by_loop(name, logprob, old, rollout, advantage):
    """Returns a token's loss and its derivative by logprob, in float64."""
    if name in ("dis", "cispo"):
        r = np.exp(logprob - rollout)
        dropped = r if 0.7 < r < 6.0 else 0.0
        weight = dropped if name == "dis" else min(max(r, 0.7), 6.0)
        return -weight * advantage * logprob, -weight * advantage
    r, rho = np.exp(logprob - old), np.exp(old - rollout)
    if advantage >= 0:
        surrogate = min(r, 1.28) * advantage
        slope = r * advantage if r < 1.28 else 0.0
    else:
        surrogate = max(r, 0.8) * advantage
        slope = r * advantage if r > 0.8 else 0.0
    weight = {
        "grpo": 1.0,
        "icepop": rho if 0.5 <= rho <= 2.0 else 0.0,
        "tis": min(rho, 2.0),
    }[name]
    return -weight * surrogate, -weight * slope


def by_loop(name, tokens):
    """Returns the loss and gradient of every token of the batch."""
    loss, gradient = (np.zeros(tokens["mask"].shape) for _ in range(2))
    old = tokens["old_logprobs"]
    old = tokens["logprobs"] if old is None else old
    for at in np.ndindex(loss.shape):
        if tokens["mask"][at]:
            logprob, row = tokens["logprobs"][at], tokens["mask"][at[:-1]]
            before = old[at]
            if name == "gspo":  # as grpo, by the mean of the row's log-ratios
                moved = (tokens["logprobs"] - old)[at[:-1]]
                before = logprob - np.mean(moved[row])
            loss[at], gradient[at] = token_by_loop(
                "grpo" if name == "gspo" else name,
                logprob,
                before,
                tokens["rollout_logprobs"][at],
                tokens["advantages"][at],
            )
    return loss, gradient


def total(logprobs, name, tokens, weights):
    """Returns the loss that a learner minimises."""
    given = tokens | {"logprobs": logprobs}
    return jnp.sum(weights * objective(name)(**given).loss)


@functools.partial(jax.jit, static_argnums=0)
def weighted_gradient(name, tokens, weights):
    return jax.grad(total)(tokens["logprobs"], name, tokens, weights)


def gradient(name, tokens, weights=None):
    """By each log-prob; tokens have weight 1 where none are given."""
    if weights is None:  # an array as the others, so that one program does
        weights = np.ones(tokens["mask"].shape, np.float32)
    return np.asarray(weighted_gradient(name, tokens, weights))


def pair(rho=1.0, r=1.0, advantage=1.0):
    """Returns tokens with given ratios, one for each sign of the advantage."""
    rollout = jnp.log(jnp.float32(0.2)) * jnp.ones(2)
    old = rollout + jnp.log(jnp.float32(rho))
    return {
        "logprobs": old + jnp.log(jnp.float32(r)),
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "advantages": jnp.array([advantage, -advantage]),
        "mask": jnp.ones(2, bool),
    }


class OracleTest(parameterized.TestCase):
    @parameterized.named_parameters(*EACH)
    def test_values_and_gradients(self, name):
        tokens = make_tokens()
        loss, slope = by_loop(name, tokens)
        found = objective(name)(**to_jax(tokens)).loss
        np.testing.assert_allclose(found, loss, rtol=FLOAT32, atol=FLOAT32)
        found = gradient(name, to_jax(tokens))
        np.testing.assert_allclose(found, slope, rtol=FLOAT32, atol=FLOAT32)

    @parameterized.named_parameters(*EACH)
    def test_without_old_logprobs_they_are_the_current_ones(self, name):
        tokens = make_tokens() | {"old_logprobs": None}
        loss, slope = by_loop(name, tokens)
        found = objective(name)(**to_jax(tokens)).loss
        np.testing.assert_allclose(found, loss, rtol=FLOAT32, atol=FLOAT32)
        found = gradient(name, to_jax(tokens))
        np.testing.assert_allclose(found, slope, rtol=FLOAT32, atol=FLOAT32)

    def test_the_tokens_cover_every_branch(self):
        tokens = make_tokens()
        for name in NAMES:
            if name == "gspo":  # rows move less than tokens
                tokens = make_tokens(moved=1.5, shape=(20, 4))
            metrics = objective(name)(**to_jax(tokens)).metrics
            count = tokens["mask"].sum()
            self.assertEqual(metrics.num_tokens, count)
            if name == "cispo":  # drops nothing
                self.assertEqual(metrics.num_clipped, 0)
            else:
                self.assertBetween(metrics.num_clipped, 0.05 * count, 0.5 * count)
            if name not in ("grpo", "gspo"):
                self.assertBetween(metrics.num_masked, 0.03 * count, 0.5 * count)

    def test_metrics(self):
        tokens = make_tokens()
        mask = tokens["mask"]
        log_rho = (tokens["old_logprobs"] - tokens["rollout_logprobs"])[mask]
        r = np.exp(tokens["logprobs"] - tokens["old_logprobs"])[mask]
        advantages = tokens["advantages"][mask]
        rho = np.exp(log_rho)
        is_clipped = np.where(advantages > 0, r > 1.28, r < 0.8)
        expected = {
            "tokens": mask.sum(),
            "masked_fraction": np.mean((rho < 0.5) | (rho > 2)),
            "clip_fraction": np.mean(is_clipped),
            "ratio_mean": np.mean(rho),
            "kl_k3": np.mean(rho - 1 - log_rho),
        }
        found = objectives.means(objective("icepop")(**to_jax(tokens)).metrics)
        self.assertEqual(set(found), set(expected))
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-4, err_msg=key)

    def test_gap(self):
        tokens = make_tokens()
        mask = tokens["mask"]
        gaps = np.abs(tokens["old_logprobs"] - tokens["rollout_logprobs"])[mask]
        given = to_jax(tokens)
        given = given["old_logprobs"], given["rollout_logprobs"]
        total, largest = objectives.gap(*given, jnp.asarray(mask))
        np.testing.assert_allclose(total, np.sum(gaps), rtol=FLOAT32)
        np.testing.assert_allclose(largest, np.max(gaps), rtol=FLOAT32)
        mask = jnp.zeros_like(mask)
        self.assertEqual(
            objectives.gap(jnp.full(mask.shape, jnp.nan), *given[1:], mask), (0, 0)
        )

    def test_sequences_that_moved_are_clipped_as_a_whole(self):
        tokens = make_tokens(moved=1.5, shape=(20, 4))
        loss, slope = by_loop("gspo", tokens)
        found = objective("gspo")(**to_jax(tokens)).loss
        np.testing.assert_allclose(found, loss, rtol=FLOAT32, atol=FLOAT32)
        found = gradient("gspo", to_jax(tokens))
        np.testing.assert_allclose(found, slope, rtol=FLOAT32, atol=FLOAT32)
        self.assertTrue(np.any(slope == 0, where=tokens["mask"]))


class ReferenceTest(absltest.TestCase):
    def test_values_and_gradients_are_those_of_a_loop(self):
        tokens, reference = make_tokens(), make_tokens(seed=1)["logprobs"]
        for old in (tokens["old_logprobs"], tokens["logprobs"]):
            r = np.exp(tokens["logprobs"] - old)
            away = reference - tokens["logprobs"]
            loss = np.where(tokens["mask"], r * (np.exp(away) - 1 - away), 0)
            slope = np.where(tokens["mask"], loss + r * (1 - np.exp(away)), 0)
            others = [jnp.asarray(x, jnp.float32) for x in (old, reference)]
            if old is tokens["logprobs"]:
                others[0] = None
            others.append(jnp.asarray(tokens["mask"]))

            def kl(logprobs, others=others):
                return objectives.kl_to_reference(logprobs, *others)

            given = jnp.asarray(tokens["logprobs"], jnp.float32)
            found = kl(given)
            np.testing.assert_allclose(found, loss, rtol=FLOAT32, atol=FLOAT32)
            found = jax.grad(lambda x, kl=kl: jnp.sum(kl(x)))(given)
            np.testing.assert_allclose(found, slope, rtol=FLOAT32, atol=FLOAT32)

    def test_over_all_tokens_it_is_the_kl_and_its_gradient(self):
        rng = np.random.default_rng(0)
        logits, other = rng.normal(size=(2, 9))
        reference = jnp.asarray(other - np.log(np.exp(other).sum()), jnp.float32)

        def kl(logits):
            logprobs = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))

        def estimate(logits):
            logprobs = jax.nn.log_softmax(logits)
            share = jax.lax.stop_gradient(jnp.exp(logprobs))
            every = jnp.ones(9, bool)
            found = objectives.kl_to_reference(logprobs, None, reference, every)
            return jnp.sum(share * found)

        given = jnp.asarray(logits, jnp.float32)
        got, want = (jax.value_and_grad(f)(given) for f in (estimate, kl))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=FLOAT32),
            got,
            want,
        )

    def test_far_and_masked_tokens_are_finite(self):
        logprobs = jnp.asarray([-200.0, -0.1, -jnp.inf, jnp.nan])
        reference = jnp.asarray([-0.1, -200.0, jnp.nan, -jnp.inf])
        mask = jnp.asarray([True, True, False, False])
        value, slope = jax.value_and_grad(
            lambda x: jnp.sum(objectives.kl_to_reference(x, None, reference, mask))
        )(logprobs)
        self.assertTrue(np.isfinite(value))
        self.assertTrue(np.isfinite(slope).all())
        np.testing.assert_array_equal(slope[2:], 0)


class IdentityTest(parameterized.TestCase):
    @parameterized.named_parameters(*EACH)
    def test_equal_policies_give_reinforce(self, name):
        tokens = make_tokens(gap=0, moved=0)
        expected = -np.where(tokens["mask"], tokens["advantages"], 0)
        np.testing.assert_array_equal(
            gradient(name, to_jax(tokens)), expected.astype(np.float32)
        )

    def test_pop_keeps_the_ratio_and_its_closed_band(self):
        for rho, expected in ((0.4999, 0), (0.6, 0.6), (1.9, 1.9), (2.0001, 0)):
            found = gradient("icepop", pair(rho=rho))
            np.testing.assert_allclose(found, [-expected, expected], rtol=FLOAT32)
            if expected == 0:
                np.testing.assert_array_equal(found, 0)
        border = pair() | {
            "old_logprobs": jnp.zeros(2),
            "rollout_logprobs": -jnp.log(jnp.array([2.0, 0.5])),
            "logprobs": jnp.zeros(2),
        }
        rho = jnp.exp(-border["rollout_logprobs"])
        np.testing.assert_array_equal(rho, [2.0, 0.5])  # exactly on the band
        np.testing.assert_allclose(gradient("icepop", border), [-2.0, 0.5])
        metrics = objective("tis")(**border).metrics
        self.assertEqual(metrics.num_masked, 0)  # a ratio may be as large as the cap

    def test_dis_band_is_open(self):
        def found(rho, low, high):
            bound = functools.partial(objectives.dis, dis_low=low, dis_high=high)
            return bound(**pair(rho=rho)).metrics.num_masked

        self.assertEqual(found(1.0, 0.0, 1.0), 2)  # 1 - low itself is outside
        self.assertEqual(found(1.0, 0.5, 0.0), 2)  # and so is 1 + high
        self.assertEqual(found(1.0, 0.5, 1.0), 0)
        for low, high in (config.DIS_REASONING, config.DIS_AGENTIC):
            self.assertEqual(found(1 - low - 0.01, low, high), 2)
            self.assertEqual(found(1 - low + 0.01, low, high), 0)
            self.assertEqual(found(1 + high + 0.01, low, high), 2)
            self.assertEqual(found(1 + high - 0.01, low, high), 0)

    def test_outside_the_band_the_gradient_is_exactly_zero(self):
        for rho in (1e-3, 0.3, 7.0, 1e6):
            for name in ("icepop", "dis"):
                np.testing.assert_array_equal(gradient(name, pair(rho=rho)), 0)
        for r, expected in ((1.5, [0, 1.5]), (0.5, [-0.5, 0])):  # one side is clipped
            for name in ("grpo", "icepop", "tis"):
                np.testing.assert_allclose(
                    gradient(name, pair(r=r)), expected, rtol=FLOAT32
                )

    def test_weights_are_constants(self):
        # Without stop-gradient, dis would add -r A logprob, because d r = r.
        tokens = pair(rho=1.5)
        with_sg = gradient("dis", tokens)
        np.testing.assert_allclose(with_sg, [-1.5, 1.5], rtol=FLOAT32)

        def without_sg(logprobs):
            r = jnp.exp(logprobs - tokens["rollout_logprobs"])
            return -jnp.sum(r * tokens["advantages"] * logprobs)

        wrong = jax.jit(jax.grad(without_sg))(tokens["logprobs"])
        self.assertGreater(np.abs(wrong - with_sg).max(), 1.0)
        # With one update, r and rho of the others read the same log-probs.
        for name in ("icepop", "tis"):
            one_update = tokens | {"old_logprobs": None}
            np.testing.assert_allclose(
                gradient(name, one_update), [-1.5, 1.5], rtol=FLOAT32
            )

    @parameterized.named_parameters(*EACH)
    def test_nothing_else_is_differentiated(self, name):
        tokens = to_jax(make_tokens())
        keys = ("old_logprobs", "rollout_logprobs", "advantages")

        def loss(given):
            return jnp.sum(objective(name)(**(tokens | given)).loss)

        for found in jax.jit(jax.grad(loss))({k: tokens[k] for k in keys}).values():
            np.testing.assert_array_equal(found, 0)

    @parameterized.named_parameters(*EACH)
    def test_teacher_equal_to_student_gives_exactly_zero(self, name):
        tokens = to_jax(make_tokens())

        def loss(logprobs):
            advantages = objectives.distillation_advantages(
                tokens["logprobs"], logprobs, tokens["mask"]
            )
            given = tokens | {"logprobs": logprobs, "advantages": advantages}
            return jnp.sum(objective(name)(**given).loss)

        value, slope = jax.jit(jax.value_and_grad(loss))(tokens["logprobs"])
        self.assertEqual(value, 0)
        np.testing.assert_array_equal(slope, 0)

    def test_distillation_advantages_are_constants(self):
        tokens = to_jax(make_tokens())

        def total_advantage(*logprobs):
            mask = tokens["mask"]
            return jnp.sum(objectives.distillation_advantages(*logprobs, mask))

        given = (tokens["rollout_logprobs"], tokens["logprobs"])
        for found in jax.jit(jax.grad(total_advantage, argnums=(0, 1)))(*given):
            np.testing.assert_array_equal(found, 0)

    def test_distillation_moves_towards_the_teacher(self):
        teacher = jnp.array([-1.0, -3.0, jnp.nan])
        student = jnp.array([-2.0, -2.0, 0.0])
        mask = jnp.array([True, True, False])

        def loss(student):
            found = objectives.distillation_advantages(teacher, student, mask)
            return jnp.sum(objective("grpo")(student, None, student, found, mask).loss)

        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(student), [-1, 1, 0])
        found = objectives.distillation_advantages(teacher, student, mask)
        np.testing.assert_array_equal(found, [1, -1, 0])


class MaskTest(parameterized.TestCase):
    @parameterized.product(name=NAMES, filling=(0.0, jnp.nan, jnp.inf, -jnp.inf, 1e30))
    def test_nothing_of_a_masked_token_counts(self, name, filling):
        tokens = jax.device_get(to_jax(make_tokens()))
        expected = objective(name)(**tokens)
        expected_gradient = gradient(name, tokens)
        mask = tokens["mask"]
        spoilt = {
            k: v if k == "mask" else np.where(mask, v, np.float32(filling))
            for k, v in tokens.items()
        }
        found = objective(name)(**spoilt)
        np.testing.assert_array_equal(found.loss, expected.loss)
        np.testing.assert_array_equal(found.metrics, expected.metrics)
        np.testing.assert_array_equal(gradient(name, spoilt), expected_gradient)
        np.testing.assert_array_equal(expected_gradient[~mask], 0)

    @parameterized.named_parameters(*EACH)
    def test_ratios_beyond_float32_stay_finite(self, name):
        tokens = pair() | {
            "rollout_logprobs": jnp.array([-500.0, 0.0]),
            "old_logprobs": jnp.array([-1.0, -400.0]),
            "logprobs": jnp.array([-1.0, -400.0]),
        }
        found = objective(name)(**tokens)
        for leaf in jax.tree.leaves((found, gradient(name, tokens))):
            self.assertTrue(np.isfinite(leaf).all())

    def test_a_log_ratio_counts_up_to_20(self):
        tokens = pair(advantage=-1.0) | {"logprobs": jnp.full(2, 100.0)}
        found = objective("grpo")(**tokens).loss
        np.testing.assert_allclose(found, [np.exp(20), -1.28], rtol=FLOAT32)
        tokens = pair() | {"rollout_logprobs": jnp.array([-100.0, 100.0])}
        tokens["old_logprobs"] = tokens["logprobs"] = jnp.zeros(2)
        metrics = objective("grpo")(**tokens).metrics
        np.testing.assert_allclose(
            metrics.sum_ratio, np.exp(20) + np.exp(-20), rtol=FLOAT32
        )
        np.testing.assert_allclose(metrics.sum_kl, np.exp(20) - 2, rtol=FLOAT32)

    @parameterized.named_parameters(*EACH)
    def test_a_broken_trained_token_shows(self, name):
        tokens = to_jax(make_tokens()) | {"mask": jnp.ones((16, 40), bool)}
        tokens["logprobs"] = tokens["logprobs"].at[0, 0].set(jnp.nan)
        self.assertTrue(np.isnan(total(tokens["logprobs"], name, tokens, 1.0)))

    def test_tokens_that_a_band_drops_stay_in_the_denominator(self):
        # One of two tokens is popped: the loss is half of the mean.
        tokens = pair(rho=1.0)
        tokens["advantages"] = jnp.ones(2)
        tokens["rollout_logprobs"] = tokens["rollout_logprobs"].at[1].add(-3.0)
        weights = jnp.full(2, 1 / 2)
        np.testing.assert_allclose(
            gradient("icepop", tokens, weights), [-0.5, 0], rtol=FLOAT32
        )

    def test_means_of_one_token_are_its_values(self):
        sums = objectives.Metrics(*(jnp.float32(x) for x in (1, 2, 3, 4, 5)))
        self.assertEqual([*objectives.means(sums).values()], [1, 2, 3, 4, 5])

    def test_all_masked(self):
        tokens = to_jax(make_tokens())
        tokens["mask"] = jnp.zeros_like(tokens["mask"])
        found = objective("icepop")(**tokens)
        self.assertEqual(float(jnp.abs(found.loss).max()), 0)
        self.assertTrue(
            all(np.isfinite(list(objectives.means(found.metrics).values())))
        )


class InvarianceTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.tokens = jax.device_get(to_jax(make_tokens()))
        counts = self.tokens["mask"].sum(axis=1, keepdims=True)
        self.weights = (self.tokens["mask"] / (16 * counts)).astype(np.float32)

    def check(self, name, found, slope):
        expected = total(self.tokens["logprobs"], name, self.tokens, self.weights)
        np.testing.assert_allclose(found, expected, atol=SPLITS)
        expected = gradient(name, self.tokens, self.weights)
        np.testing.assert_allclose(slope, expected, atol=SPLITS)

    @parameterized.named_parameters(*EACH)
    def test_padding(self, name):
        padded = {k: np.pad(v, ((0, 3), (0, 9))) for k, v in self.tokens.items()}
        weights = np.pad(self.weights, ((0, 3), (0, 9)))
        slope = gradient(name, padded, weights)
        self.check(
            name, total(padded["logprobs"], name, padded, weights), slope[:16, :40]
        )
        np.testing.assert_array_equal(slope[16:], 0)

    @parameterized.named_parameters(*EACH)
    def test_permutation(self, name):
        order = np.random.default_rng(1).permutation(16)
        tokens = {k: v[order] for k, v in self.tokens.items()}
        slope = gradient(name, tokens, self.weights[order])
        found = total(tokens["logprobs"], name, tokens, self.weights[order])
        self.check(name, found, slope[np.argsort(order)])

    @parameterized.named_parameters(*EACH)
    def test_microbatches(self, name):
        found, slopes, metrics = 0.0, [], []
        for i in range(0, 16, 4):
            part = {k: v[i : i + 4] for k, v in self.tokens.items()}
            weights = self.weights[i : i + 4]
            found += total(part["logprobs"], name, part, weights)
            slopes.append(gradient(name, part, weights))
            metrics.append(objective(name)(**part).metrics)
        self.check(name, found, np.concatenate(slopes))
        whole = objectives.means(objective(name)(**self.tokens).metrics)
        split = objectives.means(jax.tree.map(lambda *x: sum(x), *metrics))
        for key, value in whole.items():
            np.testing.assert_allclose(split[key], value, rtol=FLOAT32, err_msg=key)

    @parameterized.named_parameters(*EACH)
    def test_eight_devices(self, name):
        mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
        sharding = jax.NamedSharding(mesh, jax.P("data"))
        tokens = jax.device_put(self.tokens, sharding)
        weights = jax.device_put(self.weights, sharding)
        both = jax.jit(jax.value_and_grad(total), static_argnums=1)
        self.check(name, *both(tokens["logprobs"], name, tokens, weights))


class NamesTest(parameterized.TestCase):
    def test_all_that_a_config_can_name_are_tested(self):
        self.assertSameElements(NAMES, typing.get_args(rl.Objective))


if __name__ == "__main__":
    environment.main()
