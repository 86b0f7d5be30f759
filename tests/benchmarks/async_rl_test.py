"""The benchmark of asynchronous RL: speeds found again, and waits known before."""

import asyncio
import dataclasses
import pathlib
import sys
from unittest import mock

from absl.testing import absltest

from glm5_jax.rl.actors import simulator
from tests import environment

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import async_rl
import async_speeds
import slow_tools

PACE = 4e-5
MEASURED = async_rl.Measured(
    seed=3,
    turns=[[26, 5], [28, 7], [12]],
    rollout_seconds=1.0,
    rested_seconds=0.2,
    step_seconds=0.1,
    handed_seconds=0.0,
    max_staleness=4,
    engine_idle=0.5,
    contention=simulator.Contention(step=2.0, draw=1.5),
)


def simulated(pace, staleness, train_seconds):
    counted = async_rl.CALIBRATION - async_rl.SKIPPED
    found = async_rl._run(MEASURED, pace, train_seconds, staleness, counted, True)
    return found, found.seconds / counted


class PredictTest(absltest.TestCase):
    def test_the_pace_of_a_simulated_run_is_found(self):
        _, step = simulated(PACE, 0, MEASURED.rested_seconds)
        rollout = step - MEASURED.rested_seconds
        of = dataclasses.replace(MEASURED, rollout_seconds=rollout)
        self.assertAlmostEqual(async_rl._pace(of) / PACE, 1.0, places=3)

    def test_the_pace_beside_a_trainer_is_found(self):
        found, _ = simulated(2 * PACE, 4, MEASURED.step_seconds)
        of = dataclasses.replace(MEASURED, engine_idle=found.engine_idle)
        self.assertAlmostEqual(async_rl._pace_beside(of, PACE) / PACE, 2.0, delta=0.1)

    def test_an_engine_is_never_faster_beside_a_trainer(self):
        of = dataclasses.replace(MEASURED, engine_idle=1.0)
        self.assertEqual(async_rl._pace_beside(of, PACE), PACE)

    def test_what_is_handed_over_counts_as_the_trainers(self):
        _, step = simulated(PACE, 0, MEASURED.rested_seconds)
        rollout = step - MEASURED.rested_seconds
        plain = dataclasses.replace(MEASURED, rollout_seconds=rollout)
        handed = dataclasses.replace(plain, handed_seconds=0.3)
        self.assertAlmostEqual(handed.trainer_seconds, 0.1 + 0.3 / 2.0)
        plain, slower = (async_rl.predict(x, 4, 30) for x in (plain, handed))
        self.assertLess(slower.train_idle, plain.train_idle)

    def test_other_waits_are_predicted_for_another_seed(self):
        _, step = simulated(PACE, 0, MEASURED.rested_seconds)
        rollout = step - MEASURED.rested_seconds
        of = dataclasses.replace(MEASURED, rollout_seconds=rollout)
        found = async_rl.predict(of, 0, 30).seconds
        with mock.patch.dict("os.environ", {slow_tools.SEED: "7"}):
            self.assertNotAlmostEqual(async_rl.predict(of, 0, 30).seconds, found)
        self.assertGreater(found, 10 * MEASURED.rested_seconds)


class WaitsTest(absltest.TestCase):
    def test_a_run_waits_as_long_as_was_known(self):
        """Episodes of a task are told apart by their order, not those of others."""
        tasks, waited = slow_tools.Slow(), []

        async def sleep(seconds):
            waited.append(seconds)

        async def play():
            for index in (0, 0, 1):
                playing = tasks.environment()
                await playing.reset(tasks.task("train", 3, index))
                await playing.step({"role": "assistant", "content": "1"})

        with mock.patch("slow_tools.asyncio.sleep", sleep):
            asyncio.run(play())
        ids = [tasks.task("train", 3, index).id for index in range(2)]
        known = (ids[0], 0), (ids[0], 1), (ids[1], 0)
        expected = [slow_tools.seconds_of(*of, 0) for of in known]
        self.assertEqual(waited, expected)
        self.assertLen(set(expected), 3)

    def test_turns_of_a_sample(self):
        sample = mock.Mock(tokens=[9, 8, 7, 6, 5, 4], mask=[0, 1, 1, 0, 0, 1])
        expected = [([9], 2), ([9, 8, 7, 6, 5], 1)]
        self.assertEqual(async_speeds.turns(sample), expected)


if __name__ == "__main__":
    environment.main()
