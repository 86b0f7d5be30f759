"""What process 0's actors say reaches every process, whole."""

import json
import pathlib
from unittest import mock

from absl.testing import absltest

from glm5_jax.environments import protocol
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import gateway, held_out, trajectories
from glm5_jax.training.feeds import actors, shared_actors
from tests import environment


def episode(number):
    sample = gateway.Sample(
        tokens=[1, 2, number],
        mask=[False, True, True],
        logprobs=[0.0, -0.1, -1 / 3],
        versions=[-1, 4, 5],
        cache_versions=[-1, 4, 4],
        experts=None,
    )
    said = {"role": "user", "content": "hello"}
    return episodes_lib.Episode(
        task=protocol.Task(f"task/{number}", (said,), answer="olleh"),
        group=number,
        samples=[sample],
        reward=protocol.Reward(0.1, {"part": 0.1}),
        label=protocol.Label.OK,
        num_turns=1,
        num_forks=0,
        transcript=[said],
        reason="",
        num_drift_tokens=0,
        num_truncated=0,
        close_error="",
    )


ONE, TWO, THREE, FOUR = map(episode, range(1, 5))
TAKEN = actors.Taken(
    [[ONE, TWO], [THREE, THREE]],
    [ONE, FOUR],
    [FOUR],
    {"groups/done": 3, "actors/engines_idle_share": 0.25},
    {"next": 5, "again": [4]},
    held_out.Evaluation(3, [FOUR]),
)


def records(found):
    return [trajectories.to_json(one) for one in found]


class SharedActorsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.asked = mock.Mock(spec=actors.Actors)
        self.asked.take.return_value = TAKEN
        self.asked.evaluate.return_value = [episode(5)]
        self.asked.memory.return_value = {"next": 7, "again": [1]}

    def made(self):
        return shared_actors.SharedActors(self.asked, self.folder)

    def require_taken(self, taken):
        for name in ("episodes", "unused"):
            ours, theirs = getattr(taken, name), getattr(TAKEN, name)
            self.assertEqual(records(ours), records(theirs))
        self.assertEqual([*map(records, taken.groups)], [*map(records, TAKEN.groups)])
        self.assertEqual(taken.metrics, TAKEN.metrics)
        self.assertEqual(taken.memory, TAKEN.memory)
        self.assertEqual(taken.evaluated.version, 3)
        self.assertEqual(records(taken.evaluated.episodes), records([FOUR]))

    def test_process_0_asks_and_others_read(self):
        first, told, met = self.made(), {}, []
        (self.folder / "shared_episodes_9.json").touch()  # of a trainer that was killed

        def tell(name, make):
            told[name] = make()
            return told[name]

        together = shared_actors.together
        with mock.patch.object(together, "meet", met.append):
            with mock.patch.object(together, "from_first", tell):
                self.require_taken(first.take(4))
            (file,) = self.folder.iterdir()
            self.assertEqual(file.read_text().count('"transcript"'), 5)  # each once
            other = shared_actors.SharedActors(
                mock.Mock(spec=actors.Actors), self.folder
            )
            with mock.patch.object(together, "from_first", lambda name, _: told[name]):
                self.require_taken(other.take(4))
            # The next answer takes the place of the last one.
            with mock.patch.object(together, "from_first", tell):
                self.assertEqual(records(first.evaluate()), records([episode(5)]))
            self.assertLen([*self.folder.iterdir()], 1)
            with mock.patch.object(together, "from_first", lambda name, _: told[name]):
                self.assertEqual(records(other.evaluate()), records([episode(5)]))
        self.assertEqual(self.asked.take.call_args_list, [mock.call(4)])
        self.assertLen({*told}, 2)  # a name is used once
        self.assertEqual(met, [name for name in told for _ in range(2)])
        first.close()
        self.assertEmpty([*self.folder.iterdir()])
        self.asked.close.assert_called_once_with()

    def test_a_folder_that_is_not_shared_is_named(self):
        together, other = shared_actors.together, self.made()
        with mock.patch.object(together, "from_first", return_value="0" * 64):
            for _ in range(2):  # no file, and another one
                words = "rl.weights_store must be one folder"
                with self.assertRaisesRegex(OSError, words):
                    other.take(0)
                (self.folder / "shared_episodes_1.json").write_text(json.dumps({}))

    def test_memory_and_weights(self):
        made = self.made()
        self.assertEqual(made.memory(3), {"next": 7, "again": [1]})
        made.publish({"w": 1}, 2)
        self.asked.publish.assert_called_once_with({"w": 1}, 2)
        with mock.patch.object(shared_actors.together, "is_first", return_value=False):
            made.start({}, None)
            made.evaluate_beside(2)
        self.asked.start.assert_not_called()
        self.asked.evaluate_beside.assert_not_called()
        made.start({"next": 0}, None)
        self.asked.start.assert_called_once_with({"next": 0}, None)
        made.evaluate_beside(3)
        self.asked.evaluate_beside.assert_called_once_with(3)


if __name__ == "__main__":
    environment.main()
