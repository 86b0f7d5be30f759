"""Probes of a tiny model against loops in numpy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax import sharding
from glm5_jax.evals import catalogue, held_out, record, runner
from glm5_jax.evals.probes import attention as attention_probe
from glm5_jax.evals.probes import mtp as mtp_probe
from glm5_jax.evals.probes import walk
from glm5_jax.inference import placement
from glm5_jax.model import attention as attention_lib
from glm5_jax.model import context as context_lib
from glm5_jax.model import mtp, transformer
from tests import environment, runs
from tests.evals import subjects
from tests.model import tiny

ATOL = 2e-5  # float32 sums in another order
LENGTH = 24
SUBJECT = subjects.subject(num_hidden_layers=2)
BATCH = jax.device_get(tiny.batch(SUBJECT.config, [(20,), (13, 9)], LENGTH, seed=1))
ROWS = [
    held_out.Row("text", {name: x[i] for name, x in BATCH.items()}) for i in range(2)
]


def probe(name, tasks=ROWS, subject=SUBJECT):
    """The figures of every task, in their order."""
    suite, setting = catalogue.SUITES[name], record.Setting(length=LENGTH)
    answers = dict(suite.answer(subject, setting, [*enumerate(tasks)]))
    return [answers[i].figures for i in range(len(tasks))]


def inputs_of_layers():
    """The parameters and the normed input of each layer, as numpy."""
    visits = walk.visits(SUBJECT.params, SUBJECT.config, BATCH)
    return [jax.device_get((v.params, walk.normed(v))) for v in visits]


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def rotated(x, position):
    """Turns the pairs (2i, 2i + 1) of a vector by their angles."""
    size = len(x)
    angles = position * SUBJECT.config.rope_theta ** (-np.arange(0, size, 2) / size)
    turned = (x[0::2] + 1j * x[1::2]) * np.exp(1j * angles)
    return np.stack([turned.real, turned.imag], -1).reshape(size)


def attention_of(params, x, row, t):
    """Logits [N, S] and index scores [S] of query t over its visible keys."""
    config, attn = SUBJECT.config, params["self_attn"]
    segments, positions = BATCH["segment_ids"][row], BATCH["positions"][row]
    nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
    c_q = rms(x @ attn["q_a_proj"], attn["q_a_layernorm"], config.latent_norm_eps)
    kv = x @ attn["kv_a_proj"]
    c = rms(kv[:, :rank], attn["kv_a_layernorm"], config.latent_norm_eps)
    seen = [s for s in range(t + 1) if segments[s] == segments[t] > 0]
    logits = np.zeros((config.num_attention_heads, len(seen)))
    for n in range(config.num_attention_heads):
        q = c_q[t] @ attn["q_b_proj"][:, n]
        q_rope = rotated(q[nope:], positions[t])
        for j, s in enumerate(seen):
            k = c[s] @ attn["k_b_proj"][:, n]
            k_rope = rotated(kv[s, rank:], positions[s])
            logits[n, j] = config.softmax_scale * (q[:nope] @ k + q_rope @ k_rope)
    index = params["indexer"]
    turn = config.qk_rope_head_dim
    w = x[t] @ index["weights_proj"]
    scores = np.zeros(len(seen))
    for j, s in enumerate(seen):
        k = x[s] @ index["wk"]
        k = (k - k.mean()) / np.sqrt(k.var() + 1e-6)
        k = k * index["k_norm_scale"] + index["k_norm_bias"]
        k[:turn] = rotated(k[:turn], positions[s])
        for i in range(config.index_n_heads):
            q = c_q[t] @ index["wq_b"][:, i]
            q[:turn] = rotated(q[:turn], positions[t])
            scores[j] += w[i] * max(q @ k, 0)
    return logits, scores


class AttentionTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        topk, heads = SUBJECT.config.index_topk, SUBJECT.config.num_attention_heads
        cls.largest = np.full((2, 2, heads), -np.inf)  # row, layer, head
        cls.recall = np.zeros((2, 2, 2))  # row, layer, (sum, weight)
        shape = 2, 2, LENGTH, LENGTH  # layer, row, query, key
        cls.mass, cls.selected = np.zeros(shape), np.zeros(shape, bool)
        for layer, (params, x) in enumerate(inputs_of_layers()):
            for row in range(2):
                for t in range(LENGTH):
                    if not BATCH["segment_ids"][row, t]:
                        continue
                    logits, scores = attention_of(params, x[row], row, t)
                    best = np.maximum(cls.largest[row, layer], logits.max(1))
                    cls.largest[row, layer] = best
                    seen = BATCH["segment_ids"][row, : t + 1]
                    [seen] = np.nonzero(seen == seen[t])
                    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
                    best = np.argsort(scores)[-topk:]
                    cls.mass[layer, row, t, seen] = p.mean(0)
                    cls.selected[layer, row, t, seen[best]] = True
                    if len(scores) > topk:
                        cls.recall[row, layer] += p[:, best].sum(1).mean(), 1

    def test_recall_is_the_mass_of_the_selected_keys(self):
        for row, figures in enumerate(probe("recall")):
            for layer in range(2):
                found = figures[f"recall/layer_0{layer}"]
                np.testing.assert_allclose(found, self.recall[row, layer], atol=ATOL)
            whole = self.recall[row].sum(0)
            np.testing.assert_allclose(figures["recall"], whole, atol=2 * ATOL)
            self.assertBetween(whole[0] / whole[1], 0.2, 0.99)

    def test_views_hold_the_mass_and_the_selection_of_each_layer(self):
        found = [*attention_probe.views(SUBJECT.params, SUBJECT.config, BATCH)]
        self.assertEqual([view.label for view in found], ["layer_00", "layer_01"])
        for layer, view in enumerate(found):
            np.testing.assert_allclose(view.mass, self.mass[layer], atol=ATOL)
            np.testing.assert_array_equal(view.selected, self.selected[layer])
            np.testing.assert_array_equal(view.visible, self.mass[layer] > 0)

    def test_largest_logits_are_those_of_the_visible_keys(self):
        for row, figures in enumerate(probe("attention_logits")):
            for layer in range(2):
                for head, wanted in enumerate(self.largest[row, layer]):
                    name = f"largest/layer_0{layer}/head_0{head}"
                    np.testing.assert_allclose(figures[name], (wanted, 1), atol=ATOL)
            largest = self.largest[row].max()
            np.testing.assert_allclose(figures["largest"][0], largest, atol=ATOL)


class GroupedTest(absltest.TestCase):
    def test_largest_logits_are_those_in_the_window(self):
        sizes = config_lib.AttentionVariants(
            num_key_value_heads=2, head_dim=12, sliding_window=5
        )
        subject = subjects.subject(
            num_hidden_layers=1,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            layer_types=("grouped_sliding",),
            variants=sizes,
        )
        [visit] = walk.visits(subject.params, subject.config, BATCH)
        attn, x = jax.device_get((visit.params["self_attn"], walk.normed(visit)))
        suite, setting = catalogue.SUITES["attention_logits"], record.Setting(length=1)
        answers = dict(suite.answer(subject, setting, [*enumerate(ROWS)]))
        turn, plain = subject.config.qk_rope_head_dim, 12 - 8
        self.assertEqual(turn, 8)
        for row in range(2):
            segments, positions = (
                BATCH[name][row] for name in ("segment_ids", "positions")
            )

            def head(weight, t, row=row, positions=positions):
                y = x[row, t] @ weight
                return np.append(y[:plain], rotated(y[plain:], positions[t]))

            for n in range(4):
                wanted = max(
                    head(attn["q_proj"][:, n], t) @ head(attn["k_proj"][:, n // 2], s)
                    for t in range(LENGTH)
                    for s in range(max(t - 4, 0), t + 1)
                    if segments[s] == segments[t] > 0
                )
                found = answers[row].figures[f"largest/layer_00/head_0{n}"][0]
                np.testing.assert_allclose(found, wanted / math.sqrt(12), atol=ATOL)


class RouterTest(absltest.TestCase):
    def test_loads_and_entropies_are_counted_over_the_group(self):
        config = SUBJECT.config
        *_, visit = walk.visits(SUBJECT.params, config, BATCH)
        shared = attention_lib.first_shared(config, 2, LENGTH, False)
        block, x = visit.block, walk.normed(visit)
        attend = jax.jit(
            lambda *args: block.attention.forward(*args, visit.context, shared).x
        )
        out = attend(visit.params, x)
        params = jax.device_get(visit.params)
        x = np.asarray(visit.x + out)
        h = rms(x, params["post_attention_layernorm"], config.rms_norm_eps)
        counts, entropies = np.zeros(config.n_routed_experts), []
        for row, t in zip(*np.nonzero(BATCH["segment_ids"]), strict=True):
            s = 1 / (1 + np.exp(-(h[row, t] @ params["mlp"]["gate"])))
            biased = s + params["mlp"]["e_score_correction_bias"]
            counts[np.argsort(biased)[-config.num_experts_per_tok :]] += 1
            entropies.append(-np.sum(s / s.sum() * np.log(s / s.sum())))
        most, p = math.log(len(counts)), counts / counts.sum()
        [figures] = probe("router", [ROWS])
        wanted = {
            "max_load": counts.max() / counts.mean(),
            "load_entropy": -np.sum(p * np.log(np.where(p > 0, p, 1))) / most,
            "token_entropy": np.mean(entropies) / most,
        }
        for name, value in wanted.items():  # one of the two layers has experts
            for figure in (name, f"{name}/layer_01"):
                np.testing.assert_allclose(figures[figure], (value, 1), atol=ATOL)
        self.assertNotIn("max_load/layer_00", figures)


class MtpTest(absltest.TestCase):
    def test_chains_of_drafts_are_followed_position_by_position(self):
        config, params = SUBJECT.config, SUBJECT.params
        main, drafts = jax.device_get(_distributions(params, config, BATCH))
        segments, num = BATCH["segment_ids"], mtp_probe.DRAFTS
        for row, figures in enumerate(probe("mtp")):
            wanted = {
                f"{kind}/{name}": np.zeros(2)
                for kind in ("greedy", "sampled")
                for name in ("length", *(f"depth_{k + 1}" for k in range(num)))
            }
            for i in range(LENGTH - num):
                if segments[row, i] == 0 or segments[row, i + num] != segments[row, i]:
                    continue
                for kind in ("greedy", "sampled"):
                    chain = length = 1.0
                    for k in range(num):
                        p, q = main[row, i + k + 1], drafts[k, row, i]
                        share = float(p.argmax() == q.argmax())
                        if kind == "sampled":
                            share = np.minimum(p, q).sum()
                        wanted[f"{kind}/depth_{k + 1}"] += chain * share, chain
                        chain *= share
                        length += chain
                    wanted[f"{kind}/length"] += length, 1
            self.assertEqual({*figures}, {*wanted})
            for name, pair in wanted.items():
                np.testing.assert_allclose(figures[name], pair, atol=5 * ATOL)
            self.assertGreater(figures["sampled/length"][1], 0)


def _distributions(params, config, batch):
    """Main distributions [B, T, V], and those of each step of the module."""

    @jax.jit
    def run(params, batch):
        num = mtp_probe.DRAFTS
        model = dataclasses.replace(config, mtp_num_steps=num)
        tokens = batch["tokens"]
        context = context_lib.make_context(
            model, batch["segment_ids"], batch["positions"]
        )
        hidden = transformer.forward(params, model, tokens, context=context).hidden
        ahead, embedding = mtp.ahead(tokens, num), params["embed_tokens"]
        states, _ = mtp.steps(params["mtp"], model, embedding, hidden, ahead, context)
        pair = (
            transformer.logits(params, model, hidden),
            jnp.stack([transformer.logits(params, model, h) for h in states]),
        )
        return jax.tree.map(jax.nn.softmax, pair)

    return run(params, batch)


class MeshTest(absltest.TestCase):
    def test_figures_are_those_of_one_device(self):
        """As evaluate with --config.mesh... reads a model: in shards."""
        mesh = runs.first_devices(fsdp=2, tensor=2)
        places = sharding.shardings(transformer.param_dims(SUBJECT.config), mesh)
        params = jax.device_get(SUBJECT.params)  # numpy cuts without programs
        params = jax.device_put(params, places)
        shards = params["layers_0"]["block_0"]["self_attn"]["q_b_proj"]
        self.assertLen(shards.addressable_shards, 4)
        self.assertEqual(shards.addressable_shards[0].data.size * 4, shards.size)
        on_mesh = dataclasses.replace(SUBJECT, params=params)
        tasks = {"recall": ROWS, "attention_logits": ROWS, "router": [ROWS]}
        for name, rows in tasks.items():
            with placement.using(mesh):
                found = probe(name, rows, on_mesh)
            for ours, alone in zip(found, probe(name, rows), strict=True):
                self.assertEqual(ours.keys(), alone.keys())
                for figure, pair in alone.items():
                    np.testing.assert_allclose(ours[figure], pair, atol=ATOL)


class RequirementTest(absltest.TestCase):
    def test_rows_without_a_choice_of_keys_are_refused(self):
        with self.assertRaisesRegex(config_lib.InputError, "index_topk=6.*got 6"):
            runner.require(["recall"], SUBJECT.config, True, [6])

    def test_a_model_without_the_part_is_refused(self):
        config = tiny.model(
            num_hidden_layers=1,
            layer_types=("latent_sliding",),
            num_nextn_predict_layers=0,
        )
        with self.assertRaisesRegex(
            config_lib.InputError, "(?s)recall needs a layer.*mtp needs.*router needs"
        ):
            runner.require(["recall", "mtp", "router"], config, True, [16])


if __name__ == "__main__":
    environment.main()
