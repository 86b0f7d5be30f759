"""The optimizer of a run: labels, updates, skipped updates and sharding."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import config as config_lib
from glm5_jax import presets, sharding
from glm5_jax.model import transformer
from glm5_jax.optim import newton_schulz, optimizer, schedule
from tests import environment, runs
from tests.optim import parameter_tree

MODEL = config_lib.ModelConfig(
    vocab_size=20,
    hidden_size=12,
    intermediate_size=10,
    moe_intermediate_size=6,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=8,
    kv_lora_rank=6,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=5,
    n_routed_experts=4,
    num_experts_per_tok=2,
    index_n_heads=2,
    index_head_dim=4,
    index_topk=4,
)
DIMS = parameter_tree.dim_names(MODEL)
# Clipping takes the norm away before Newton-Schulz divides by it: rounding only.
ROUNDING = 1e-6

SMALL_DIMS = {
    "embed_tokens": ("V", "D"),
    "norm": ("D",),
    "layers_0": {
        "q_b_proj": ("L", "Q", "N", "H"),
        "gate": ("L", "D", "E"),
        "e_score_correction_bias": ("L", "E"),
    },
}
SMALL_SHAPES = {
    "embed_tokens": (20, 12),
    "norm": (12,),
    "layers_0": {
        "q_b_proj": (2, 8, 2, 6),
        "gate": (2, 12, 4),
        "e_score_correction_bias": (2, 4),
    },
}


def random_tree(seed, shapes=SMALL_SHAPES, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return parameter_tree.map_names(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype), shapes
    )


def make(dims=SMALL_DIMS, is_trained=None, **fields):
    config = config_lib.OptimConfig(**fields)
    return optimizer.make_optimizer(config, MODEL, dims, 20, is_trained)


def compiled(opt):
    """Returns the jitted update of an optimizer."""
    return jax.jit(
        lambda params, state, grad, is_allowed=True: optimizer.update_if_finite(
            opt, grad, state, params, is_allowed
        )
    )


def run(opt, params, *many_grads):
    """Returns the end of each run, one after another by the same program."""
    step, init, ends = compiled(opt), jax.jit(opt.init), []
    for grads in many_grads:
        end = params, init(params), {}
        for grad in grads:
            end = step(*end[:2], grad)
        ends.append(end)
    return ends if len(ends) > 1 else ends[0]


class LabelTest(parameterized.TestCase):
    def test_every_leaf_of_a_full_tree(self):
        labels = optimizer.label_parameters(config_lib.OptimConfig(), DIMS)
        flat = jax.tree_util.tree_flatten_with_path(labels)[0]
        found = {}
        for key_path, label in flat:
            found.setdefault(label, set()).add(key_path[-1].key)
        self.assertEqual(
            found,
            {
                "muon": {
                    *("q_a_proj", "q_b_proj", "kv_a_proj", "k_b_proj", "v_b_proj"),
                    *("o_proj", "wq_b", "wk", "weights_proj", "eh_proj"),
                    *("gate_proj", "up_proj", "down_proj", "gate"),
                },
                "adamw": {"embed_tokens", "lm_head"},
                "adamw_no_decay": {
                    *("input_layernorm", "post_attention_layernorm", "norm"),
                    *("q_a_layernorm", "kv_a_layernorm", "enorm", "hnorm"),
                    *("k_norm_scale", "k_norm_bias"),
                },
                "frozen": {"e_score_correction_bias"},
            },
        )

    @parameterized.parameters(("muon", True, "muon"), ("adamw", True, "adamw"))
    def test_head(self, name, muon_lm_head, expected):
        config = config_lib.OptimConfig(name=name, muon_lm_head=muon_lm_head)
        labels = optimizer.label_parameters(config, DIMS)
        self.assertEqual(labels["lm_head"], expected)
        self.assertEqual(labels["embed_tokens"], "adamw")

    def test_router(self):
        config = config_lib.OptimConfig(router_gate="adamw")
        labels = optimizer.label_parameters(config, DIMS)
        self.assertEqual(labels["mtp"]["block"]["mlp"]["gate"], "adamw")

    def test_adamw_takes_every_matrix(self):
        config = config_lib.OptimConfig(name="adamw")
        labels = optimizer.label_parameters(config, DIMS)
        self.assertNotIn("muon", jax.tree.leaves(labels))

    def test_no_rope_is_split_off_where_there_is_none(self):
        """A gated delta net's queries have heads, and no RoPE."""
        config = config_lib.OptimConfig(muon_split_rope=True)
        find = functools.partial(
            optimizer.dimension_numbers_of, config=config, model=MODEL
        )
        self.assertTrue(find(("L", "Q", "N", "H")).cut)
        self.assertFalse(find(("L", "D", "N", "H")).cut)

    @parameterized.parameters(True, False)
    def test_a_full_tree_keeps_its_shapes(self, split):
        fields = {"muon_split": split, "muon_split_rope": split}
        opt = make(DIMS, muon_split_kv_a=split, muon_lm_head=split, **fields)
        shapes = parameter_tree.map_names(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            parameter_tree.shapes(MODEL),
        )
        state = jax.eval_shape(opt.init, shapes)
        step = lambda p, s, g: optimizer.update_if_finite(opt, g, s, p)
        after, state_after, _ = jax.eval_shape(step, shapes, state, shapes)
        self.assertEqual(after, shapes)
        self.assertEqual(state_after, state)


