"""The training step of stage rl: loss, gate, updates; and the batch that it gets."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import environments, sharding
from glm5_jax import mesh as mesh_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.model import cached, mtp, transformer
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import gateway
from glm5_jax.training import computed, policy
from glm5_jax.training import program as program_lib
from glm5_jax.training import step as step_lib
from glm5_jax.training.feeds import player, rounds
from glm5_jax.training.feeds import rollouts as rl_lib
from tests import environment, runs
from tests.model import tiny
from tests.training import rl_runs

T, ROWS = rl_runs.LENGTH, 8
ORDER_ATOL = 1e-6  # of sums of order 0.1 in float32, in another order
GAP_ATOL = 1e-5  # log-probabilities from two programs, in float32
BETA = 1.02  # so narrow that rounding leaves it
RL = {"updates_per_rollout": 2, "max_logprob_gap": 0.05, "pop_beta": BETA}
CONFIG = rl_runs.make_config(
    RL,
    # Few tokens: the mean log-probability is rounded by less than ORDER_ATOL.
    rl_runs.DENSE | {"vocab_size": 8},
    # Adam's step is then a smooth function of the gradient, not of its sign.
    optim=config_lib.OptimConfig(
        name="adamw",
        learning_rate=0.1,
        end_learning_rate=0.1,
        schedule="constant",
        weight_decay=0.0,
        adam_eps=1e-2,
    ),
)
TWO_LAYERS = {"num_hidden_layers": 2}  # that choose experts and keys, and MTP
WHOLE = rl_runs.make_config(RL, TWO_LAYERS)
MOST_KEYS = 36  # of a query; fewer than a row has places, or nothing would be selected
OBSERVATION = "<tool_response>", "</tool_response>"


@functools.cache
def params(model=CONFIG.model):
    return tiny.params(model)


@functools.cache
def loss_function(config):
    return jax.jit(policy.value_and_grad, static_argnums=1)


@functools.cache
def metrics_function():
    """Compiles nothing for the gradient."""
    return jax.jit(lambda *args: policy.value_and_grad(*args)[0][1], static_argnums=1)


def loss_and_grads(batch, config=CONFIG):
    (loss, metrics), grads = loss_function(config)(params(config.model), config, batch)
    return jax.device_get((loss, metrics, grads))


def logprobs_of(batch, config=CONFIG, weights=None):
    """The trainer's, of the file's parameters or of other weights."""
    read = ("tokens", "targets", "segment_ids", "positions", "experts")
    batch = {name: batch[name] for name in read if name in batch}
    weights = params(config.model) if weights is None else weights
    return np.asarray(logprobs_function()(weights, config, batch))


@functools.cache
def logprobs_function():
    return jax.jit(policy.token_logprobs, static_argnums=1)


def forward(batch):
    """The outputs of the whole model, which may be told the experts."""
    experts = batch.get("experts")
    return jax.jit(transformer.forward, static_argnums=1)(
        params(WHOLE.model),
        WHOLE.model,
        batch["tokens"],
        batch["segment_ids"],
        batch["positions"],
        experts=None if experts is None else np.moveaxis(experts, 2, 0),
    )


@functools.cache
def make_batch(config=CONFIG):
    """Rows of episodes whose rollout log-probs are near the trainer's, but for some."""
    rng = np.random.default_rng(0)
    lengths = [(int(n),) for n in rng.integers(8, T + 1, ROWS)]
    batch = jax.device_get(tiny.batch(config.model, lengths, T))
    mask = (batch["segment_ids"] > 0) & (rng.random((ROWS, T)) < 0.7)
    logprobs = logprobs_of(batch, config)
    gaps = rng.uniform(-0.01, 0.01, (ROWS, T))
    gaps[np.arange(3), mask.argmax(1)[:3]] = 1.0  # beyond the band of IcePop
    advantages = rng.normal(size=(ROWS, 1)) * np.ones((1, T))
    weights = np.ones((1, T)) / (ROWS * mask.sum(1, keepdims=True))
    values = {"rollout_logprobs": logprobs - gaps, "advantages": advantages}
    values |= {"weights": weights * mask, "loss_mask": mask}
    return batch | {k: np.asarray(v, np.float32) for k, v in values.items()}


