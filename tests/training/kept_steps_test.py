"""Which of a killed run's steps are learnt again from their episodes."""

import dataclasses
from unittest import mock

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.rl import episode_files
from glm5_jax.training.feeds import kept_steps
from glm5_jax.training.feeds import stream as stream_lib
from tests import environment, runs
from tests.rl import episode_files_test

NUM_STEPS = 9


class KeptStepsTest(runs.FolderTest, parameterized.TestCase):
    def write(self, **changes):
        """Steps 3 and 4 of the batches 2 and 3; `changes` are of step 4."""
        folder = self.root / self.id()
        writer = episode_files.Writer(folder, 1e9)
        known = {"num_steps": NUM_STEPS, "memory": {"next": 8}}
        step = dataclasses.replace(episode_files_test.make_step(3), **known)
        writer.write(step)
        writer.write(
            dataclasses.replace(step, **({"step": 4, "position": 3} | changes))
        )
        writer.close()
        return folder

    def take(self, folder, step=2, position=2):
        """Numbers of the steps that are learnt again."""
        kept, found = kept_steps.KeptSteps(folder, step, NUM_STEPS), []
        for place in range(position, position + 4):
            if (taken := kept.take(place)) is not None:
                found.append(taken.step)
        return found

    def test_the_steps_after_the_checkpoint_are_taken_in_order(self):
        folder = self.write()
        self.assertEqual(self.take(folder), [3, 4])
        self.assertEqual(self.take(folder, step=3, position=3), [4])
        self.assertEqual(self.take(folder, step=4, position=4), [])

    def test_without_a_checkpoint_nothing_is(self):
        folder = self.write()
        (folder / "episodes" / "3.json.gz").rename(folder / "episodes" / "1.json.gz")
        self.assertEqual(self.take(folder, step=0, position=2), [])

    @parameterized.parameters(
        {"position": 5},  # a rollback has left out others
        {"num_steps": NUM_STEPS + 1},  # its schedule had another learning rate
        {"memory": None},  # of an earlier version
    )
    def test_a_step_that_would_give_other_weights_ends_them(self, **changes):
        self.assertEqual(self.take(self.write(**changes)), [3])

    def test_so_does_one_that_is_damaged_or_gone(self):
        folder = self.write()
        path = episode_files.path_of(folder, 3)
        path.write_bytes(path.read_bytes()[:-9])
        with self.assertLogs(level="ERROR"):
            self.assertEqual(self.take(folder), [])
        path.unlink()
        self.assertEqual(self.take(folder), [])  # also what comes after it

    def test_who_plays_after_skipped_batches_is_told_by_the_last_of_them(self):
        folder = self.write(memory={"next": 9})

        def after(position, step=2):
            kept = kept_steps.KeptSteps(folder, step, NUM_STEPS)
            return kept.after_skipped(position)

        self.assertEqual(after(4), {"next": 9})
        self.assertEqual(after(3), {"next": 8})  # batch 3 is none of the skipped ones
        self.assertIsNone(after(2))
        self.assertIsNone(after(6))  # batch 5 has no file
        self.assertIsNone(after(4, step=4))  # the checkpoint tells

    def test_nothing_more_is_learnt_again_after_a_rollback(self):
        kept = kept_steps.KeptSteps(self.write(), 2, NUM_STEPS)
        self.assertEqual(kept.take(2).step, 3)
        kept.end()
        self.assertIsNone(kept.take(3))

    def test_an_episode_that_stands_twice_in_a_group_is_measured_once(self):
        stream = object.__new__(stream_lib.Stream)
        step = episode_files_test.make_step(3)
        played = stream._played_before(step)
        self.assertLen(played.groups[0], 3)
        self.assertLen(played.episodes, 4)  # with the unused one

    @parameterized.parameters((0, 1.0), (3, 0.0))
    def test_files_that_this_start_will_not_keep_up_to_date_are_deleted(
        self, step, gib
    ):
        """They would be taken for those of the groups at a later start."""
        folder = self.root / self.id() / "episodes" / "under_way"
        for done, limit, is_left in ((3, 1.0, True), (step, gib, False)):
            folder.mkdir(parents=True, exist_ok=True)
            stream = object.__new__(stream_lib.Stream)
            stream._config = config_lib.TrainConfig(
                stage="async_rl",
                rl=config_lib.RLConfig(episodes_gib=limit, max_new_tokens=8),
            )
            stream.begin(folder.parent.parent, done)
            self.assertEqual(folder.exists(), is_left)

    def test_hosts_that_do_not_share_the_folder_are_told(self):
        kept = kept_steps.KeptSteps(self.root / "empty", 2, NUM_STEPS)
        with (
            mock.patch.object(kept_steps.together, "from_first", return_value="kept"),
            self.assertRaisesRegex(OSError, "must be one folder that all hosts"),
        ):
            kept.take(2)

    def test_hosts_that_find_more_than_the_first_follow_it(self):
        kept = kept_steps.KeptSteps(self.write(), 2, NUM_STEPS)
        with mock.patch.object(kept_steps.together, "from_first", return_value=""):
            self.assertIsNone(kept.take(2))
        self.assertIsNone(kept.take(3))


if __name__ == "__main__":
    environment.main()