class MakeOptimizerTest(parameterized.TestCase):
    def test_adamw_is_that_of_optax(self):
        opt = make(name="adamw", schedule="linear", adam_learning_rate_scale=3.0)
        rate = schedule.learning_rate(config_lib.OptimConfig(schedule="linear"), 20)
        oracle = optax.adamw(
            lambda step: 3.0 * rate(step),
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            mask={
                "embed_tokens": True,
                "norm": False,
                "layers_0": {
                    "q_b_proj": True,
                    "gate": True,
                    "e_score_correction_bias": False,
                },
            },
        )
        params, grads = random_tree(0), [random_tree(i) for i in range(1, 4)]

        @jax.jit
        def wanted(params, state, grad):
            updates, state = oracle.update(grad, state, params)
            return optax.apply_updates(params, updates), state

        expected, state = params, oracle.init(params)
        for grad in grads:
            expected, state = wanted(expected, state, grad)
        got, _, _ = run(opt, params, grads)
        bias = "e_score_correction_bias"
        expected["layers_0"][bias] = params["layers_0"][bias]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), got, expected)

    def test_muon_step_with_decay(self):
        opt = make(ns_dtype="float32", schedule="constant", weight_decay=0.5)
        params, grads = random_tree(0), random_tree(1)
        got, _, _ = run(opt, params, [grads])
        w, g = params["layers_0"]["q_b_proj"], grads["layers_0"]["q_b_proj"]
        steps = newton_schulz.coefficients("polar_express", 5)
        heads = g.transpose(0, 2, 1, 3)
        iterate = lambda x: newton_schulz.orthogonalize(x, steps, jnp.float32)
        direction = jax.jit(iterate)(heads).transpose(0, 2, 1, 3)
        lr = 2e-4
        expected = (1 - lr * 0.5) * w - lr * 0.2 * 8**0.5 * direction
        np.testing.assert_allclose(got["layers_0"]["q_b_proj"], expected, atol=ROUNDING)

    def test_norms_do_not_decay(self):
        opt = make(weight_decay=0.5)
        params = random_tree(0)
        got, _, _ = run(opt, params, [jax.tree.map(jnp.zeros_like, params)])
        np.testing.assert_array_equal(got["norm"], params["norm"])
        shrunk = (1 - 2e-4 * 0.5) * params["embed_tokens"]
        np.testing.assert_allclose(got["embed_tokens"], shrunk, rtol=1e-6)

    def test_frozen_parameters_have_no_state_and_do_not_count(self):
        opt = make(is_trained=lambda path: path == ("layers_0", "q_b_proj"))
        params, grads = random_tree(0), random_tree(1)
        grads["norm"] = grads["norm"].at[0].set(jnp.nan)
        got, state, metrics = run(opt, params, [grads])
        w = grads["layers_0"]["q_b_proj"]
        self.assertAlmostEqual(
            metrics["train/grad_norm"], jnp.linalg.norm(w), delta=1e-5
        )
        sizes = [x.size for x in jax.tree.leaves(state.inner)]
        self.assertEqual(sum(sizes) - sizes.count(1), w.size)
        changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, got)
        self.assertTrue(changed["layers_0"].pop("q_b_proj"))
        self.assertFalse(any(jax.tree.leaves(changed)))

    def test_clipping_scales_the_gradient(self):
        grads = [random_tree(i) for i in range(1, 3)]
        own = jax.tree.map(lambda g: np.asarray(g, np.float32), grads[0])
        del own["layers_0"]["e_score_correction_bias"]
        norm = np.linalg.norm([np.linalg.norm(g) for g in jax.tree.leaves(own)])
        clipped, _, metrics = run(make(clip_norm=1.0), random_tree(0), grads[:1])
        scaled = jax.tree.map(lambda g: jnp.asarray(np.asarray(g) / norm), grads[0])
        ends = run(make(), random_tree(0), [scaled], grads)
        expected, off = (params for params, _, _ in ends)
        self.assertAlmostEqual(metrics["train/grad_norm"], norm, delta=1e-4)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=ROUNDING),
            clipped,
            expected,
        )
        loose, _, _ = run(make(clip_norm=1e6), random_tree(0), grads)
        jax.tree.map(np.testing.assert_array_equal, loose, off)

    def test_bfloat16_parameters_have_float32_moments(self):
        params = random_tree(0, dtype=jnp.bfloat16)
        opt = make()
        got, state, _ = run(opt, params, [random_tree(1, dtype=jnp.bfloat16)] * 2)
        self.assertEqual({x.dtype for x in jax.tree.leaves(got)}, {jnp.bfloat16.dtype})
        moments = {x.dtype for x in jax.tree.leaves(state.inner) if x.ndim}
        self.assertEqual(moments, {jnp.float32.dtype})


