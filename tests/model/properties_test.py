"""Properties for any parameters: causality, packing, decoding, isolation."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import losses
from glm5_jax.model import cached, mtp, transformer
from glm5_jax.model import selection as selection_lib
from glm5_jax.model.attention import dsa
from pallas_kernels import selection
from tests import environment
from tests.model import tiny

B, T = 3, 24
CONFIGS = {
    "full": tiny.model(),
    "index_share": tiny.index_share(),
    "shared_once": tiny.model(
        num_hidden_layers=2,
        first_k_dense_replace=2,  # compiles faster
        index_topk_pattern="FS",
        num_nextn_predict_layers=0,
    ),
    "one_layer": tiny.model(num_hidden_layers=1, first_k_dense_replace=0),
}
CONFIGS["all_experts"] = dataclasses.replace(
    CONFIGS["one_layer"], num_experts_per_tok=8
)
# One step of multi-token prediction: a gradient compiles faster than that of a loop.
CONFIGS["one_ahead"] = dataclasses.replace(CONFIGS["one_layer"], mtp_num_steps=1)
CONFIGS["variants"] = tiny.variants(mtp_num_steps=1)  # "full" has two
NAMES = (("full", "full"), ("variants", "variants"))
# One computation in another order, in float32; states and logits are of size one.
ATOL = 2e-5


@functools.cache
def parameters(name):
    return tiny.params(CONFIGS[name])


def forward(params, config, batch, **kwargs):
    """Output of the stack, and states [steps, B, T, D] and aux values of MTP."""
    args = batch["tokens"], batch["segment_ids"], batch["positions"]
    out = transformer.forward(params, config, *args, **kwargs)
    if not config.has_mtp:
        return out, jnp.zeros((0, *out.hidden.shape)), {}
    states, aux = mtp.steps(
        params["mtp"],
        config,
        params["embed_tokens"],
        out.hidden,
        mtp.ahead(batch["tokens"], config.mtp_num_steps),
        out.context,
        jnp.ones(()) if kwargs else None,
    )
    return out, states, aux


@functools.partial(jax.jit, static_argnums=1)
def _run(params, config, batch):
    out, states, aux = forward(params, config, batch)
    return jnp.concatenate([out.hidden[None], states]), out.aux | {"mtp": aux}


@functools.partial(jax.jit, static_argnums=1)
def embedding_gradient(params, config, batch, weights):
    """Returns the gradient of a weighted sum of states, and what `_run` returns.

    The gradient is of the embedding alone.
    """

    def total(embed_tokens):
        inputs = params | {"embed_tokens": embed_tokens}
        states, aux = _run.__wrapped__(inputs, config, batch)
        projected = jnp.einsum("kbtd,d->kbt", states, jnp.sin(jnp.arange(32.0)))
        return jnp.sum(weights * projected), (states, aux)

    return jax.grad(total, has_aux=True)(params["embed_tokens"])


def run(params, config, batch):
    """States [1 + steps, B, T, D] (main model, MTP) and aux values, as numpy."""
    if config == CONFIGS["variants"]:  # one program, of a test that needs the gradient
        weights = np.zeros((1 + config.mtp_num_steps, B, T), np.float32)
        return jax.device_get(embedding_gradient(params, config, batch, weights)[1])
    return jax.device_get(_run(params, config, batch))


@functools.partial(jax.jit, static_argnums=1)
def gradient(params, config, batch, weights):
    """Returns the gradient of a weighted sum of losses, and the states."""

    def total(params):
        out, states, aux = forward(params, config, batch, with_indexer_loss=True)
        targets, mask = batch["targets"], batch["loss_mask"]
        head, chunk = params["lm_head"], {"chunk_tokens": T}
        mean = losses.mean_weights
        language = losses.next_token_loss(
            out.hidden, head, targets, mean(mask), **chunk
        )
        if config.has_mtp:
            ahead, counts = losses.mtp_targets(
                targets, mask, batch["segment_ids"], len(states)
            )
            language += losses.mtp_loss(states, head, ahead, mean(counts), **chunk)
        blocks = jax.tree.leaves(
            (out.aux, aux), is_leaf=lambda x: hasattr(x, "indexer_kl")
        )
        losses_of_indexers = [block.indexer_kl for block in blocks]
        indexers = sum(jnp.sum(x) for x in losses_of_indexers if x is not None)
        states = jnp.concatenate([out.hidden[None], states])
        total = weights["language"] * language + weights["indexers"] * indexers
        return total, states

    return jax.grad(total, has_aux=True)(params)


def gradient_of(params, config, batch, **weights):
    """The gradient of what is named."""
    zero = {"language": 0.0, "indexers": 0.0}
    return jax.device_get(gradient(params, config, batch, zero | weights)[0])


def assert_close(got, want, atol=ATOL):
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@functools.partial(jax.jit, static_argnums=(1, 4))
def prefill(params, config, tokens, lengths, capacity):
    """Returns what `cached.prefill` does, and the output of its full pass."""
    out, whole = [], transformer.forward

    def forward(*args, **kwargs):
        out.append(whole(*args, **kwargs))
        return out[0]

    with mock.patch.object(transformer, "forward", forward):
        return *cached.prefill(params, config, tokens, lengths, capacity), out[0]


class OnDemandTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_losses_and_traces(self, is_wanted):
        """By default neither is computed."""
        wanted = {"with_indexer_loss": True, "with_traces": True} if is_wanted else {}
        config, tokens = CONFIGS["one_layer"], jnp.zeros((1, 8), jnp.int32)

        def run(key):
            params = transformer.init_params(config, key)
            return transformer.forward(params, config, tokens, **wanted)

        out = jax.eval_shape(run, jax.random.key(0))
        losses_made = [aux.indexer_kl for aux in out.aux["layers_0"].values()]
        self.assertEqual(out.traces is not None, is_wanted)
        self.assertEqual([loss is not None for loss in losses_made], [is_wanted])


class CausalityTest(parameterized.TestCase):
    def test_no_gradient_from_the_future(self):
        """MTP step k at t reads the tokens up to t + k, and no more."""
        config, params = CONFIGS["variants"], parameters("variants")
        batch = tiny.batch(config, [(T,)] * B, T)
        # Every input is a row of the embedding of its own.
        batch["tokens"] = np.arange(B * T, dtype=np.int32).reshape(B, T)
        for k in range(1 + config.mtp_num_steps):
            for t in (0, 7, T - 1 - k):
                weights = np.zeros((1 + config.mtp_num_steps, B, T), np.float32)
                weights[k, :, t] = 1
                grads, _ = embedding_gradient(params, config, batch, weights)
                grads = np.asarray(grads)
                rows = np.abs(grads[: B * T]).max(-1).reshape(B, T)
                np.testing.assert_array_equal(rows[:, t + k + 1 :], 0)
                self.assertGreater(rows[:, : t + k + 1].max(), 0)
                self.assertGreater(rows[:, t + k].min(), 0)

    @parameterized.named_parameters(*NAMES)
    def test_selection_and_routing_do_not_read_the_future(self, name):
        """They have no gradient: other tokens at the end, same states before."""
        config, params = CONFIGS[name], parameters(name)
        batch = tiny.batch(config, [(T,)] * B, T)
        other = tiny.batch(config, [(T,)] * B, T, seed=1)["tokens"]
        cut = 15
        tokens = np.where(np.arange(T)[None] < cut, batch["tokens"], other)
        before, _ = run(params, config, batch)
        after, _ = run(params, config, batch | {"tokens": tokens})
        for k in range(1 + config.mtp_num_steps):
            assert_close(after[k, :, : cut - k], before[k, :, : cut - k])
            self.assertGreater(np.abs(after - before)[k, :, cut - k].max(), 1e-2)


class SelectionFormTest(parameterized.TestCase):
    def test_states_and_gradients_do_not_depend_on_it(self):
        """A list takes the absorbed form of attention and the loss over lists."""
        config, params = CONFIGS["shared_once"], parameters("shared_once")
        batch = tiny.batch(config, [(T,), (9, 11), (14, 10)], T)
        weights = {"language": 1.0, "indexers": 1.0}
        self.assertEqual(selection.form(T), "mask")
        results = {"mask": jax.device_get(gradient(params, config, batch, weights))}
        for form in ("bits", "list"):
            # A function of its own: jit caches what it traced by function.
            def compute(*args):
                return gradient.__wrapped__(args[0], config, *args[1:])

            with mock.patch.object(selection, "form", return_value=form) as used:
                results[form] = jax.device_get(jax.jit(compute)(params, batch, weights))
            used.assert_called_with(T)
        for form in ("bits", "list"):
            close = functools.partial(assert_close, atol=1e-4)
            jax.tree.map(close, results[form], results["mask"])


class PackingTest(parameterized.TestCase):
    @parameterized.named_parameters(*NAMES)
    def test_documents_of_a_pack_do_not_see_each_other(self, name):
        config, params = CONFIGS[name], parameters(name)
        documents = [(9, 11), (3, 14, 7), (1, 2, 3, 5)]  # alone they are 3 B rows
        batch = tiny.batch(config, documents, T)
        packed, aux = run(params, config, batch)
        loads = 0
        rows = [(row, n) for row, lengths in enumerate(documents) for n in lengths]
        starts = np.concatenate([np.cumsum([0, *ns[:-1]]) for ns in documents])
        for first in range(0, len(rows), B):
            some = rows[first : first + B]
            alone = tiny.batch(config, [(n,) for _, n in some], T)
            tokens = np.array(alone["tokens"])  # its padding stays: noise
            for new, (row, n) in enumerate(some):
                at = starts[first + new]
                tokens[new, :n] = batch["tokens"][row, at : at + n]
            states, own = run(params, config, alone | {"tokens": jnp.asarray(tokens)})
            for new, (row, n) in enumerate(some):
                at = starts[first + new]
                for k in range(1 + config.mtp_num_steps):
                    inside = max(n - k, 0)  # there token i + k is of the document
                    got = packed[k, row, at : at + inside]
                    assert_close(got, states[k, new, :inside])
            loads += self._loads(config, own)
        # Padding is not counted, though each of its tokens is routed.
        np.testing.assert_array_equal(self._loads(config, aux), loads)
        total = sum(n for _, n in rows) * config.num_experts_per_tok
        np.testing.assert_array_equal(loads.sum(-1), total)

    def _loads(self, config, aux):
        blocks = tiny.by_layer(config, aux)
        return np.stack([block.routing.load for block in blocks if block.routing])


class DecodeTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("index_share", "index_share", {}, (4, 4)),  # single tokens: golden_decode_test
        ("variants", "variants", {}, (1, 1, 4, 1, 4)),
        ("selects_all_that_is_cached", "one_layer", {"index_topk": T + 3}, (5, 5)),
        ("dense", "one_layer", {"attention": "dense"}, (1,) * 9),
    )
    def test_prefill_and_decode_equal_the_full_pass(self, name, changes, chunks):
        """Expanded attention over documents, absorbed attention over the cache."""
        config = dataclasses.replace(CONFIGS[name], **changes)
        params = parameters(name)
        lengths = np.array([10, 2, 13])  # of the prompts
        batch = tiny.batch(config, [(n + sum(chunks),) for n in lengths], T)
        tokens = np.asarray(batch["tokens"])
        *_, out = prefill(params, config, tokens, lengths + sum(chunks), T + 3)
        want = np.asarray(out.hidden)
        layers = tiny.by_layer(config, out.traces), tiny.by_layer(config, out.aux)
        decode = jax.jit(cached.decode, static_argnums=1)
        # Behind the prompts, where prefill must not look, are the tokens that follow.
        hidden, cache, *_ = prefill(params, config, tokens, lengths, T + 3)
        for row, n in enumerate(lengths):
            assert_close(np.asarray(hidden)[row, :n], want[row, :n])
        for size in chunks:
            cuts = [slice(n, n + size) for n in lengths]
            new = np.stack([row[cut] for row, cut in zip(tokens, cuts, strict=True)])
            hidden, cache, choices = decode(params, config, cache, jnp.asarray(new))
            for row, cut in enumerate(cuts):
                assert_close(np.asarray(hidden)[row], want[row, cut])
                self._assert_same_choices(choices, layers, row, cut)
            lengths = lengths + size
        np.testing.assert_array_equal(cache.lengths, lengths)

    def _assert_same_choices(self, choices, layers, row, cut):
        """Experts and selected keys are those of the full pass, in every layer."""
        traces, aux = layers
        routings = [block.routing for block in aux if block.routing is not None]
        want = [np.sort(routing.experts[row, cut]) for routing in routings]
        np.testing.assert_array_equal(np.sort(choices.experts[:, row]), want)
        for layer, trace in enumerate(traces):
            is_sparse = isinstance(choices.selection, selection_lib.Listed)
            if not is_sparse or not isinstance(trace.attended, dsa.Attended):
                continue
            index = trace.attended.index
            if index is None:
                continue
            selected = choices.selection.indices[layer, row]
            mask = index.selection.keep[row]
            for t, keys in zip(range(cut.start, cut.stop), selected, strict=True):
                # Where fewer keys are visible than are selected, all of them are.
                kept = np.flatnonzero(mask[: t + 1, t])
                self.assertEqual([k for k in keys.tolist() if k >= 0], kept.tolist())


class SelectionTest(parameterized.TestCase):
    def test_selecting_whole_documents_is_dense_attention(self):
        """The mask is there, as top-k < T, but no document is longer than top-k."""
        config, params = CONFIGS["shared_once"], parameters("shared_once")
        batch = tiny.batch(config, [(9, 12), (12, 12), (5, 1)], T)
        sparse = dataclasses.replace(config, index_topk=12)
        dense = dataclasses.replace(config, attention="dense")
        want, _ = run(params, dense, batch)
        assert_close(run(params, sparse, batch)[0], want)
        few, _ = run(params, config, batch)
        self.assertGreater(np.abs(few - want).max(), 1e-2)  # top-k 6 does select

    def test_top_k_beyond_the_row_is_dense_attention(self):
        config, params = CONFIGS["all_experts"], parameters("all_experts")
        batch = tiny.batch(config, [(9, 12), (T,), (T,)], T)
        sparse = dataclasses.replace(config, index_topk=T + 3)
        dense = dataclasses.replace(config, attention="dense")
        got, want = (run(params, c, batch)[0] for c in (sparse, dense))
        assert_close(got, want)


class IsolationTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("sparse", "shared_once", "sparse"),
        ("dense_warm_up", "one_ahead", "dense_with_indexer_loss"),
    )
    def test_language_model_and_indexers_do_not_train_each_other(self, name, attention):
        config = dataclasses.replace(CONFIGS[name], attention=attention)
        params = parameters(name)
        batch = tiny.batch(config, [(T,), (9, 11), (14, 10)], T)
        args = params, config, batch
        self._assert_only_trains("indexer", False, gradient_of(*args, language=1.0))
        self._assert_only_trains("indexer", True, gradient_of(*args, indexers=1.0))

    def _assert_only_trains(self, part, is_part, grads):
        for path, grad in jax.tree_util.tree_flatten_with_path(grads)[0]:
            keys = [key.key for key in path]
            is_trained = (part in keys) == is_part
            if not is_trained or keys[-1] == "e_score_correction_bias":
                np.testing.assert_array_equal(grad, 0, err_msg=str(keys))
                continue
            for layer in grad if keys[0].startswith("layers_") else [grad]:
                self.assertGreater(np.abs(layer).max(), 0, keys)


class PrecisionTest(parameterized.TestCase):
    def test_recomputation_gives_the_same_gradients_dots(self):
        self.check_recomputation("dots")

    def test_recomputation_gives_the_same_gradients_experts(self):
        self.check_recomputation("experts")

    @pytest.mark.slow
    def test_recomputation_gives_the_same_gradients_kernels(self):
        self.check_recomputation("kernels")

    @pytest.mark.slow
    def test_recomputation_gives_the_same_gradients_full(self):
        self.check_recomputation("full")

    @pytest.mark.slow
    def test_recomputation_gives_the_same_gradients_offload(self):
        self.check_recomputation("offload")

    def check_recomputation(self, policy):
        mode = "dense_with_indexer_loss"
        config = dataclasses.replace(CONFIGS["one_ahead"], attention=mode)
        batch = tiny.batch(config, [(T,), (9, 11), (14, 10)], T)
        got, want = (
            gradient_of(
                parameters("one_ahead"),
                dataclasses.replace(config, remat_policy=name),
                batch,
                language=1.0,
                indexers=1.0,
            )
            for name in (policy, "none")
        )
        jax.tree.map(assert_close, got, want)

    def test_bfloat16_is_close_to_float32(self):
        """Compares without a selection or routes that roundings could change."""
        config = dataclasses.replace(CONFIGS["all_experts"], attention="dense")
        params = parameters("all_experts")
        batch = tiny.batch(config, [(T,), (9, 11), (14, 10)], T)
        want, _ = run(params, config, batch)
        got, _ = run(params, dataclasses.replace(config, dtype="bfloat16"), batch)
        self.assertEqual(got.dtype, jnp.bfloat16)
        error = np.linalg.norm(got.astype(np.float32) - want) / np.linalg.norm(want)
        self.assertLess(error, 2e-2)  # 8 bits of mantissa, three layers


if __name__ == "__main__":
    environment.main()
