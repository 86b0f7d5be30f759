"""Quantization-aware training: the step computes with what a conversion stores."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import intervals
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.evals import report, runner
from glm5_jax.model import transformer
from glm5_jax.quantization import leaf, schemes
from glm5_jax.rl import held_out
from glm5_jax.training import computed
from glm5_jax.training import step as step_lib
from glm5_jax.training.feeds import player as player_lib
from glm5_jax.training.reporting import suites
from tests import environment, small_configs
from tests.model import tiny

FLOAT32 = 1e-6  # Adam divides close numbers, of programs that are fused differently
MODEL = tiny.model(num_hidden_layers=2, num_nextn_predict_layers=0)


def aware(config, scheme):
    return dataclasses.replace(config, quantization_aware=scheme)


def converted(params, scheme, dtype):
    """The matrices of a conversion: codes and scales, made outside of the step."""
    dims = transformer.param_dims(MODEL)
    made = schemes.quantized(params, dims, schemes.SCHEMES[scheme])
    dequantized = jax.jit(leaf.dequantized, static_argnums=1)

    def restored(x, before):
        if not leaf.is_quantized(x):
            return before
        return dequantized(x, dtype)

    return jax.tree.map(restored, made, params, is_leaf=leaf.is_quantized)


class ComputedTest(parameterized.TestCase):
    @parameterized.parameters(
        ("w4a16", "float32"),
        ("w4a8", "bfloat16"),
        ("fp8", "bfloat16"),
        ("int4", "float32"),
    )
    def test_a_step_computes_with_the_bits_of_a_conversion(self, scheme, dtype):
        model = dataclasses.replace(MODEL, dtype=dtype)
        config = aware(config_lib.TrainConfig(model=model), scheme)
        params = tiny.params(model)
        got = jax.jit(computed.weights, static_argnums=1)(params, config)
        cast = jax.jit(transformer.cast, static_argnums=1)
        wanted = cast(converted(params, scheme, jnp.dtype(dtype)), model)
        trees = jax.device_get((got, wanted, cast(params, model)))
        num_rounded = 0
        for a, b, c in zip(*map(jax.tree.leaves, trees), strict=True):
            np.testing.assert_array_equal(a, b)
            num_rounded += bool(np.any(b != c))
        self.assertEqual(num_rounded, 2 * 8 + 3 + 6)  # of both layers, with experts

    def test_suites_and_players_measure_the_rounded_weights(self):
        config = aware(config_lib.TrainConfig(model=MODEL), "int4")
        config = dataclasses.replace(config, eval_suites=("bits_per_byte",))
        params = tiny.params(MODEL)
        half = intervals.Interval(0.5, 0.0, 1.0, 2)
        one = report.Result("humaneval", None, 0, {"accuracy": half})
        with mock.patch.object(runner, "run", return_value=[one]) as run:
            found = suites.evaluate(config, params, tokenizer_lib.byte_tokenizer())
        self.assertEqual(found, {"eval/humaneval/accuracy": 0.5})
        player = player_lib.Player.__new__(player_lib.Player)
        player._config = config
        with (
            mock.patch.object(player, "publish") as publish,
            mock.patch.object(player, "play_held_out"),
            mock.patch.object(held_out, "figures", return_value={}),
        ):
            player.evaluate(params, 1)
        rounded = jax.jit(computed.rounded, static_argnums=1)(params, config)
        for got in (run.call_args.args[0].params, publish.call_args.args[0]):
            jax.tree.map(np.testing.assert_array_equal, got, rounded)
        exact = aware(config, "none")
        self.assertIs(computed.measured(params, exact), params)

    def test_the_gradient_at_the_rounded_weights_moves_the_weights(self):
        config = small_configs.step(
            12, small_configs.DENSE_MODEL, name="adamw", weight_decay=0.0
        )
        params = tiny.params(config.model)
        batch = tiny.batch(config.model, [(12,)] * 8, 12)
        batch["num_bytes"] = batch["loss_mask"]
        round_all = jax.jit(computed.rounded, static_argnums=1)
        rounded = round_all(params, aware(config, "w4a8"))
        after = []
        for own, start in ((aware(config, "w4a8"), params), (config, rounded)):
            optimizer = step_lib.make_optimizer(own)
            step = jax.jit(step_lib.make_train_step(own, optimizer))
            new, _, metrics = step(start, jax.jit(optimizer.init)(start), batch)
            change = jax.tree.map(np.subtract, *jax.device_get((new, start)))
            after.append((change, metrics["train/loss"]))
        (ours, loss), (theirs, same_loss) = after
        np.testing.assert_allclose(loss, same_loss, rtol=FLOAT32)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(a, b, atol=FLOAT32)
        self.assertGreater(max(np.abs(x).max() for x in jax.tree.leaves(ours)), 1e-4)


if __name__ == "__main__":
    environment.main()