class UpdateIfFiniteTest(parameterized.TestCase):
    @parameterized.parameters("muon", "adamw")
    def test_skips_and_counts(self, name):
        opt = make(name=name, schedule="constant")
        good = [random_tree(i) for i in range(1, 3)]
        orders = [good]
        for bad in (jnp.nan, jnp.inf):
            poisoned = dict(good[0], norm=good[0]["norm"].at[3].set(bad))
            orders.append([*good, poisoned, poisoned])
            orders.append([poisoned, good[0], poisoned, good[1]])
        (before, state_before, _), *ends = run(opt, random_tree(0), *orders)
        for in_a_row, (params, state, metrics) in zip([2, 0] * 2, ends, strict=True):
            jax.tree.map(np.testing.assert_array_equal, params, before)
            jax.tree.map(np.testing.assert_array_equal, state.inner, state_before.inner)
            self.assertEqual(state.num_updates, 2)
            self.assertEqual(metrics["optim/skipped_in_a_row"], in_a_row)
            self.assertEqual(metrics["optim/skipped_total"], 2)

    def test_a_forbidden_update_is_skipped_but_is_no_failure_in_a_row(self):
        opt, params, grads = make(), random_tree(0), random_tree(1)
        poisoned = dict(grads, norm=grads["norm"] * jnp.nan)
        state, update = opt.init(params), compiled(opt)
        given = [(grads, False), (poisoned, True), (grads, False), (poisoned, False)]
        for (gradient, is_allowed), in_a_row in zip(given, [0, 1, 1, 2], strict=True):
            after, state, metrics = update(params, state, gradient, is_allowed)
            jax.tree.map(np.testing.assert_array_equal, after, params)
            self.assertEqual(metrics["optim/skipped_in_a_row"], in_a_row)
        self.assertEqual(metrics["optim/skipped_total"], 4)
        self.assertEqual(state.num_updates, 0)

    def test_the_learning_rate_follows_the_steps_skipped_ones_too(self):
        fields = {"schedule": "linear", "warmup_steps": 3}
        rate = schedule.learning_rate(config_lib.OptimConfig(**fields), 20)
        grads = random_tree(1)
        poisoned = dict(grads, norm=grads["norm"] * jnp.nan)
        opt = make(**fields)
        _, _, metrics = run(opt, random_tree(0), [grads, poisoned, grads, grads])
        self.assertAlmostEqual(metrics["optim/learning_rate"], rate(3), delta=1e-10)
        update, params = compiled(opt), random_tree(0)
        state = opt.init(params)
        for step in range(5):
            params, state, metrics = update(params, state, grads, is_allowed=False)
            self.assertAlmostEqual(
                metrics["optim/learning_rate"], rate(step), delta=1e-10
            )

    @parameterized.parameters("muon", "adamw")
    def test_works_in_place_on_donated_buffers(self, name):
        opt = make(name=name)
        shapes = SMALL_SHAPES | {"embed_tokens": (300, 400)}
        params = random_tree(0, shapes)
        state = jax.eval_shape(opt.init, params)
        step = lambda p, s, g: optimizer.update_if_finite(opt, g, s, p)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params)
        memory = compiled.compile().memory_analysis()
        kept = sum(x.size * 4 for x in jax.tree.leaves((params, state)))
        self.assertEqual(memory.alias_size_in_bytes, kept)
        self.assertLess(memory.temp_size_in_bytes, 0.05 * kept)

    def test_gradients_become_float32_where_they_are_used(self):
        """An operand of the cond is kept as a whole: those would be all gradients."""
        opt, params = make(), random_tree(0)
        grads = random_tree(1, dtype=jnp.bfloat16)
        step = lambda p, s, g: optimizer.update_if_finite(opt, g, s, p)
        traced = jax.make_jaxpr(step)(params, opt.init(params), grads)
        [cond] = [e for e in traced.eqns if e.primitive.name == "cond"]
        shapes = {x.shape for x in jax.tree.leaves(params)}
        arrays = [x.aval for x in cond.invars if x.aval.shape in shapes]
        got = collections.Counter(str(x.dtype) for x in arrays)
        self.assertEqual(got["bfloat16"], len(jax.tree.leaves(grads)))
        kept = [x for x in jax.tree.leaves((params, opt.init(params))) if x.ndim]
        self.assertEqual(got["float32"], len(kept))


