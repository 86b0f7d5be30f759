"""The mixture of experts against a loop over tokens and experts in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.model import experts, moe, transformer
from tests import environment
from tests.model import tiny

CONFIG = tiny.model()
run_moe = jax.jit(moe.moe, static_argnums=1)
run_router = jax.jit(moe.route, static_argnums=1)
B, T, D = 2, 11, CONFIG.hidden_size
RTOL = 1e-4  # float32 against float64; the shared expert cancels the others at times


def make_inputs(num_tokens=T, bias_size=0.3, seed=0):
    """Parameters of an expert layer, hidden states, and which of them are tokens."""
    rng = np.random.default_rng(seed)
    params = tiny.params(CONFIG)["mtp"]["block"]["mlp"]
    bias = bias_size * rng.normal(size=CONFIG.n_routed_experts)
    params["e_score_correction_bias"] = jnp.asarray(bias, jnp.float32)
    x = jnp.asarray(rng.normal(size=(B, num_tokens, D)), jnp.float32)
    is_token = jnp.arange(num_tokens)[None] < jnp.asarray([[num_tokens], [7]])
    return params, x, is_token


def in_float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swiglu(params, x):
    gate = x @ params["gate_proj"]
    up = x @ params["up_proj"]
    return (gate * sigmoid(gate) * up) @ params["down_proj"]


def loop(params, config, x, is_token):
    """Output, none of padding, and chosen experts; the bias only helps to choose."""
    params, x = in_float64(params), np.asarray(x, np.float64)
    out = np.zeros_like(x)
    chosen = np.zeros((*x.shape[:2], config.num_experts_per_tok), int)
    for b, t in np.ndindex(x.shape[:2]):
        scores = sigmoid(x[b, t] @ params["gate"])
        order = np.argsort(-(scores + params["e_score_correction_bias"]))
        best = order[: config.num_experts_per_tok]
        gates = scores[best]
        if config.norm_topk_prob:
            gates = gates / gates.sum()
        for e, gate in zip(best, gates * config.routed_scaling_factor, strict=True):
            expert = {name: w[e] for name, w in params["experts"].items()}
            out[b, t] += gate * swiglu(expert, x[b, t]) * is_token[b, t]
        if "shared_experts" in params:
            out[b, t] += swiglu(params["shared_experts"], x[b, t])
        chosen[b, t] = best
    return out, chosen


class MoeTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("glm5", {}, T),
        ("decoding", {}, 1),
        ("raw_gates", {"norm_topk_prob": False}, T),
        ("one_expert", {"num_experts_per_tok": 1}, T),
    )
    def test_equals_a_loop_over_experts(self, changes, num_tokens):
        config = dataclasses.replace(CONFIG, **changes)
        params, x, is_token = make_inputs(num_tokens)
        got, routing = run_moe(params, config, x, is_token)
        want, chosen = loop(params, config, x, is_token)
        np.testing.assert_array_equal(np.sort(routing.experts), np.sort(chosen))
        np.testing.assert_allclose(got, want, rtol=RTOL, atol=RTOL)

    def test_gradients_equal_those_of_a_dense_mixture(self):
        """All experts on all tokens, weighted by gates that are mostly zero."""
        params, x, is_token = make_inputs()
        rows = x.reshape(-1, D)

        def dense(params, rows, routing):
            hot = jax.nn.one_hot(routing.experts, CONFIG.n_routed_experts)
            gates = jnp.einsum("btk,btke->bte", routing.gates, hot)
            gate = jnp.einsum("td,edf->tef", rows, params["gate_proj"])
            up = jnp.einsum("td,edf->tef", rows, params["up_proj"])
            hidden = jax.nn.silu(gate) * up * gates.reshape(*gate.shape[:2], 1)
            return jnp.einsum("tef,efd->td", hidden, params["down_proj"])

        def grouped(params, rows, routing):
            pairs = (y.reshape(len(rows), -1) for y in routing[:2])
            return experts.grouped(params, rows, *pairs)

        def gradients(run):
            def loss(params, rows):
                routing = moe.route(params, CONFIG, rows.reshape(x.shape), is_token)
                return jnp.sum(jnp.sin(run(params["experts"], rows, routing)))

            return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, rows)

        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=RTOL, atol=1e-5),
            gradients(grouped),
            gradients(dense),
        )

    def test_without_a_shared_expert(self):
        params, x, is_token = make_inputs()
        del params["shared_experts"]
        got, _ = run_moe(params, CONFIG, x, is_token)
        np.testing.assert_allclose(
            got, loop(params, CONFIG, x, is_token)[0], rtol=RTOL, atol=RTOL
        )


class BalanceTest(parameterized.TestCase):
    def test_bias_changes_the_choice_and_not_the_gates(self):
        params, x, is_token = make_inputs(bias_size=0)
        biased = params | {
            "e_score_correction_bias": jnp.zeros(CONFIG.n_routed_experts).at[3].set(9)
        }
        before, after = (run_router(p, CONFIG, x, is_token) for p in (params, biased))
        np.testing.assert_array_equal(np.any(after.experts == 3, axis=-1), True)
        self.assertFalse(np.all(np.any(before.experts == 3, axis=-1)))
        scores = sigmoid(np.asarray(x, np.float64) @ in_float64(params)["gate"])
        gates = np.take_along_axis(scores, np.asarray(after.experts), axis=-1)
        gates *= CONFIG.routed_scaling_factor / gates.sum(-1, keepdims=True)
        np.testing.assert_allclose(after.gates, gates, rtol=1e-5)

    @parameterized.parameters(7, 1, 0)
    def test_load_and_balance_loss_by_hand(self, length):
        """mean over rows of sum_e f_e P_e (DeepSeek-V3, equations 17 to 20)."""
        params, x, _ = make_inputs()
        is_token = jnp.arange(T)[None] < jnp.asarray([[T], [length]])
        got = run_router(params, CONFIG, x, is_token)
        scores = sigmoid(np.asarray(x, np.float64) @ in_float64(params)["gate"])
        losses, load = [], np.zeros(CONFIG.n_routed_experts)
        for b, num_tokens in enumerate((T, length)):
            experts = np.asarray(got.experts)[b, :num_tokens]
            counts = np.bincount(experts.ravel(), minlength=CONFIG.n_routed_experts)
            share = counts * CONFIG.n_routed_experts
            share = share / (CONFIG.num_experts_per_tok * max(num_tokens, 1))
            normal = scores[b, :num_tokens]
            normal = normal / normal.sum(-1, keepdims=True)
            losses.append(np.sum(share * normal.sum(0)) / max(num_tokens, 1))
            load += counts
        np.testing.assert_array_equal(got.load, load)
        np.testing.assert_allclose(got.balance, np.mean(losses), rtol=1e-5)

    def test_balance_loss_is_one_when_even_and_the_ratio_when_not(self):
        """Experts 0 and 1 get everything: E / K times their share of the scores."""
        params, x, is_token = make_inputs()
        even = params | {"gate": jnp.zeros_like(params["gate"])}
        bias = jnp.zeros(CONFIG.n_routed_experts).at[:2].set(1)
        even["e_score_correction_bias"] = bias
        routing = run_router(even, CONFIG, x, is_token)
        np.testing.assert_allclose(routing.balance, 1, rtol=1e-6)
        ones = jnp.ones_like(x)
        gate = jnp.zeros_like(params["gate"]).at[:, :2].set(1).at[:, 2:].set(-1)
        routing = run_router(even | {"gate": gate}, CONFIG, ones, is_token)
        np.testing.assert_allclose(routing.balance, 8 / 2, rtol=1e-4)

    def test_bias_moves_by_a_fixed_step_against_the_load(self):
        load = jnp.asarray([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
        bias = jnp.asarray([[0.1, 0.2, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0]])
        got = moe.updated_bias(bias, load, 0.01)
        want = bias + 0.01 * np.asarray([[-1, 1, 0, 0], [0, 0, 0, 0]])
        np.testing.assert_allclose(got, want, rtol=1e-6)

    def test_parameters_in_bfloat16_leave_the_bias_exact(self):
        """In bfloat16 it would stand still above 0.25, where a step is no number."""
        config = dataclasses.replace(CONFIG, param_dtype="bfloat16")
        init = lambda: transformer.init_params(config, jax.random.key(0))
        for params in (transformer.abstract_params(config), jax.eval_shape(init)):
            mlp = params["mtp"]["block"]["mlp"]
            self.assertEqual(mlp["e_score_correction_bias"].dtype, "float32")
            self.assertEqual(mlp["gate"].dtype, "bfloat16")


class BiasTest(parameterized.TestCase):
    def test_it_follows_the_mean_load_not_the_median(self):
        load = jnp.array([[0.0, 0.0, 0.0, 12.0], [3.0, 3.0, 3.0, 3.0]])
        got = moe.updated_bias(jnp.zeros((2, 4)), load, 0.5)
        want = [[0.5, 0.5, 0.5, -0.5], [0.0, 0.0, 0.0, 0.0]]
        np.testing.assert_array_equal(got, want)


if __name__ == "__main__":
    environment.main()
