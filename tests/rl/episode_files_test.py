"""The files of a run's episodes: whole or none, bounded, and what they hold."""

import gzip
import json
import threading
from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import files
from glm5_jax.environments import protocol
from glm5_jax.rl import episode_files
from tests import environment, runs
from tests.rl import trajectories_test


def make_step(number, groups=((0, 1, 0), (2,)), num_unused=1, position=None):
    """A step whose episodes are told apart by their rewards."""
    made = [
        trajectories_test.episode(reward=protocol.Reward(number + i / 8))
        for i in range(3 + num_unused)
    ]
    return episode_files.Step(
        number,
        number - 1 if position is None else position,
        [[made[i] for i in group] for group in groups],
        made[3:],
    )


def rewards(step):
    return [[e.reward.total for e in group] for group in step.groups]


class EpisodeFilesTest(runs.FolderTest):
    def folder(self):
        return self.root / self.id()

    def write(self, *steps, most_bytes=2.0**30):
        writer = episode_files.Writer(self.folder(), most_bytes)
        for step in steps:
            writer.write(step)
        writer.close()

    def test_a_step_comes_back_with_its_repeated_episodes(self):
        self.write(make_step(7, position=9))
        read = episode_files.read(self.folder(), 7)
        self.assertEqual((read.step, read.position), (7, 9))
        self.assertEqual(rewards(read), [[7, 7.125, 7], [7.25]])
        self.assertIs(read.groups[0][0], read.groups[0][2])
        self.assertEqual([e.reward.total for e in read.unused], [7.375])

    def test_advantages_of_tokens_come_back_with_their_samples(self):
        first, second, unused = (trajectories_test.episode() for _ in range(3))
        told = {
            id(sample): np.arange(len(sample.tokens), dtype=np.float32) / (3 + number)
            for number, sample in enumerate(second.samples)
        }
        step = episode_files.Step(1, 0, [[first, second]], [unused], advantages=told)
        self.write(step)
        read = episode_files.read(self.folder(), 1)
        samples = read.groups[0][1].samples
        self.assertGreater(len(samples), 1)
        wanted = {
            id(sample): [round(i / (3 + number), 6) for i in range(len(sample.tokens))]
            for number, sample in enumerate(samples)
        }
        self.assertEqual(read.advantages, wanted)

    def test_a_step_that_is_done_again_ends_the_later_ones(self):
        self.write(*map(make_step, (1, 2, 3, 10)))
        self.assertEqual(episode_files.numbers(self.folder()), [1, 2, 3, 10])
        self.write(make_step(2, groups=((1,),)))
        self.assertEqual(episode_files.numbers(self.folder()), [1, 2])
        self.assertEqual(rewards(episode_files.read(self.folder(), 2)), [[2.125]])

    def apart(self):
        """The steps and positions in the folder of what was skipped, in order."""
        skipped = episode_files.SKIPPED
        found = episode_files.numbers(self.folder(), skipped)
        read = episode_files.read_whole(self.folder(), found, skipped)
        self.assertEqual([step.position for step in read], found)
        return [(step.step, step.position) for step in read]

    def test_what_a_rollback_undid_is_kept_apart(self):
        self.write(*map(make_step, (1, 2, 3, 4)))
        self.write(make_step(3))  # the same batch: a run that was killed
        self.assertEqual(self.apart(), [])
        self.write(make_step(4), make_step(3, position=4))
        self.assertEqual(episode_files.numbers(self.folder()), [1, 2, 3])
        self.assertEqual(self.apart(), [(3, 2), (4, 3)])
        self.write(make_step(4, position=5), make_step(2, position=6))
        self.assertEqual(self.apart(), [(2, 1), (3, 2), (4, 3), (3, 4), (4, 5)])
        self.assertEqual(episode_files.numbers(self.folder()), [1, 2])

    def test_a_batch_that_is_kept_apart_outlives_its_step(self):
        most_bytes = 1.0  # only the newest stays
        writer = episode_files.Writer(self.folder(), most_bytes)
        for number in (1, 2, 3):
            writer.write(make_step(number))
            if number < 3:
                path = writer.set_apart(number, number - 1)
        writer.close()
        self.assertEqual(episode_files.numbers(self.folder()), [3])
        self.assertEqual(self.apart(), [(2, 1)])
        self.assertEqual(path, self.folder() / "skipped" / "1.json.gz")

    def test_the_oldest_go_where_the_bound_is_reached(self):
        self.write(make_step(1))
        size = episode_files.path_of(self.folder(), 1).stat().st_size
        self.write(*map(make_step, range(2, 7)), most_bytes=3.5 * size)
        self.assertEqual(episode_files.numbers(self.folder()), [4, 5, 6])
        paths = [episode_files.path_of(self.folder(), n) for n in (4, 5, 6)]
        full = float(sum(path.stat().st_size for path in paths))
        self.write(make_step(6), most_bytes=full)  # the bound itself is allowed
        self.assertEqual(episode_files.numbers(self.folder()), [4, 5, 6])
        self.write(make_step(7), most_bytes=1.0)  # the newest stays
        self.assertEqual(episode_files.numbers(self.folder()), [7])

    def test_a_writer_that_is_killed_leaves_no_half_file(self):
        others = {*threading.enumerate()}
        self.write(make_step(1))
        with mock.patch.object(files.pathlib.Path, "replace", side_effect=OSError):
            writer = episode_files.Writer(self.folder(), 2.0**30)
            writer.write(make_step(1))  # again
            with self.assertRaises(OSError):
                writer.write(make_step(2))
            writer.write(make_step(2))
            with self.assertRaises(OSError):
                writer.close()
        names = [thread.name for thread in {*threading.enumerate()} - others]
        self.assertFalse([name for name in names if name.startswith("episodes")])
        (self.folder() / "episodes" / ".2.json-abc.gz").write_bytes(b"half")
        self.assertEqual(episode_files.numbers(self.folder()), [1])

    @parameterized.named_parameters(
        ("cut_off", lambda data: data[:-20]),
        ("a_flipped_bit", lambda data: data[:90] + bytes([data[90] ^ 1]) + data[91:]),
        ("no_gzip", lambda data: b"{}"),
        (
            "another_format",
            lambda data: gzip.compress(
                json.dumps(json.loads(gzip.decompress(data)) | {"format": 2}).encode()
            ),
        ),
    )
    def test_damage_is_refused_and_other_steps_are_read(self, damaged):
        self.write(make_step(1), make_step(2))
        path = episode_files.path_of(self.folder(), 1)
        path.write_bytes(damaged(path.read_bytes()))
        with self.assertRaisesRegex(config_lib.DamagedError, "1.json.gz cannot be"):
            episode_files.read(self.folder(), 1)
        (read,) = episode_files.read_whole(self.folder(), [1, 2])
        self.assertEqual(read.step, 2)


if __name__ == "__main__":
    environment.main()
