"""The metrics that TensorBoard and wandb get of a run; both are extras."""

import importlib.util
import os
import pathlib
import struct
import time
from unittest import mock

import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.training.reporting import metrics, trackers
from tests import environment

WAIT = 20  # seconds for wandb's own process, which writes after `finish`
CONFIG = config_lib.TrainConfig(model=presets.GLM5_1M)


def needs(package):
    """Skips a test without an extra."""
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"{package} is not installed")


def events_of(folder):
    """The events of a folder's files, oldest first, by TensorBoard's own messages."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(event_pb2.Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


class ConfigTest(parameterized.TestCase):
    def test_an_unknown_one_is_refused(self):
        with self.assertRaisesRegex(config_lib.InputError, "trackers knows .*'tb'"):
            config_lib.TrainConfig(model=presets.GLM5_1M, trackers=("tb",))

    @parameterized.parameters(*config_lib.TRACKERS)
    def test_a_missing_extra_is_named(self, name):
        message = rf"trackers names '{name}', which .* 'glm5_jax\[{name}\]'"
        with (
            mock.patch.object(trackers.importlib.util, "find_spec", return_value=None),
            self.assertRaisesRegex(config_lib.InputError, message),
        ):
            trackers.require((name,))

    def test_none_by_default(self):
        self.assertEmpty(trackers.make(CONFIG, pathlib.Path("nowhere"), 0))


class TrackersTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.workdir = pathlib.Path(self.create_tempdir().full_path)

    def follow(self, name, start=0):
        """A writer of metrics, with one tracker."""
        config = config_lib.TrainConfig(model=presets.GLM5_1M, trackers=(name,))
        made = trackers.make(config, self.workdir, start)
        return metrics.MetricsWriter(self.workdir, 10, start, made)

    @needs("tensorboardX")
    def test_tensorboard(self):
        writer = self.follow("tensorboard")
        for step in (1, 2, 3):
            writer.write(step, {"train/loss": 1.0 / step, "a/b": float("nan")})
        writer.rewind(1)
        writer.write(2, {"train/loss": 7.0})
        writer.close()
        events = events_of(self.workdir / "tensorboard")
        scalars = [
            (event.step, value.tag, value.simple_value)
            for event in events
            for value in event.summary.value
            if value.HasField("simple_value")
        ]
        self.assertLen(scalars, 4)  # what is not finite is left out
        self.assertEqual(scalars[1], (2, "train/loss", 0.5))
        self.assertEqual(scalars[-1], (2, "train/loss", 7.0))
        starts = [e.step for e in events if e.HasField("session_log")]
        self.assertEqual(starts, [1, 2])  # steps from here on count anew

    @needs("wandb")
    def test_wandb_offline(self):
        quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        with mock.patch.dict(os.environ, quiet):
            writer = self.follow("wandb")
            writer.write(1, {"train/loss": 0.5, "a/b": float("inf")})
            writer.close()
        (file,) = self.workdir.rglob("*.wandb")
        deadline = time.monotonic() + WAIT
        while b"train/loss" not in file.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertIn(b"train/loss", file.read_bytes())


if __name__ == "__main__":
    environment.main()
