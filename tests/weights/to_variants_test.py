"""Converted models against the ones that they were made of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import sharding
from glm5_jax.model import context as context_lib
from glm5_jax.model import transformer
from glm5_jax.model.attention import mla
from glm5_jax.weights import to_variants
from tests import environment
from tests.model import tiny

T = 16
# Layers without experts compile faster. A large epsilon makes the norm of every latent
# the same division, so that restored heads are exact.
SOURCE = tiny.model(
    first_k_dense_replace=3,
    attention="dense",
    num_nextn_predict_layers=0,
    latent_norm_eps=1e6,
)
# Parameters of a gated DeltaNet that MLA has nothing for.
NEW_OF_DELTA = ["A_log", "a_proj", "b_proj", "conv1d", "dt_bias", "g_proj", "o_norm"]
ATOL = 2e-5  # logits of size one, in float32


@functools.cache
def source_params():
    """Returns parameters whose latents have a trained size, in spite of the epsilon.

    Pairs of neighbouring heads have equal keys and values.
    """
    params = tiny.params(SOURCE)
    attn = params["layers_0"]["block_0"]["self_attn"]
    attn["q_b_proj"] *= 3e2
    for name in ("k_b_proj", "v_b_proj"):
        attn[name] = 1e3 * jnp.repeat(attn[name][..., ::2, :], 2, axis=-2)
    return params


@functools.partial(jax.jit, static_argnums=1)
def logits(params, config):
    tokens = tiny.batch(config, [(T,), (7, 9)], T)
    args = tokens["tokens"], tokens["segment_ids"], tokens["positions"]
    out = transformer.forward(params, config, *args)
    return transformer.logits(params, config, out.hidden)


converted = jax.jit(to_variants.converted, static_argnums=(1, 2))


def with_types(*names, **sizes):
    variants = config_lib.AttentionVariants(**sizes)
    return dataclasses.replace(SOURCE, layer_types=names, variants=variants)


class LosslessTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "a_window_of_the_whole_length",
            with_types("latent", "latent_sliding", "latent", sliding_window=T),
        ),
        (  # a head of 20 dims holds one of 16 with a value of 12
            "groups_of_equal_heads",
            with_types(
                "grouped",
                "latent",
                "grouped_sliding",
                num_key_value_heads=2,
                head_dim=20,
                sliding_window=T,
            ),
        ),
    )
    def test_same_logits(self, target):
        to_variants.require_convertible(SOURCE, target)
        made = converted(source_params(), SOURCE, target)
        want = np.asarray(logits(source_params(), SOURCE))
        self.assertGreater(want.std(), 0.1)
        np.testing.assert_allclose(logits(made, target), want, rtol=0, atol=ATOL)

    def test_multi_token_prediction_is_kept(self):
        target = with_types("latent", "latent_sliding", "latent", sliding_window=T)
        source, target = (
            dataclasses.replace(config, num_nextn_predict_layers=1)
            for config in (SOURCE, target)
        )
        to_variants.require_convertible(source, target)
        params = tiny.params(source)
        made = converted(params, source, target)["mtp"]
        jax.tree.map(np.testing.assert_array_equal, made, params["mtp"])


class DeltaTest(parameterized.TestCase):
    def test_a_gated_delta_net_has_the_heads_of_mla(self):
        """Products of queries and keys, and values, of tokens at one position."""
        source, params = SOURCE, source_params()
        target = with_types("latent", "gated_delta", "gated_delta")
        to_variants.require_convertible(source, target)
        made = converted(params, source, target)
        block = params["layers_0"]["block_0"]
        attn = jax.tree.map(lambda x: x[1], block["self_attn"])
        context = context_lib.make_context(
            source, jnp.ones((1, 5), int), jnp.zeros((1, 5), int)
        )
        x = jax.random.normal(jax.random.key(1), (1, 5, source.hidden_size))
        scaled = x * block["input_layernorm"][1:2, None]

        @jax.jit
        def wanted(attn, scaled):
            c_q = mla.query_latent(attn, source, scaled)
            q = jnp.concatenate(mla.queries(attn, source, c_q, context), axis=-1)
            latent = mla.latent(attn, source, scaled, context)
            return q, *mla.keys_and_values(attn, latent)

        q, k, v = jax.device_get(wanted(attn, scaled))
        own = jax.tree.map(
            lambda x: np.asarray(x)[0], made["layers_1"]["block_0"]["self_attn"]
        )
        got = {
            name: np.einsum("btd,dnh->btnh", scaled, own[name + "_proj"])
            for name in "qkv"
        }
        products = lambda q, k: np.einsum("btnh,bsnh->nts", q, k)
        for x, y in ((products(got["q"], got["k"]), products(q, k)), (got["v"], v)):
            np.testing.assert_allclose(x, y, rtol=0, atol=ATOL * np.abs(y).max())
        np.testing.assert_array_equal(own["o_proj"], attn["o_proj"])
        np.testing.assert_array_equal(own["conv1d"][..., :-1], 0)  # the identity
        np.testing.assert_array_equal(own["conv1d"][..., -1], 1)
        drawn = jax.jit(transformer.init_params, static_argnums=0)(
            target, jax.random.key(0)
        )["layers_1"]["block_0"]["self_attn"]
        for name in NEW_OF_DELTA:
            np.testing.assert_allclose(own[name], drawn[name][0], rtol=1e-6)

    def test_one_without_gates_keeps_the_parameters(self):
        target = with_types("latent", *("simple_gated_delta",) * 2)
        params = tiny.params(SOURCE)
        made = converted(params, SOURCE, target)
        block = jax.tree.map(lambda x: x[1:], params["layers_0"]["block_0"])
        del block["indexer"]
        jax.tree.map(np.testing.assert_array_equal, made["layers_1"]["block_0"], block)


class GroupedTest(parameterized.TestCase):
    def test_a_window_keeps_the_parameters(self):
        source, target = (
            with_types("latent", "grouped", last, num_key_value_heads=2, head_dim=12)
            for last in ("grouped", "grouped_sliding")
        )
        to_variants.require_convertible(source, target)
        params = tiny.params(source)
        made = converted(params, source, target)
        for i, group in enumerate(("layers_1", "layers_2")):
            wanted = jax.tree.map(
                lambda x, i=i: x[i : i + 1], params["layers_1"]["block_0"]
            )
            found = made[group]["block_0"]
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


class ExpectedNormTest(parameterized.TestCase):
    def test_values_of_a_latent_of_the_expected_size(self):
        """Its mean square is trace(M^T M) / C, where M is of white noise."""
        eps = 0.3
        source = dataclasses.replace(SOURCE, latent_norm_eps=eps)
        target = dataclasses.replace(source, layer_types=("gated_delta",) * 3)
        params = tiny.params(source)
        block = params["layers_0"]["block_0"]
        rng = np.random.default_rng(0)
        for tree, name in (
            (block, "input_layernorm"),
            (block["self_attn"], "kv_a_layernorm"),
        ):
            tree[name] = jnp.asarray(rng.uniform(0.5, 2, tree[name].shape), "float32")
        made = converted(params, source, target)
        new = jax.tree.map(np.float64, made["layers_0"]["block_0"]["self_attn"])
        for layer in range(3):
            old = jax.tree.map(lambda x, i=layer: np.float64(x[i]), block)
            attn = old["self_attn"]
            down = attn["kv_a_proj"][:, : source.kv_lora_rank]
            white = old["input_layernorm"][:, None] * down
            square = np.trace(white.T @ white) / source.kv_lora_rank
            latent = down * attn["kv_a_layernorm"] / np.sqrt(square + eps)
            wanted = np.tensordot(latent, attn["v_b_proj"], 1)
            np.testing.assert_allclose(new["v_proj"][layer], wanted, rtol=0, atol=1e-6)


class LoadTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("kept", ("latent_sliding",) * 3, {}, "none"),
        ("restored", ("grouped",) * 3, {"num_key_value_heads": 2}, "none"),
        (
            "new",
            ("latent", "gated_delta", "gated_delta"),
            {},
            ", ".join(f"self_attn.{name}" for name in NEW_OF_DELTA),
        ),
    )
    def test_names_new_parameters_and_keeps_the_shardings(self, types, sizes, names):
        target = with_types(*types, **sizes)
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, fsdp=4))
        places = sharding.shardings(transformer.param_dims(target), mesh)
        shapes = transformer.abstract_params(target)
        abstract = jax.tree.map(lambda x, s: x.update(sharding=s), shapes, places)
        params = jax.device_put(
            jax.device_get(tiny.params(SOURCE)),  # numpy cuts without programs
            sharding.shardings(transformer.param_dims(SOURCE), mesh),
        )
        with jax.set_mesh(mesh), self.assertLogs("absl", "INFO") as logs:
            made = to_variants.load(params, SOURCE, target, abstract)
        self.assertIn(f"new parameters: {names}.", "".join(logs.output))
        jax.tree.map(lambda x, s: self.assertEqual(x.sharding, s), made, places)


class RefusalTest(parameterized.TestCase):
    @parameterized.named_parameters(
        (
            "back",
            with_types("latent", "grouped", "grouped", num_key_value_heads=2),
            SOURCE,
            "type 'grouped' cannot become 'latent'; it can become grouped_sliding",
        ),
        (
            "without_a_way",
            with_types("latent", "latent", "latent_sliding"),
            SOURCE,
            "type 'latent_sliding' cannot become 'latent'; it can become no other type",
        ),
        (
            "narrow_heads",
            SOURCE,
            with_types(*("grouped",) * 3, num_key_value_heads=2, head_dim=12),
            "head_dim must be at least 16 .* got 12",
        ),
        (
            "depth",
            SOURCE,
            tiny.model(num_hidden_layers=2),
            "num_hidden_layers must be 3 .* got 2",
        ),
        (
            "drafts",
            dataclasses.replace(SOURCE, num_nextn_predict_layers=1),
            SOURCE,
            "num_nextn_predict_layers must be 1 .* got 0",
        ),
        (
            "modules_of_drafts",
            dataclasses.replace(SOURCE, num_nextn_predict_layers=2),
            dataclasses.replace(SOURCE, num_nextn_predict_layers=2),
            "A model with 2 MTP modules",
        ),
        (
            "width",
            SOURCE,
            dataclasses.replace(SOURCE, hidden_size=48),
            r"\['embed_tokens'\]: \(80, 32\) there, \(80, 48\) here",
        ),
        (
            "experts",
            SOURCE,
            dataclasses.replace(SOURCE, first_k_dense_replace=2),
            r"\['mlp'\]\['down_proj'\]: .* there, absent here",
        ),
    )
    def test_refused_before_anything_is_computed(self, source, target, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            to_variants.require_convertible(source, target)

    def test_heads_may_just_fit(self):
        target = with_types(*("grouped",) * 3, num_key_value_heads=2, head_dim=16)
        to_variants.require_convertible(SOURCE, target)


if __name__ == "__main__":
    environment.main()