def assert_close(got, wanted, atol=ORDER_ATOL):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), got, wanted
    )


def icepop_by_formula(params, batch, old):
    """-sum w pop(rho) min(r A, clip(r) A), of tokens that were sampled."""
    rl = CONFIG.rl
    logprobs = policy.token_logprobs(params, CONFIG, batch)
    mask = batch["loss_mask"] > 0
    r = jnp.exp(logprobs - old)
    rho = jnp.exp(old - batch["rollout_logprobs"])
    is_inside = (rho >= 1 / rl.pop_beta) & (rho <= rl.pop_beta)
    a = batch["advantages"]
    surrogate = jnp.minimum(r * a, jnp.clip(r, 1 - rl.clip_low, 1 + rl.clip_high) * a)
    tokens = jnp.where(mask & is_inside, rho * surrogate, 0)
    is_moved = (r > 1 + rl.clip_high) | (r < 1 - rl.clip_low)
    return -jnp.sum(batch["weights"] * tokens), jnp.sum(mask & is_moved)


@functools.cache
def formula():
    return jax.jit(jax.value_and_grad(icepop_by_formula, has_aux=True))


@functools.partial(jax.jit, static_argnums=1)
def mtp_logits(params, model, batch):
    """Returns the logits of the first step of multi-token prediction."""
    read = (batch[name] for name in ("tokens", "segment_ids", "positions"))
    out = transformer.forward(params, model, *read)
    ahead, embedding = mtp.ahead(batch["tokens"], 1), params["embed_tokens"]
    states, _ = mtp.steps(
        params["mtp"], model, embedding, out.hidden, ahead, out.context
    )
    return transformer.logits(params, model, states[0])


