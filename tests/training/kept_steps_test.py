"""Which of a killed run's steps are learnt again from their episodes."""

import dataclasses
from unittest import mock

from absl.testing import parameterized

from glm5_jax.rl import episode_files
from glm5_jax.training.feeds import kept_steps
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
