"""IndexShare: one selection for several layers, and for several MTP steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

import pallas_kernels
from glm5_jax import config as config_lib
from glm5_jax import depth
from glm5_jax.model import block, indexer, layers, mtp, transformer
from glm5_jax.model import context as context_lib
from glm5_jax.model.attention import mla
from glm5_jax.weights import index_share
from tests import environment
from tests.model import tiny

T = 16
RTOL = 1e-4  # gradients of small numbers, in float32


OWN = tiny.model(mtp_num_steps=3)
SHARED = dataclasses.replace(OWN, index_share_for_mtp_iteration=True)


def context_of(config, batch):
    return context_lib.make_context(config, batch["segment_ids"], batch["positions"])


def main_states():
    """Random ones in place of the main model's, which are normed."""
    size = 2, T, OWN.hidden_size
    return jnp.asarray(np.random.default_rng(1).normal(size=size), jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def steps(params, config, hidden, batch):
    """Returns the states of MTP and the layer's auxiliary outputs."""
    ahead, context = mtp.ahead(batch["tokens"], 3), context_of(config, batch)
    embedding, weight = params["embed_tokens"], jnp.ones(())
    return mtp.steps(params["mtp"], config, embedding, hidden, ahead, context, weight)


class SharedIndexerLossTest(absltest.TestCase):
    def test_weights_are_one_over_the_users_of_an_index(self):
        config = tiny.model(num_hidden_layers=6, index_topk_pattern="FSSFSF")
        want = [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2, 1]
        np.testing.assert_allclose(transformer.kl_weights(config), want)

    def test_a_layer_without_an_indexer_cannot_select(self):
        config = tiny.model(num_hidden_layers=2, index_topk_pattern="FS")
        with self.assertRaisesRegex(config_lib.InputError, r"F at layers \[1\]"):
            index_share.share({}, config, "FF")

    def test_gradient_is_that_of_the_averaged_target(self):
        """Three layers with one index: KL(mean of their attentions || index)."""
        config = tiny.model(
            index_topk_pattern="FSS",
            first_k_dense_replace=3,  # compiles faster
            num_nextn_predict_layers=0,
        )
        params = tiny.params(config)
        batch = tiny.batch(config, [(T,), (5, 9)], T)
        args = batch["tokens"], batch["segment_ids"], batch["positions"]

        def of_the_model(params):
            out = transformer.forward(
                params, config, *args, with_indexer_loss=True, with_traces=True
            )
            blocks = [b for group in out.aux.values() for b in group.values()]
            return sum(jnp.sum(b.indexer_kl) for b in blocks), out

        grads, out = jax.jit(jax.grad(of_the_model, has_aux=True))(params)
        got = grads["layers_0"]["block_0"]["indexer"]
        target, h, c_q = self._mean_attention(params, config, batch, out)
        mask = out.traces["layers_0"]["block_0"].attended.index.selection.keep
        mask = mask[0].swapaxes(1, 2)
        np.testing.assert_allclose(np.where(mask, 0, target), 0)

        def kl(own):
            projected = indexer.project(own, config, h, c_q, out.context)
            scores = pallas_kernels.indexer_scores(*projected)
            log_q = jax.nn.log_softmax(jnp.where(mask, scores, -1e30))
            log_p = jnp.log(jnp.where(target > 0, target, 1))
            terms = jnp.where(mask, target * (log_p - log_q), 0)
            return jnp.sum(terms) / jnp.sum(batch["loss_mask"])

        first = jax.tree.map(lambda x: x[0], params["layers_0"]["block_0"])
        want = jax.jit(jax.grad(kl))(first["indexer"])
        for name, value in want.items():
            scale = np.abs(value).max()
            np.testing.assert_allclose(
                got[name][0], value, rtol=RTOL, atol=RTOL * scale, err_msg=name
            )

    def _mean_attention(self, params, config, batch, out):
        """Mean of the layers' head-mean probabilities; the first layer's inputs."""
        x = params["embed_tokens"][batch["tokens"]]
        stack = [params["layers_0"]["block_0"]] + [params["layers_1"]["block_0"]] * 2
        traces = tiny.by_layer(config, out.traces)
        probs, inputs = [], []

        @jax.jit
        def project(own, x):
            h = layers.rms_norm(x, own["input_layernorm"], config.rms_norm_eps)
            c_q = mla.query_latent(own["self_attn"], config, h)
            return h, c_q, mla.queries(own["self_attn"], config, c_q, out.context)

        for layer, (block_params, trace) in enumerate(zip(stack, traces, strict=True)):
            step = max(layer - 1, 0)  # of the scan
            own = jax.tree.map(lambda w, step=step: w[step], block_params)
            h, c_q, q = project(own, x)
            k_nope = np.einsum(
                "bsc,cnp->bsnp", trace.attended.kv.c, own["self_attn"]["k_b_proj"]
            )
            scores = np.einsum("btnp,bsnp->bnts", q[0], k_nope)
            scores += np.einsum("btnr,bsr->bnts", q[1], trace.attended.kv.k_rope)
            keep = np.swapaxes(trace.attended.index.selection.keep, 1, 2)[:, None]
            scores = np.where(keep, scores * config.softmax_scale, -np.inf)
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
            total = weights.sum(-1, keepdims=True)
            probs.append(np.mean(weights / np.where(total > 0, total, 1), axis=1))
            inputs.append((h, c_q))
            x = jnp.asarray(trace.x)
        return np.mean(probs, axis=0), *inputs[0]


class MtpTest(parameterized.TestCase):
    @parameterized.named_parameters(("own", False), ("shared", True))
    def test_steps_are_a_loop_over_the_block(self, is_shared):
        """Later steps have their own keys and selection, or those of step 1."""
        config = SHARED if is_shared else OWN
        params = tiny.params(config)
        batch = tiny.batch(config, [(T,), (5, 9)], T)
        states, aux = steps(params, config, main_states(), batch)
        embedding, module = params["embed_tokens"], params["mtp"]

        @jax.jit
        def step(h, ahead, attended):
            context = context_of(config, batch)
            norm = lambda x, name: layers.rms_norm(x, module[name], config.rms_norm_eps)
            pair = [norm(ahead, "enorm"), norm(h, "hnorm")]
            x = jnp.concatenate(pair, axis=-1) @ module["eh_proj"]
            result = block.make(config, depth.mtp_kind(config)).forward(
                module["block"],
                x,
                context,
                kl_weight=jnp.ones(()),
                attended=attended,
            )
            return norm(result.x, "norm"), result

        h, attended = main_states(), None
        for k in range(1, 4):
            ahead = np.asarray(embedding)[np.roll(batch["tokens"], -k, axis=1)]
            h, result = step(h, jnp.asarray(ahead), attended)
            np.testing.assert_allclose(states[k - 1], h, rtol=0, atol=2e-5)
            np.testing.assert_allclose(
                aux.indexer_kl[k - 1], result.aux.indexer_kl, rtol=RTOL
            )
            if is_shared and k == 1:
                attended = result.attended

    def test_sharing_changes_the_later_steps_alone(self):
        params, batch = tiny.params(OWN), tiny.batch(OWN, [(T,), (T,)], T)
        own, reused = (
            np.asarray(steps(params, config, main_states(), batch)[0])
            for config in (OWN, SHARED)
        )
        np.testing.assert_allclose(own[0], reused[0], rtol=0, atol=2e-5)
        self.assertGreater(np.abs(own - reused)[1].max(), 1e-2)


if __name__ == "__main__":
    environment.main()