class LossTest(parameterized.TestCase):
    def test_order_of_rows_does_not_matter(self):
        wanted = loss_and_grads(make_batch())
        order = np.random.default_rng(1).permutation(ROWS)
        got = loss_and_grads({k: v[order] for k, v in make_batch().items()})
        assert_close(got, wanted)

    def test_parts_one_after_the_other_do_not_matter(self):
        optim = dataclasses.replace(CONFIG.optim, accumulation_steps=4)
        config = dataclasses.replace(CONFIG, optim=optim)
        got, wanted = loss_and_grads(make_batch(), config), loss_and_grads(make_batch())
        assert_close(got, wanted)

    def test_it_is_the_formula_and_rows_of_padding_do_not_matter(self):
        few = {k: v[: ROWS // 2] for k, v in make_batch().items()}
        old = logprobs_of(make_batch())
        (wanted, _), wanted_grads = formula()(params(), few, old[: ROWS // 2])
        padded = {k: np.concatenate([v, np.zeros_like(v)]) for k, v in few.items()}
        loss, metrics, grads = loss_and_grads(padded)
        assert_close((loss, grads), (wanted, wanted_grads))
        mask = few["loss_mask"] > 0
        gaps = np.abs(old[: ROWS // 2] - few["rollout_logprobs"])[mask]
        self.assertAlmostEqual(metrics[policy.GAP], gaps.mean(), places=5)
        self.assertAlmostEqual(metrics["rl/masked_fraction"], 3 / mask.sum(), places=6)

    def test_mtp_learns_beside_the_policy(self):
        """Its loss is that of a loop; no other gradient changes."""
        batch = make_batch()
        self.assertEqual(batch["segment_ids"].sum(1).max(), MOST_KEYS)
        # Every key is selected, so that the policy's gradient is that of CONFIG.
        model = dataclasses.replace(
            CONFIG.model,
            num_nextn_predict_layers=1,
            attention="sparse",
            index_topk=MOST_KEYS,
        )
        rl = dataclasses.replace(CONFIG.rl, trains_mtp=True)
        config = dataclasses.replace(CONFIG, rl=rl, model=model)
        own = params() | {"mtp": params(model)["mtp"]}
        (loss, metrics), grads = jax.device_get(
            loss_function(config)(own, config, batch)
        )
        before, _, wanted = loss_and_grads(batch)
        found = metrics["train/mtp_loss"]
        self.assertAlmostEqual(loss - before, config.loss.mtp_weight * found, places=5)
        mtp_grads = grads.pop("mtp")
        assert_close(grads, wanted)
        self.assertGreater(np.abs(mtp_grads["eh_proj"]).max(), 0)
        for x in jax.tree.leaves(mtp_grads["block"]["indexer"]):
            self.assertEqual(np.abs(x).max(), 0)
        logits = np.asarray(mtp_logits(own, model, batch), np.float64)
        losses = []
        for row, place in np.ndindex(ROWS, T - 1):
            segments, mask = batch["segment_ids"][row], batch["loss_mask"][row]
            if segments[place] == segments[place + 1] and mask[place + 1]:
                x, target = logits[row, place], batch["targets"][row, place + 1]
                losses.append(np.log(np.exp(x - x.max()).sum()) + x.max() - x[target])
        self.assertAlmostEqual(found, np.mean(losses), places=5)

    @pytest.mark.slow
    def test_sharding_does_not_matter(self):
        wanted = loss_and_grads(make_batch(WHOLE), WHOLE)
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, fsdp=2, expert=2))
        places = sharding.shardings(transformer.param_dims(WHOLE.model), mesh)
        where = jax.NamedSharding(mesh, sharding.spec(("B", "T")))
        function = jax.jit(policy.value_and_grad, static_argnums=1)
        with jax.set_mesh(mesh):
            (loss, metrics), grads = function(
                jax.device_put(params(WHOLE.model), places),
                WHOLE,
                jax.device_put(make_batch(WHOLE), where),
            )
            assert_close(jax.device_get((loss, metrics, grads)), wanted)

    def test_tokens_that_were_not_sampled_have_no_gradient(self):
        """Whatever is claimed of it, even NaN: the same bits."""
        batch = make_batch()
        wanted = loss_and_grads(batch)
        hidden = batch["loss_mask"] == 0
        broken = dict(batch)
        for name in ("rollout_logprobs", "advantages"):
            broken[name] = np.where(hidden, np.float32(np.nan), batch[name])
        broken["weights"] = np.where(hidden, np.float32(3), batch["weights"])
        got = loss_and_grads(broken)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)

    def test_the_gap_is_that_before_the_updates(self):
        """Also for dis, whose own ratio holds what the updates have moved."""
        batch = dict(make_batch())
        moved = batch["rollout_logprobs"] + 0.25
        rl = dataclasses.replace(CONFIG.rl, objective="dis")
        config = dataclasses.replace(CONFIG, rl=rl)
        batch |= {"old_logprobs": moved}
        metrics = jax.device_get(metrics_function()(params(), config, batch))
        self.assertAlmostEqual(metrics[policy.GAP], 0.25, places=5)
        self.assertAlmostEqual(metrics[f"{policy.GAP}_max"], 0.25, places=5)
        self.assertNotAlmostEqual(float(metrics["rl/ratio"]), np.exp(0.25), places=2)


@functools.cache
def two_updates():
    """The jitted step and the optimizer's first state."""
    optimizer = step_lib.make_optimizer(CONFIG)
    step = jax.jit(policy.make_policy_step(CONFIG, optimizer))
    return step, jax.jit(optimizer.init)(params())


class UpdatesTest(parameterized.TestCase):
    def test_two_updates_equal_a_loop_with_the_log_probs_from_before(self):
        batch = make_batch()
        old = logprobs_of(batch)
        transform = optax.adamw(0.1, b1=0.9, b2=0.95, eps=1e-2, weight_decay=0.0)
        transform = optax.partition(
            {"trained": transform, "frozen": optax.set_to_zero()},
            jax.tree.map(
                lambda label: "frozen" if label == "frozen" else "trained",
                step_lib.make_optimizer(CONFIG).labels,
            ),
        )

        @jax.jit
        def update(grads, state, params):
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        wanted, state, losses = params(), jax.jit(transform.init)(params()), []
        for first in range(2):
            part = {k: v[first::2] for k, v in batch.items()}
            part["weights"] = 2 * part["weights"]
            (loss, num_moved), grads = formula()(wanted, part, old[first::2])
            wanted, state = update(grads, state, wanted)
            losses.append(float(loss))
        self.assertGreater(num_moved, 3)  # or old log-probs would not be tested
        step, state = two_updates()
        got, state, metrics = step(params(), state, batch)
        assert_close(got, wanted, atol=1e-5)  # two steps of 0.1 g / (|g| + 0.01)
        self.assertAlmostEqual(metrics["train/loss"], np.mean(losses), places=5)
        self.assertEqual(int(state.num_updates), 2)
        self.assertEqual(metrics["rl/trained_tokens"], batch["loss_mask"].sum())
        self.assertGreater(metrics["rl/clip_fraction"], 0)
        halves = [batch["loss_mask"][first::2].sum() for first in range(2)]
        fraction = np.mean([2 / halves[0], 1 / halves[1]])  # rows 0 and 2, row 1
        self.assertAlmostEqual(metrics["rl/masked_fraction"], fraction, places=6)

    def test_a_step_may_forget_the_moments_of_those_before_it(self):
        batch, rl = make_batch(), dataclasses.replace(CONFIG.rl, forgets_moments=True)
        config = dataclasses.replace(CONFIG, rl=rl)
        optimizer = step_lib.make_optimizer(config)
        forgetting = jax.jit(policy.make_policy_step(config, optimizer))
        remembering, fresh = two_updates()
        _, state, _ = remembering(params(), fresh, batch)
        wanted, _, _ = remembering(params(), state._replace(inner=fresh.inner), batch)
        got, after, _ = forgetting(params(), state, batch)
        assert_close(got, wanted, atol=1e-6)
        self.assertEqual(int(after.num_updates), 4)  # the schedule does not begin anew
        kept, _, _ = jax.device_get(remembering(params(), state, batch))
        far = jax.tree.map(
            lambda a, b: np.abs(a - b).max(), kept, jax.device_get(wanted)
        )
        self.assertGreater(max(jax.tree.leaves(far)), 1e-3)

    def test_moments_that_it_forgets_are_written_in_place(self):
        """Otherwise they stay on the devices beside the new ones."""
        rl = dataclasses.replace(CONFIG.rl, forgets_moments=True, updates_per_rollout=1)
        config = dataclasses.replace(CONFIG, rl=rl)
        program = program_lib.make_program(config, runs.first_devices())
        kept = jax.tree.leaves((program.params, program.opt_state))
        text = program.lower(ROWS).as_text()
        self.assertEqual(text.count("tf.aliasing_output"), len(kept))

    def test_log_probs_from_before_take_no_more_rows_at_once_than_an_update(self):
        optim = dataclasses.replace(CONFIG.optim, accumulation_steps=2)
        config = dataclasses.replace(CONFIG, optim=optim)
        optimizer = step_lib.make_optimizer(config)
        step = policy.make_policy_step(config, optimizer)
        shapes = jax.eval_shape(optimizer.init, params())
        text = str(jax.make_jaxpr(step)(params(), shapes, make_batch()))
        hidden = f"{T},{config.model.hidden_size}]"
        self.assertIn(f"f32[{ROWS // 4},{hidden}", text)
        self.assertNotIn(f"f32[{ROWS // 2},{hidden}", text)
        self.assertNotIn(f"f32[{ROWS},{hidden}", text)

    @parameterized.parameters(0, 1)
    def test_one_bad_half_stops_both_updates(self, bad):
        batch = dict(make_batch())
        gaps = np.zeros((ROWS, 1), np.float32)
        gaps[bad::2] = 0.2
        batch["rollout_logprobs"] = batch["rollout_logprobs"] + gaps
        step, state = two_updates()
        after, new_state, metrics = step(params(), state, batch)
        self.assertGreater(metrics[policy.GAP], CONFIG.rl.max_logprob_gap)
        jax.tree.map(np.testing.assert_array_equal, after, params())
        jax.tree.map(np.testing.assert_array_equal, new_state.inner, state.inner)
        self.assertEqual(int(new_state.num_updates), 0)
        self.assertEqual(int(metrics["optim/skipped_total"]), 2)
        self.assertEqual(int(metrics["optim/skipped_in_a_row"]), 0)


def calculator_episode(template, taskset, index, reward):
    """An episode in which every turn of a demonstration was sampled."""
    task = taskset.task("train", 0, index)
    rendered = template.render(taskset.demonstration(task), task.tools)
    size = len(rendered.tokens) - rendered.mask[::-1].index(True)  # ends sampled
    mask = rendered.mask[:size]
    logprobs = [-0.5 * sampled for sampled in mask]
    versions = [0 if sampled else gateway.NOT_SAMPLED for sampled in mask]
    sample = gateway.Sample(rendered.tokens[:size], mask, logprobs, versions).check()
    return episodes_lib.Episode(
        task=task,
        group=0,
        samples=[sample],
        reward=protocol.Reward(reward),
        label=protocol.Label.OK,
        num_turns=2,
        num_forks=0,
        transcript=[],
        reason="",
        num_drift_tokens=0,
        num_truncated=0,
        close_error="",
    )


class BatchTest(parameterized.TestCase):
    def test_observations_of_a_tool_are_read_but_not_learned(self):
        config = rl_runs.make_config(
            {"environment": "calculator_untold:2", "prompts_per_step": 1, "slots": 1},
            data=config_lib.DataConfig(
                tokenizer="byte_chat", enable_thinking=False, sequence_length=256
            ),
        )
        feed = rl_lib.Rollouts(config)
        template = templates.make_template(config.data, feed.tokenizer)
        taskset = environments.make(config.rl.environment)
        rewards = [1.0, 0.0, 0.0, 0.0]
        played = [
            calculator_episode(template, taskset, i, r) for i, r in enumerate(rewards)
        ]
        with (
            mock.patch.object(player.Player, "publish"),
            mock.patch.object(rounds.Rounds, "_round", return_value=[played]),
        ):
            batch, metrics = feed.next({}, 0)
        self.assertEqual(metrics["rollout/episodes"], 4)
        advantages = (np.array(rewards) - 0.25) / (0.5 + 1e-6)
        for row, episode in enumerate(played):
            (sample,) = episode.samples
            for i, target in enumerate(sample.tokens[1:]):
                is_sampled = sample.mask[i + 1]
                self.assertEqual(batch["tokens"][row, i], sample.tokens[i])
                self.assertEqual(batch["targets"][row, i], target)
                self.assertEqual(batch["loss_mask"][row, i], is_sampled)
                count = sum(sample.mask)
                wanted = {
                    "advantages": advantages[row],
                    "weights": 1 / (4 * count),
                    "rollout_logprobs": -0.5,
                }
                for name, value in wanted.items():
                    got = batch[name][row, i]
                    self.assertAlmostEqual(got, value * is_sampled, places=6)
            ids = feed.tokenizer.special_ids
            first, last = map(sample.tokens.index, map(ids.get, OBSERVATION))
            self.assertTrue(any(sample.mask[:first]) and any(sample.mask[last + 1 :]))
            self.assertGreater(last, first + 1)
            self.assertFalse(any(sample.mask[first : last + 1]))
            self.assertEqual(batch["segment_ids"][row].sum(), len(sample.tokens) - 1)


@functools.cache
def rollouts_of(weights, temperature=1.0):
    """A batch that a real engine has played, with its routing."""
    rl = {"rollout_weights": weights, "temperature": temperature}
    config = rl_runs.make_config(rl | {"router_replay": True}, TWO_LAYERS)
    taskset = rl_runs.Lottery()
    with mock.patch.object(environments, "make", return_value=taskset):
        feed = rl_lib.Rollouts(config)
    return feed.next(params(WHOLE.model), 0)[0]


def experts_of(batch):
    """The experts that each token of the batch went to."""
    aux, shape = forward(batch).aux, batch["tokens"].shape
    return np.moveaxis(np.asarray(cached.chosen_experts(WHOLE.model, aux, shape)), 0, 2)


class RouterReplayTest(parameterized.TestCase):
    def test_same_weights_route_alike_replayed_or_not(self):
        batch = rollouts_of("same")
        real, mask = batch["segment_ids"] > 0, batch["loss_mask"] > 0
        without = {k: v for k, v in batch.items() if k != "experts"}
        replayed, chosen = logprobs_of(batch, WHOLE), logprobs_of(without, WHOLE)
        for experts in (experts_of(batch), experts_of(without)):
            np.testing.assert_array_equal(experts[real], batch["experts"][real])
        np.testing.assert_allclose(replayed[real], chosen[real], rtol=0, atol=GAP_ATOL)
        recorded = batch["rollout_logprobs"]
        np.testing.assert_allclose(
            replayed[mask], recorded[mask], rtol=0, atol=GAP_ATOL
        )

    def test_log_probs_are_those_of_the_temperature(self):
        batch, temperature = rollouts_of("same", 0.7), 0.7
        rl = dataclasses.replace(WHOLE.rl, temperature=temperature)
        got = logprobs_of(batch, dataclasses.replace(WHOLE, rl=rl))
        recorded, mask = batch["rollout_logprobs"], batch["loss_mask"] > 0
        np.testing.assert_allclose(got[mask], recorded[mask], rtol=0, atol=GAP_ATOL)
        self.assertGreater(
            np.abs(logprobs_of(batch, WHOLE) - recorded)[mask].max(), 0.1
        )

    def test_rollouts_of_4_bits_are_replayed_where_the_trainer_would_choose_others(
        self,
    ):
        batch = rollouts_of("w4a16")
        real = batch["segment_ids"] > 0
        without = {k: v for k, v in batch.items() if k != "experts"}
        np.testing.assert_array_equal(experts_of(batch)[real], batch["experts"][real])
        others = np.sort(experts_of(without)) != np.sort(batch["experts"])
        self.assertGreater(others[real].sum(), 0)

    @parameterized.parameters("int8", "w4a16")
    def test_the_same_rounding_on_both_sides_leaves_no_gap(self, scheme):
        """The rollouts' codes stand for the numbers of a quantization-aware step."""
        batch = {k: v for k, v in rollouts_of(scheme).items() if k != "experts"}
        recorded, mask = batch["rollout_logprobs"], batch["loss_mask"] > 0
        aware = dataclasses.replace(WHOLE, quantization_aware=scheme)
        round_all = jax.jit(computed.weights, static_argnums=1)
        rounded = round_all(params(WHOLE.model), aware)
        for weights, least, most in (
            (rounded, 0.0, GAP_ATOL),
            (params(WHOLE.model), 1e-3, 10.0),
        ):
            gaps = np.abs(logprobs_of(batch, WHOLE, weights) - recorded)[mask]
            self.assertBetween(gaps.max(), least, most)
            self.assertBetween(gaps.mean(), least, most)

    def test_quantized_rollouts_have_a_gap_that_is_logged_and_masked(self):
        without = {k: v for k, v in rollouts_of("w4a16").items() if k != "experts"}
        mask = without["loss_mask"] > 0
        optim = dataclasses.replace(WHOLE.optim, accumulation_steps=2)
        parts = dataclasses.replace(WHOLE, optim=optim)
        metrics = metrics_function()(params(WHOLE.model), parts, without)
        log_rho = (logprobs_of(without, WHOLE) - without["rollout_logprobs"])[mask]
        self.assertGreater(metrics[policy.GAP], 1e-3)
        self.assertAlmostEqual(metrics[policy.GAP], np.abs(log_rho).mean(), places=5)
        wanted = np.mean(np.abs(log_rho) > np.log(BETA))
        self.assertBetween(wanted, 0.01, 0.99)
        self.assertAlmostEqual(metrics["rl/masked_fraction"], wanted, delta=1e-2)
        self.assertAlmostEqual(metrics["rl/ratio"], np.exp(log_rho).mean(), places=4)
        with self.subTest("the experts' load is that of the layer where it is worst"):
            chosen = experts_of(without)[without["segment_ids"] > 0]
            layers = chosen.swapaxes(0, 1)
            counts = [np.bincount(x.ravel(), minlength=8) for x in layers]
            worst = max(n.max() / n.mean() for n in counts)
            self.assertAlmostEqual(metrics["moe/max_load"], worst, places=5)


if __name__ == "__main__":
    environment.main()
