"""The training step: what it changes, and what it leaves."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from jax import extend

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.config import stages
from glm5_jax.model import context as context_lib
from glm5_jax.model import mtp, transformer
from glm5_jax.scale.hlo import communication
from glm5_jax.scale.hlo import parser as hlo
from glm5_jax.training import loss as loss_lib
from glm5_jax.training import step as step_lib
from tests import environment, small_configs
from tests.model import tiny
from tests.training import mesh_test

SUM_RTOL = 1e-5  # float32 sums in another order
# Pre-training runs the same step: tests/training/loop_test.py.
# All losses, with AdamW: the program of mesh_test.py.
CONFIG = mesh_test.SMALL
# With a loop of multi-token prediction, which compiles slower than one step.
TWO_AHEAD = dataclasses.replace(
    CONFIG, model=dataclasses.replace(CONFIG.model, mtp_num_steps=2)
)
WARMUP = small_configs.of_stage(CONFIG, "dsa_warmup")


@functools.cache
def whole_gradient():
    """Parameters; loss and gradient of the whole batch at once."""
    params = tiny.params(CONFIG.model)
    value_and_grad = jax.jit(loss_lib.value_and_grad, static_argnums=1)
    return params, value_and_grad(params, CONFIG, make_batch())


def make_batch():
    return mesh_test.make_batch(seed=0)


def by_path(params):
    flat = jax.tree_util.tree_flatten_with_path(jax.device_get(params))[0]
    return {tuple(key.key for key in path): value for path, value in flat}


def biases(params):
    flat = by_path(params)
    return {k: v for k, v in flat.items() if k[-1] == "e_score_correction_bias"}


def num_equations(jaxpr):
    """Counts the equations of a program, with the bodies that they repeat in it."""
    total = len(jaxpr.eqns)
    for equation in jaxpr.eqns:
        parts = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(equation.params)]
        bodies = [part for part in parts if isinstance(part, extend.core.Jaxpr)]
        total += equation.params.get("unroll", 1) * sum(map(num_equations, bodies))
    return total


class StepTest(parameterized.TestCase):
    def test_loss_falls_on_a_repeated_batch(self):
        step, params, state = mesh_test.make_step(CONFIG)
        losses = []
        for _ in range(10):
            params, state, metrics = step(params, state, make_batch())
            losses.append({k: float(v) for k, v in metrics.items()})
        for name in ("train/loss", "train/lm_loss", "train/mtp_loss"):
            values = [metrics[name] for metrics in losses]
            self.assertLess(values[-1], 0.8 * values[0], name)
        last, weights = losses[-1], CONFIG.loss
        want = last["train/lm_loss"] + weights.mtp_weight * last["train/mtp_loss"]
        want += 2 * weights.balance_weight * last["train/balance_loss"]  # and MTP
        want += weights.indexer_weight * last["train/indexer_kl"]
        self.assertAlmostEqual(last["train/loss"], want, places=5)
        self.assertEqual(int(state.num_updates), 10)

    def test_mtp_counts_as_one_layer_by_the_mean_over_its_steps(self):
        model, batch = TWO_AHEAD.model, make_batch()
        params = tiny.params(model)

        @jax.jit
        def terms(params, batch):
            """What is logged; what the layer and every step of MTP have of it."""
            inputs = loss_lib._make_inputs(TWO_AHEAD, batch)
            _, (metrics, _) = loss_lib._local_loss(TWO_AHEAD, 0.0, 1, params, inputs)
            ids = (batch["segment_ids"], batch["positions"])
            context = context_lib.make_context(model, *ids)
            out = transformer.forward(
                params, model, batch["tokens"], context=context, with_indexer_loss=True
            )
            ahead = mtp.ahead(batch["tokens"], model.mtp_num_steps)
            _, aux = mtp.steps(
                params["mtp"],
                model,
                params["embed_tokens"],
                out.hidden,
                ahead,
                context,
                jnp.ones(()),
            )
            (main,) = loss_lib._blocks(out.aux)
            found = [(x.indexer_kl, x.routing.balance) for x in (main, aux)]
            return metrics, *found

        metrics, (kl, balance), (mtp_kl, mtp_balance) = terms(params, batch)
        self.assertLen(mtp_kl, model.mtp_num_steps)
        want = kl[0] + jnp.mean(mtp_kl)
        self.assertAlmostEqual(metrics["train/indexer_kl"], want, places=5)
        want = (balance[0] + jnp.mean(mtp_balance)) / 2
        self.assertAlmostEqual(metrics["train/balance_loss"], want, places=5)

    def test_every_parameter_moves(self):
        step, before, state = mesh_test.make_step(CONFIG)
        after, _, _ = step(before, state, make_batch())
        for (path, old), new in zip(
            by_path(before).items(), by_path(after).values(), strict=True
        ):
            self.assertGreater(np.abs(new - old).max(), 0, path)

    def test_router_bias_moves_by_its_rate_alone(self):
        step, before, state = mesh_test.make_step(CONFIG)
        after, _, _ = step(before, state, make_batch())
        rate = CONFIG.loss.router_bias_rate
        for path, old in biases(before).items():
            moved = biases(after)[path] - old
            steps = np.abs(moved) / rate
            np.testing.assert_allclose(steps, np.round(steps), atol=1e-3)
            self.assertGreater(moved.max(), 0)
            self.assertLess(moved.min(), 0)

    def test_parts_of_a_batch_give_its_gradient(self):
        self.check_parts(2, 2, 2)

    @parameterized.parameters((8, 1, 1), (4, 2, 1))
    @pytest.mark.slow
    def test_parts_on_fewer_devices_give_its_gradient(self, num_parts, data, fsdp):
        self.check_parts(num_parts, data, fsdp)

    def check_parts(self, num_parts, data, fsdp):
        """The parts' rows have more or fewer tokens, and padding.

        However many parts: what devices of `data` send each other is one gradient.
        """
        optim = dataclasses.replace(CONFIG.optim, accumulation_steps=num_parts)
        parted = dataclasses.replace(CONFIG, optim=optim)
        mesh_config = config_lib.MeshConfig(data=data, fsdp=fsdp)
        mesh = mesh_lib.make_mesh(mesh_config, jax.devices()[: data * fsdp])
        params, want = whole_gradient()
        function = jax.jit(loss_lib.value_and_grad, static_argnums=1)
        with jax.set_mesh(mesh):
            compiled = function.lower(params, parted, make_batch()).compile()
            got = compiled(params, make_batch())
        if data > 1:
            module = hlo.parse(compiled.as_text())
            sent = communication.find(module, dict(mesh.shape)).collectives
            sent = sum(c.wire_bytes for c in sent if c.axes == ("data",))
            size = 4 * sum(g.size for g in jax.tree.leaves(want[1]))
            ring = 2 * (data - 1) / data
            self.assertGreater(sent, 0.9 * ring * size / fsdp)
            self.assertLess(sent, 1.2 * ring * size / fsdp)
        (loss, (terms, load)), grads = want
        (own_loss, (own_terms, own_load)), own_grads = got
        np.testing.assert_allclose(own_loss, loss, rtol=SUM_RTOL)
        for name, value in terms.items():
            np.testing.assert_allclose(own_terms[name], value, rtol=SUM_RTOL)
        jax.tree.map(np.testing.assert_array_equal, own_load, load)
        for (path, g), own in zip(
            by_path(grads).items(), by_path(own_grads).values(), strict=True
        ):
            atol = SUM_RTOL * np.abs(g).max()
            np.testing.assert_allclose(own, g, rtol=0, atol=atol, err_msg=str(path))

    def test_not_finite_gradient_changes_nothing(self):
        """Neither weights, moments, schedule nor biases; the next step trains again."""
        step, params, state = mesh_test.make_step(CONFIG)
        params, state, _ = step(params, state, make_batch())
        broken = make_batch()
        broken["loss_mask"] = broken["loss_mask"].at[0, 0].set(jnp.nan)
        for count in (1, 2):
            after, new_state, metrics = step(params, state, broken)
            jax.tree.map(np.testing.assert_array_equal, after, params)
            jax.tree.map(np.testing.assert_array_equal, new_state.inner, state.inner)
            self.assertEqual(int(metrics["optim/skipped_in_a_row"]), count)
            self.assertEqual(int(new_state.num_updates), 1)
            state = new_state
        after, state, metrics = step(params, state, make_batch())
        self.assertEqual(int(metrics["optim/skipped_in_a_row"]), 0)
        self.assertEqual(int(metrics["optim/skipped_total"]), 2)
        self.assertGreater(np.abs(after["norm"] - params["norm"]).max(), 0)

    def test_dsa_warmup_moves_the_indexers_and_nothing_else(self):
        step, before, state = mesh_test.make_step(WARMUP)
        params, kl = before, []
        for _ in range(3):
            params, state, metrics = step(params, state, make_batch())
            kl.append(float(metrics["train/indexer_kl"]))
            weight = WARMUP.loss.indexer_weight
            self.assertAlmostEqual(float(metrics["train/loss"]), weight * kl[-1], 6)
        self.assertLess(kl[-1], kl[0])
        after = by_path(params)
        for path, old in by_path(before).items():
            if "indexer" in path:
                self.assertGreater(np.abs(after[path] - old).max(), 0, path)
            else:
                np.testing.assert_array_equal(after[path], old, err_msg=str(path))

    def test_a_nan_of_a_monitored_term_does_not_stop_training(self):
        """The head is frozen in dsa_warmup: its logits make metrics alone."""
        step, before, state = mesh_test.make_step(WARMUP)
        broken = before | {"lm_head": before["lm_head"] * jnp.nan}
        after, _, metrics = step(broken, state, make_batch())
        self.assertTrue(np.isnan(metrics["train/lm_loss"]))
        self.assertTrue(np.isfinite(metrics["train/loss"]))
        self.assertEqual(int(metrics["optim/skipped_in_a_row"]), 0)
        want, _, _ = step(before, state, make_batch())
        del after["lm_head"], want["lm_head"]
        jax.tree.map(np.testing.assert_array_equal, after, want)


class NewStageTest(absltest.TestCase):
    """A record is all that a stage of text needs: no code knows this one."""

    STAGE = stages.Stage(
        name="head_alone",
        losses=("next_token",),
        monitored=("balance",),
        trains=lambda path: path == ("lm_head",),
        moves_router_bias=False,
        attention="dense",
    )

    def test_a_step_obeys_its_record(self):
        self.enterContext(
            mock.patch.dict(stages.BY_NAME, {self.STAGE.name: self.STAGE})
        )
        sections = {s: getattr(CONFIG, s) for s in ("data", "loss", "optim")}
        model = dataclasses.replace(CONFIG.model, attention="dense")
        config = _ConfigOfAnyStage(stage=self.STAGE.name, model=model, **sections)
        step, before, state = mesh_test.make_step(config)
        after, _, metrics = step(before, state, make_batch())
        moved = {
            path
            for path, old in by_path(before).items()
            if np.abs(by_path(after)[path] - old).max() > 0
        }
        self.assertEqual(moved, {("lm_head",)})
        terms = {name for name in metrics if name in loss_lib.METRIC_NAMES.values()}
        self.assertEqual(terms, {"train/lm_loss", "train/balance_loss"})
        self.assertEqual(metrics["train/loss"], metrics["train/lm_loss"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ConfigOfAnyStage(config_lib.TrainConfig):
    stage: str = ""


class DepthTest(parameterized.TestCase):
    def test_the_program_does_not_grow_with_the_stack(self):
        """GLM-5's: 3 dense layers, then 3 or 75 with experts."""
        few, many = (self._num_equations(num_layers) for num_layers in (6, 78))
        self.assertEqual(few, many)

    def _num_equations(self, num_layers):
        model = tiny.model(
            num_hidden_layers=num_layers,
            first_k_dense_replace=3,
            num_nextn_predict_layers=0,
        )
        config = dataclasses.replace(CONFIG, model=model)
        params = transformer.abstract_params(model)
        optimizer = step_lib.make_optimizer(config)
        state = jax.eval_shape(optimizer.init, params)
        step = jax.make_jaxpr(step_lib.make_train_step(config, optimizer))
        return num_equations(step(params, state, make_batch()).jaxpr)


if __name__ == "__main__":
    environment.main()
