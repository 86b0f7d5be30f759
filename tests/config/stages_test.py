"""The records of the stages: whole, and obeyed by a config."""

import dataclasses
import typing

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.config import fields, stages
from glm5_jax.training import loss, program
from glm5_jax.training.run import state
from tests import environment, small_configs
from tests.model import tiny

INDEXER = ("layers_0", "block_0", "self_attn", "indexer", "wk")
MTP = ("mtp", "eh_proj")
QUERY = ("layers_0", "block_0", "self_attn", "q_b_proj")


def make_config(stage, **changes):
    """A config of a stage that keeps all of its rules."""
    config = config_lib.TrainConfig(
        model=tiny.model(),
        data=config_lib.DataConfig(sequence_length=32, batch_size=6),
        rl=config_lib.RLConfig(
            prompts_per_step=2, group_size=4, updates_per_rollout=2, max_new_tokens=8
        ),
    )
    config = small_configs.of_stage(config, stage)
    return dataclasses.replace(config, **changes)


class StagesTest(parameterized.TestCase):
    def test_each_kind_has_its_code(self):
        self.assertSameElements(state.FEEDS, typing.get_args(stages.Feed))
        self.assertSameElements(program.STEPS, typing.get_args(stages.Update))
        for stage in stages.STAGES:
            if stage.update == "losses":
                self.assertContainsSubset(stage.losses, loss.METRIC_NAMES)

    def test_paths_name_fields_of_the_config(self):
        known = {path for path, _, _ in fields.of(config_lib.TrainConfig)}
        for stage in stages.STAGES:
            paths = {*stage.rows, *filter(None, [stage.updates, stage.packed_rows])}
            self.assertContainsSubset(paths, known, stage.name)

    def test_the_command_line_knows_all_of_them(self):
        hint = typing.get_type_hints(config_lib.TrainConfig)["stage"]
        names = ("pretrain", "dsa_warmup", "dsa_sparse", "sft", "rl", "async_rl")
        names += ("distill",)
        self.assertEqual(typing.get_args(hint), names)
        with self.assertRaisesRegex(config_lib.InputError, "Did you mean dsa_sparse"):
            fields.build(config_lib.TrainConfig, {"stage": fields.Text("dsa_spars")})

    @parameterized.named_parameters(
        ("pretrain", "pretrain", 6, 1, True, 2, (True, True, True)),
        ("dsa_warmup", "dsa_warmup", 6, 1, True, 2, (True, False, False)),
        ("dsa_sparse", "dsa_sparse", 6, 1, True, 2, (True, True, True)),
        ("sft", "sft", 6, 1, True, 2, (True, True, True)),
        ("rl", "rl", 8, 2, False, 0, (False, False, True)),
    )
    def test_a_config_obeys(self, name, rows, updates, has_kl, mtp_steps, trained):
        config = make_config(name)
        self.assertEqual((config.num_rows, config.updates_per_step), (rows, updates))
        self.assertEqual(config.num_updates, updates * config.num_steps)
        self.assertEqual(config.has_indexer_loss, has_kl)
        self.assertEqual(config.num_mtp_steps, mtp_steps)
        trains = config.stage_record.trains
        self.assertEqual(tuple(map(trains, (INDEXER, MTP, QUERY))), trained)
        shapes = {x.shape for x in program.batch_shapes(config).values()}
        self.assertEqual(shapes, {(rows, 32)})

    def test_lengths_that_cannot_train_are_refused_by_the_config_itself(self):
        """Before a device is touched, let alone a program compiled."""
        topk = "index_topk must be smaller than data.sequence_length .* got 32 >= 32"
        for stage in ("dsa_warmup", "dsa_sparse", "sft"):
            model = make_config(stage).model
            with self.assertRaisesRegex(config_lib.InputError, topk):
                make_config(stage, model=dataclasses.replace(model, index_topk=32))
        data = config_lib.DataConfig(sequence_length=512, batch_size=6)
        message = r"must not exceed model.max_position_embeddings \(256\), got 512"
        with self.assertRaisesRegex(config_lib.InputError, message):
            make_config("pretrain", data=data)

    def test_settings_of_other_stages_do_nothing(self):
        rl = config_lib.RLConfig(router_replay=True, max_new_tokens=10**6)
        self.assertFalse(make_config("sft", rl=rl).replays_routing)
        fitting = dataclasses.replace(rl, max_new_tokens=8)
        self.assertTrue(make_config("rl", rl=fitting).replays_routing)
        with self.assertRaisesRegex(config_lib.InputError, "max_new_tokens"):
            make_config("rl", rl=rl)

    @parameterized.named_parameters(
        ("bits_per_byte", "pretrain", "eval/bits_per_byte", 1.0, 0.9, 1.1),
        ("success", "rl", "eval/success", 0.5, 0.6, 0.4),
    )
    def test_a_run_stops_at_a_better_value(self, stage, metric, goal, better, worse):
        config = make_config(stage, stop_metric=metric, stop_at=goal)
        for value, is_over in ((better, True), (goal, True), (worse, False)):
            self.assertEqual(config.has_reached({metric: value}), is_over)
        self.assertFalse(config.has_reached({}))
        self.assertEqual(config.stage_record.best.name, metric)


if __name__ == "__main__":
    environment.main()