class ShardedTest(parameterized.TestCase):
    def test_sharded_is_unsharded(self):
        mesh = jax.make_mesh((2, 4), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
        specs = {
            "embed_tokens": P("fsdp"),
            "norm": P(),
            "layers_0": {
                "q_b_proj": P(None, "tensor", "fsdp"),
                "gate": P(None, "fsdp", "tensor"),
                "e_score_correction_bias": P(),
            },
        }
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        opt, trees = make(ns_dtype="float32"), [random_tree(i) for i in range(3)]
        expected, _, _ = run(opt, trees[0], trees[1:])
        sharded = [jax.device_put(tree, shardings) for tree in trees]
        got, state, _ = run(opt, sharded[0], sharded[1:])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=ROUNDING), got, expected
        )
        muon = state.inner.inner_states["muon"].inner_state[0][0]
        moment = muon.trace["layers_0"]["q_b_proj"]
        self.assertEqual(
            moment.sharding.shard_shape(moment.shape),
            shardings["layers_0"]["q_b_proj"].shard_shape(moment.shape),
        )

    @parameterized.parameters({"data": 2}, {"data": 2, "fsdp": 2, "tensor": 2})
    def test_the_norm_on_a_mesh_is_one_sum_of_all_shards(self, **axes):
        mesh = runs.first_devices(**axes)
        opt, params, grads = make(name="adamw"), random_tree(0), random_tree(1)
        state = opt.init(params)

        @jax.jit
        def norm(grads):
            _, _, metrics = optimizer.update_if_finite(opt, grads, state, params)
            return metrics["train/grad_norm"]

        placed = jax.device_put(grads, sharding.shardings(SMALL_DIMS, mesh))
        with jax.set_mesh(mesh):
            got, text = norm(placed), norm.lower(placed).as_text()
        grads["layers_0"].pop("e_score_correction_bias")  # not trained
        want = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
        np.testing.assert_allclose(got, want, rtol=1e-6)
        self.assertEqual(text.count("stablehlo.all_reduce"), 1)


