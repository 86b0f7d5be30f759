"""Separate modules of multi-token prediction against one that the steps share."""

import dataclasses
import functools

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import mtp, transformer
from glm5_jax.training import step as step_lib
from glm5_jax.training.reporting import accounting
from glm5_jax.weights import huggingface_config, to_variants
from tests import environment, small_configs
from tests.model import tiny

SHARED = tiny.model(  # compiles fast without a choice of keys
    num_hidden_layers=1,
    first_k_dense_replace=0,
    vocab_size=40,
    mtp_num_steps=3,
    attention="dense",
)
SEPARATE = dataclasses.replace(SHARED, num_nextn_predict_layers=3)
T = 12
STEPS = 4  # one more than there are modules


@functools.partial(jax.jit, static_argnums=1)
def run(params, config, batch, hidden):
    """States [STEPS, B, T, D] and loads of the experts, after these main states."""
    ids = batch["segment_ids"], batch["positions"]
    context = context_lib.make_context(config, *ids)
    ahead, embedding = mtp.ahead(batch["tokens"], STEPS), params["embed_tokens"]
    states, aux = mtp.steps(params["mtp"], config, embedding, hidden, ahead, context)
    return states, aux.routing.load


def steps(params, config):
    """The same after random states, as numpy."""
    batch = tiny.batch(config, [(8, 4), (12,)], T)
    hidden = np.random.default_rng(1).normal(size=(2, T, config.hidden_size))
    return jax.device_get(run(params, config, batch, hidden.astype(np.float32)))


class SeparateModulesTest(parameterized.TestCase):
    def test_equal_modules_are_one_shared_module(self):
        params = jax.device_get(tiny.params(SHARED))
        stacked = jax.tree.map(lambda x: np.stack([x] * 3), params["mtp"])
        found = steps(params | {"mtp": stacked}, SEPARATE)
        jax.tree.map(np.testing.assert_array_equal, found, steps(params, SHARED))

    def test_a_step_has_its_own_module_and_the_last_one_goes_on(self):
        params = jax.device_get(tiny.params(SEPARATE))
        before, _ = steps(params, SEPARATE)
        for module, changed in enumerate(([0, 1, 2, 3], [1, 2, 3], [2, 3])):
            factors = np.ones(3, np.float32)
            factors[module] = 1.5
            other = jax.tree.map(lambda x, f=factors: (x.T * f).T, params["mtp"])
            after, _ = steps(params | {"mtp": other}, SEPARATE)
            differs = np.abs(after - before).max(axis=(1, 2, 3)) > 0
            self.assertEqual([*np.flatnonzero(differs)], changed)

    def test_a_training_step_keeps_every_shape(self):
        config = small_configs.step(T, SEPARATE)
        optimizer = step_lib.make_optimizer(config)
        params = transformer.abstract_params(SEPARATE)
        state = jax.eval_shape(optimizer.init, params)
        batch = tiny.batch(SEPARATE, [(T,)] * 8, T)
        step = step_lib.make_train_step(config, optimizer)
        after, new, metrics = jax.eval_shape(step, params, state, batch)
        self.assertEqual(
            jax.tree.map(lambda x: x.shape, (params, state)),
            jax.tree.map(lambda x: x.shape, (after, new)),
        )
        self.assertIn("train/mtp_loss", metrics)

    def test_two_modules_are_separate_too(self):
        config = dataclasses.replace(
            SHARED, num_nextn_predict_layers=2, mtp_num_steps=2
        )
        batch = tiny.batch(config, [(T,)], T)
        hidden = jax.ShapeDtypeStruct((1, T, config.hidden_size), "float32")
        traced = functools.partial(run.__wrapped__, config=config, batch=batch)
        params = transformer.abstract_params(config)
        states, _ = jax.eval_shape(lambda p, h: traced(p, hidden=h), params, hidden)
        self.assertEqual(states.shape, (STEPS, *hidden.shape))

    def test_they_are_counted(self):
        one, three = map(accounting.count_parameters, (SHARED, SEPARATE))
        self.assertEqual(three["mtp"], 3 * one["mtp"])
        self.assertEqual(three["active"], one["active"])
        one, three = (accounting.flops_per_token(c, T) for c in (SHARED, SEPARATE))
        self.assertEqual(three, one)

    @parameterized.parameters(
        ({"mtp_num_steps": 2}, "must be num_nextn_predict_layers=3, .*; got 2"),
        ({"num_nextn_predict_layers": -1}, "is negative: -1"),
        ({"index_share_for_mtp_iteration": True}, "needs one MTP module"),
    )
    def test_wrong_fields(self, changes, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            dataclasses.replace(SEPARATE, **changes)

    def test_rejected_drafts_are_a_loss_of_whole_rows(self):
        loss = config_lib.LossConfig(mtp_objective="end_to_end")
        mesh = config_lib.MeshConfig(context=2)
        with self.assertRaisesRegex(config_lib.InputError, "mesh.context must be 1 .*"):
            dataclasses.replace(small_configs.step(T, SHARED), loss=loss, mesh=mesh)

    def test_other_programs_and_conversions_refuse_them(self):
        with self.assertRaisesRegex(config_lib.InputError, "no Hugging Face form"):
            huggingface_config.require_writable(SEPARATE)
        dense = dataclasses.replace(SEPARATE, layer_types=("latent_sliding",))
        with self.assertRaisesRegex(config_lib.InputError, "with 3 MTP modules"):
            to_variants.require_convertible(SEPARATE, dense)


if __name__ == "__main__":
    environment.main()
