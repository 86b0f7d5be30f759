"""What an engine in the trainer's process plays is told by the config."""

import dataclasses
from unittest import mock

from absl.testing import absltest

from glm5_jax.rl.actors import local
from glm5_jax.training.feeds import own_engine
from glm5_jax.training.feeds import player as player_lib
from tests.data import templates_test
from tests.rl import monitor_test, process_test


class OwnEngineTest(absltest.TestCase):
    def test_what_is_done_about_junk_that_is_paid(self):
        rl = dataclasses.replace(
            process_test.CONFIG.rl, num_engines=0, quarantine="off", canary_every=3
        )
        config = dataclasses.replace(process_test.CONFIG, rl=rl)
        with (
            mock.patch.object(player_lib, "Player"),
            mock.patch.object(local, "Local") as made,
        ):
            own_engine.OwnEngine(
                config,
                monitor_test.Shop(monitor_test.square),
                templates_test.template(),
            ).start({}, None)
        _, game, *_ = made.call_args.args
        self.assertEqual(
            dataclasses.asdict(game.watch), {"quarantine": "off", "canary_every": 3}
        )


if __name__ == "__main__":
    absltest.main()