class StateDimsTest(parameterized.TestCase):
    """The sharding of the optimizer's state, by logical dims."""

    @parameterized.product(
        fields=[
            {"name": "adamw"},
            {},
            {"muon_split": False, "moment_dtype": "bfloat16"},
            {"muon_split_rope": True, "muon_lm_head": True, "router_gate": "adamw"},
        ],
        trained=["", "indexer"],
    )
    def test_every_moment_is_sharded_like_its_parameter(self, fields, trained):
        model = presets.GLM5_2
        dims, params = transformer.param_dims(model), transformer.abstract_params(model)
        is_trained = lambda path: not trained or trained in path
        config = config_lib.OptimConfig(**fields)
        opt = optimizer.make_optimizer(config, model, dims, 20, is_trained)
        state = jax.eval_shape(opt.init, params)
        got = _flat_dims(opt.state_dims(state, params))
        arrays = [(path, names) for path, names in got if names]
        by_names = {_names(path): names for path, names in _flat_dims(dims)}
        for path, found in arrays:
            inside = [i for i, key in enumerate(path) if hasattr(key, "name")][-1]
            self.assertEqual(found, by_names[_names(path[inside + 1 :])])
        moments = [x for x in jax.tree.leaves(state) if x.ndim > 1]
        self.assertLen(arrays, len(moments))
        labels = collections.Counter(jax.tree.leaves(opt.labels))
        self.assertLen(moments, labels["muon"] + 2 * labels["adamw"])

    def test_the_names_of_branches_do_not_matter(self):
        opt, params = make(), random_tree(0)
        other = jax.tree.map(lambda label: f"another {label}", opt.labels)
        branches = {label: optax.trace(0.9) for label in set(jax.tree.leaves(other))}
        opt = dataclasses.replace(opt, transform=optax.partition(branches, other))
        got = opt.state_dims(jax.eval_shape(opt.init, params), params)
        self.assertEqual(
            set(jax.tree.leaves(got.inner)), {"V", "D", "L", "Q", "N", "H", "E"}
        )

    @parameterized.named_parameters(
        ("path", lambda params: {"factor": {"w": params["embed_tokens"]}}),
        ("shape", lambda params: {"embed_tokens": params["embed_tokens"].T}),
    )
    def test_a_matrix_that_mirrors_no_parameter_is_refused(self, moments):
        extra = optax.GradientTransformation(
            moments, lambda updates, state, _: (updates, state)
        )
        opt, params = make(), random_tree(0)
        opt = dataclasses.replace(opt, transform=optax.chain(opt.transform, extra))
        state = jax.eval_shape(opt.init, params)
        name = next(iter(moments(params)))
        with self.assertRaisesRegex(ValueError, rf"\['{name}'\].*mirrors no parameter"):
            opt.state_dims(state, params)


def _flat_dims(dims):
    is_dims = lambda x: type(x) is tuple and all(isinstance(n, str) for n in x)
    return jax.tree.leaves_with_path(dims, is_leaf=is_dims)


def _names(path):
    return tuple(key.key for key in path)


class StateTest(parameterized.TestCase):
    def test_muon_keeps_one_moment(self):
        opt = make()
        params = random_tree(0)
        state = jax.eval_shape(opt.init, params)
        total = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
        muon = sum(params["layers_0"][k].size for k in ("q_b_proj", "gate"))
        adamw = sum(params[k].size for k in ("embed_tokens", "norm"))
        self.assertEqual(total, muon + 2 * adamw)


if __name__ == "__main__":
    environment.main()
