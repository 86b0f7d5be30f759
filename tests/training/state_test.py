"""A run between two steps: what its checkpoints hold, and what it says of its work."""

import json
import math
import pathlib
from unittest import mock

import numpy as np
from absl.testing import absltest

from glm5_jax.checkpoint import host_copies, manager, rollback
from glm5_jax.training import program as program_lib
from glm5_jax.training.feeds import feed
from glm5_jax.training.run import health as health_lib
from glm5_jax.training.run import state
from tests import environment, small_configs


class RunTest(absltest.TestCase):
    """The parts of a run are mocks: nothing is compiled or written."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.run_state = state.Run(
            config=small_configs.text_run(self.folder, self.folder),
            workdir=self.folder,
            feed=mock.Mock(spec=feed.Feed, fingerprint={"source": "x"}),
            checkpoints=mock.Mock(spec=manager.CheckpointManager),
            program=mock.Mock(spec=program_lib.Program),
            health=mock.Mock(spec=health_lib.Health),
            rows={},
            copies=mock.Mock(spec=host_copies.HostCopies),
        )

    def test_metadata_of_a_checkpoint_is_json_whatever_the_numbers(self):
        """JSON has no NaN: other programs than Python's refuse a file with one."""
        run = self.run_state
        run.health.memory.return_value = {"losses": [1.5, math.nan], "spikes": 2}
        run.feed.memory.return_value = {"rate": np.float64("nan"), "deep": [[math.inf]]}
        run.save({"eval/loss": -math.inf, "eval/bits": 1.25, "train/loss": math.nan})
        run.copy()
        want = {
            "health": {"losses": [1.5, None], "spikes": 2},
            "feed": {"rate": None, "deep": [[None]]},
        }
        found = (
            (run.checkpoints, {"eval/loss": None, "eval/bits": 1.25}),
            (run.copies, {}),
        )
        for kept, metrics in found:
            (step, _, metadata), _ = kept.save.call_args
            again = json.loads(json.dumps(metadata, allow_nan=False))
            self.assertEqual(again, metadata)
            self.assertEqual(again, again | want | {"metrics": metrics, "step": step})

    def test_a_new_run_obeys_no_rollback_of_an_old_one(self):
        """Somebody has moved the old run's checkpoints/ away."""
        rollback.write(self.folder, rollback.Rollback(4, 7, None))
        self.run_state.checkpoints.latest_step.return_value = None
        self.run_state.feed.tokenizer = None
        with (
            mock.patch.object(state, "companions"),
            mock.patch.object(state.same_tokenizer, "keep", return_value=""),
            mock.patch.object(state.pinned_lib, "resolve", return_value={}),
            mock.patch.object(state, "initial", return_value=({}, None)),
        ):
            state._fill(self.run_state)
        self.assertIsNone(rollback.read(self.folder))

    def test_a_compilation_is_announced_before_it_starts(self):
        """It takes minutes for a large model, in which nothing else is said."""
        order = []

        def compile_step(size, beside):
            order.append(f"compiles {size} rows")
            beside()
            order.append("has compiled")
            return lambda *args: None

        self.run_state.program.compile.side_effect = compile_step
        said = mock.patch.object(
            state.logging, "info", lambda text, *args: order.append(text % args)
        )
        with said:
            self.run_state.compile(beside=lambda: order.append("other work"))
        *before, last = order
        want = ["compiles 8 rows", "other work", "has compiled"]
        self.assertEqual(before, ["Compiling the training step for 8 rows ...", *want])
        self.assertRegex(last, r"^\.\.\. compiled in \d+\.\d s\.$")


if __name__ == "__main__":
    environment.main()
