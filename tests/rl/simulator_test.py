"""Simulated runs against times that can be computed by hand, and bounds."""

import dataclasses
import random

from absl.testing import absltest, parameterized

from glm5_jax.rl.actors import simulator

SPEEDS = simulator.Speeds(
    num_engines=1,
    slots=8,
    step_seconds=lambda n: 0.01,
    train_seconds=lambda tokens: 2.0,
    publish_seconds=0.0,
)
SETTINGS = simulator.Settings(
    batch_size=2, group_size=4, max_staleness=0, num_concurrent=8, num_steps=5
)


def equal(group, number):
    """An episode of two turns, 2 + 3 seconds."""
    return [simulator.Turn(100, 1.0), simulator.Turn(200, 1.0)]


def unequal(group, number):
    rng = random.Random(1000 * group + number)
    return [
        simulator.Turn(rng.randint(10, 300), rng.lognormvariate(0, 1)) for _ in range(3)
    ]


UNEQUAL = simulator.Prediction(
    seconds=147.18031121452063,
    num_tokens=61361,
    train_idle=0.3554617968223577,
    engine_idle=0.3053605117788874,
    occupancy=0.2703830201781488,
    staleness={0: 2, 1: 2, 2: 36},
)


class SimulatorTest(parameterized.TestCase):
    def test_synchronous_steps_add_up(self):
        found = simulator.predict(equal, SPEEDS, SETTINGS)
        self.assertAlmostEqual(found.seconds, 5 * (5.0 + 2.0), places=6)
        self.assertEqual(found.num_tokens, 5 * 8 * 300)
        self.assertAlmostEqual(found.train_idle, 5 / 7, places=6)
        self.assertAlmostEqual(found.occupancy, 3 / 7, places=6)
        self.assertAlmostEqual(found.engine_idle, 4 / 7, places=6)
        self.assertEqual(found.staleness, {0: 10})

    def test_asynchronous_steps_hide_the_trainer(self):
        settings = dataclasses.replace(SETTINGS, max_staleness=1, num_steps=50)
        found = simulator.predict(equal, SPEEDS, settings)
        self.assertAlmostEqual(found.seconds, 50 * 5.0 + 2.0, places=6)
        self.assertLessEqual(max(found.staleness), 1)

    def test_a_slow_trainer_is_the_bound(self):
        speeds = dataclasses.replace(SPEEDS, train_seconds=lambda tokens: 20.0)
        settings = dataclasses.replace(SETTINGS, max_staleness=2, num_steps=50)
        found = simulator.predict(equal, speeds, settings)
        self.assertAlmostEqual(found.seconds, 5.0 + 50 * 20.0, places=6)
        self.assertEqual(max(found.staleness), 2)

    def test_slots_that_lack_make_episodes_wait(self):
        speeds = dataclasses.replace(SPEEDS, slots=4)
        settings = dataclasses.replace(SETTINGS, num_steps=1)
        found = simulator.predict(equal, speeds, settings)
        # Turns take 1, 1 and 2, 2 seconds of a slot, and the environment's overlap.
        self.assertAlmostEqual(found.seconds, 1 + 1 + 2 + 2 + 1 + 2, places=6)

    def test_two_engines_share_episodes(self):
        speeds = dataclasses.replace(SPEEDS, slots=4, num_engines=2)
        settings = dataclasses.replace(SETTINGS, num_steps=1)
        found = simulator.predict(equal, speeds, settings)
        self.assertAlmostEqual(found.seconds, 7.0, places=6)

    def test_publishing_stops_the_engines(self):
        speeds = dataclasses.replace(SPEEDS, publish_seconds=0.5)
        found = simulator.predict(equal, speeds, SETTINGS)
        self.assertAlmostEqual(found.seconds, 5 * 7.0 + 4 * 0.5, places=6)

    @parameterized.parameters(0, 1, 4)
    def test_staleness_stays_in_its_bound(self, most):
        settings = dataclasses.replace(SETTINGS, max_staleness=most, num_steps=30)
        found = simulator.predict(unequal, SPEEDS, settings)
        self.assertLessEqual(max(found.staleness), most)
        self.assertEqual(sum(found.staleness.values()), 60)

    def test_a_part_with_a_bound_sets_the_pace_once_others_may_not_lead(self):
        """Odd groups are of a part that plays one group at a time, 5 s each.

        A step takes the groups that have finished, whichever they are. Before step s,
        of version v = s - 1, 10 + 2 v groups may have begun, half of them even, and the
        even ones of version v - 1 have ended: 5 + (v - 1). So step 20 takes 23 even and
        17 odd groups, the last odd one after 85 s. From then on a step takes one of
        each.
        """
        settings = dataclasses.replace(
            SETTINGS,
            max_staleness=4,
            num_steps=20,
            num_concurrent=64,
            part=lambda group: group % 2,
        )
        speeds = dataclasses.replace(SPEEDS, slots=64)
        free = simulator.predict(equal, speeds, settings)
        self.assertAlmostEqual(free.seconds, 5.0 + 20 * 2.0, places=6)
        bound = dataclasses.replace(settings, concurrency=(0, 4))
        found = simulator.predict(equal, speeds, bound)
        self.assertAlmostEqual(found.seconds, 17 * 5.0 + 2.0, places=6)
        self.assertLessEqual(max(found.staleness), 4)
        longer = dataclasses.replace(bound, num_steps=60)
        more = simulator.predict(equal, speeds, longer).seconds - found.seconds
        self.assertAlmostEqual(more, 40 * 5.0, places=6)
        wide = dataclasses.replace(settings, concurrency=(0, 64))
        self.assertEqual(simulator.predict(equal, speeds, wide), free)

    def test_synchronous_steps_wait_for_the_part_with_a_bound(self):
        """Two groups of the part in a step, one after the other."""
        settings = dataclasses.replace(SETTINGS, concurrency=(4,))
        found = simulator.predict(equal, SPEEDS, settings)
        self.assertAlmostEqual(found.seconds, 5 * (2 * 5.0 + 2.0), places=6)

    def test_a_bound_has_room_for_a_group(self):
        with self.assertRaisesRegex(ValueError, "at least group_size=4"):
            dataclasses.replace(SETTINGS, concurrency=(0, 3))

    def test_a_run_of_unequal_episodes_is_predicted_as_ever(self):
        """Three engines share their time among sequences. Figures of version 0.1."""
        speeds = dataclasses.replace(
            SPEEDS,
            num_engines=3,
            slots=4,
            step_seconds=lambda n: 0.004 + 0.002 * n,
            train_seconds=lambda tokens: tokens / 600,
            publish_seconds=0.25,
        )
        settings = dataclasses.replace(
            SETTINGS, group_size=3, max_staleness=2, num_steps=20, num_concurrent=9
        )
        found = simulator.predict(unequal, speeds, settings)
        speeds = dataclasses.replace(speeds, slots=2)  # episodes wait for one
        settings = dataclasses.replace(settings, num_concurrent=14)
        crowded = simulator.predict(unequal, speeds, settings)
        self.assertAlmostEqual(crowded.seconds, 146.97723931451827, places=6)
        self.assertAlmostEqual(crowded.occupancy, 0.5209644302487092, places=6)
        for name, value in dataclasses.asdict(UNEQUAL).items():
            if isinstance(value, float):
                self.assertAlmostEqual(getattr(found, name), value, places=6)
            else:
                self.assertEqual(getattr(found, name), value)
        self.assertAlmostEqual(
            found.tokens_per_second, found.num_tokens / found.seconds, places=9
        )

    def test_steps_and_draws_of_one_machine_slow_each_other(self):
        """Draws of 1 s after 5 s of episode; a step and the next draw begin together.

        A step of 2 s: both run until the draw ends at 7, and 2 - 2 / 1.5 s of the step
        are left. The episode takes 6 s instead of 5.
        """
        contention = simulator.Contention(step=1.5, draw=2.0)
        speeds = dataclasses.replace(SPEEDS, contention=contention)
        settings = dataclasses.replace(SETTINGS, max_staleness=1, num_steps=50)
        found = simulator.predict(equal, speeds, settings)
        step = 2.0 + (2.0 - 2.0 / 1.5)
        self.assertAlmostEqual(found.seconds, 5.0 + 49 * 6.0 + step, places=6)
        self.assertAlmostEqual(found.train_idle, 1 - 50 * step / found.seconds)

    def test_a_short_step_slows_a_draw_while_it_runs(self):
        """The step ends first: 0.75 s, in which 0.375 s of the draw are done."""
        speeds = dataclasses.replace(
            SPEEDS,
            train_seconds=lambda tokens: 0.5,
            contention=simulator.Contention(step=1.5, draw=2.0),
        )
        settings = dataclasses.replace(SETTINGS, max_staleness=1, num_steps=50)
        found = simulator.predict(equal, speeds, settings)
        self.assertAlmostEqual(found.seconds, 5.0 + 49 * 5.375 + 0.75, places=6)
        self.assertAlmostEqual(found.train_idle, 1 - 50 * 0.75 / found.seconds)

    @parameterized.parameters(
        # Engines, factors of a step and a draw, seconds of a step of 4 s.
        (1, 1.0, 1.0, 4.0),
        # At half while the first draw runs (1 s), alone in its answers (1 s), at half
        # in the second draw (2 s), alone in its answers.
        (1, 2.0, 1.0, 1.0 + 1.0 + 2.0 + 1.5),
        # The first draw takes 4 s, in which half of the step is done; the answers 1 s;
        # the step then needs 1 s of work beside the second draw.
        (1, 2.0, 4.0, 4.0 + 1.0 + 2.0),
        (2, 2.0, 4.0, 4.0 + 1.0 + 2.0),
    )
    def test_a_long_step_meets_two_draws(self, engines, step, draw, seconds):
        """The draws of `equal` take 1 and 2 s, alone and on engines of one machine."""
        speeds = dataclasses.replace(
            SPEEDS,
            num_engines=engines,
            train_seconds=lambda tokens: 4.0,
            contention=simulator.Contention(step=step, draw=draw),
        )
        settings = dataclasses.replace(SETTINGS, max_staleness=1, num_steps=1)
        found = simulator.predict(equal, speeds, settings)
        self.assertAlmostEqual(found.seconds, 5.0 + seconds, places=6)

    def test_alternating_work_does_not_meet(self):
        """Without staleness no sequence is drawn while a step runs."""
        speeds = dataclasses.replace(
            SPEEDS, contention=simulator.Contention(step=3.0, draw=3.0)
        )
        alone = simulator.predict(unequal, SPEEDS, SETTINGS)
        found = simulator.predict(unequal, speeds, SETTINGS)
        self.assertAlmostEqual(found.seconds, alone.seconds)
        self.assertAlmostEqual(found.train_idle, alone.train_idle)

    def test_more_contention_is_slower_here(self):
        settings = dataclasses.replace(SETTINGS, max_staleness=2, num_steps=30)
        seconds = [
            simulator.predict(
                unequal,
                dataclasses.replace(
                    SPEEDS, contention=simulator.Contention(step=factor, draw=factor)
                ),
                settings,
            ).seconds
            for factor in (1.0, 1.5, 2.0, 4.0)
        ]
        self.assertEqual(seconds, sorted(seconds))
        self.assertGreater(seconds[-1], 1.1 * seconds[0])

    def test_contention_speeds_nobody_up(self):
        with self.assertRaisesRegex(ValueError, "at least 1"):
            simulator.Contention(step=0.9)

    def test_skipped_steps_are_not_counted(self):
        """A long run less its beginning, which is a shorter run."""
        settings = dataclasses.replace(SETTINGS, max_staleness=2, num_steps=12)
        speeds = dataclasses.replace(SPEEDS, num_engines=2, publish_seconds=0.5)
        whole, first = (
            simulator.predict(
                unequal, speeds, dataclasses.replace(settings, num_steps=number)
            )
            for number in (12, 5)
        )
        found = simulator.predict(
            unequal, speeds, dataclasses.replace(settings, num_steps=7, num_skipped=5)
        )
        self.assertAlmostEqual(found.seconds, whole.seconds - first.seconds)
        self.assertEqual(found.num_tokens, whole.num_tokens - first.num_tokens)
        for name in ("train_idle", "engine_idle", "occupancy"):
            of = [getattr(run, name) * run.seconds for run in (whole, first, found)]
            self.assertAlmostEqual(of[2], of[0] - of[1])
        # A step takes its groups at the end of the one before, if they are ready.
        self.assertBetween(sum(found.staleness.values()), 12, 16)

    @parameterized.parameters(0, 1, 3)
    def test_a_bound_multiplies_the_steps_under_way(self, most):
        """Where episodes are long and steps short, most + 1 steps end in 5 s, not 1.

        The first most + 1 begin at once, and each update lets another one begin.
        """
        speeds = dataclasses.replace(
            SPEEDS, slots=100, train_seconds=lambda tokens: 0.01
        )
        settings = dataclasses.replace(
            SETTINGS, max_staleness=most, num_steps=12, num_concurrent=100
        )
        waves = 12 // (most + 1)
        found = simulator.predict(equal, speeds, settings)
        seconds = 5.0 + 0.01 * (most + 1) + (waves - 1) * 5.01
        self.assertAlmostEqual(found.seconds, seconds, places=6)

    def test_more_staleness_is_never_slower_here(self):
        seconds = [
            simulator.predict(
                unequal,
                SPEEDS,
                dataclasses.replace(
                    SETTINGS, max_staleness=most, num_steps=30, num_concurrent=32
                ),
            ).seconds
            for most in (0, 1, 2, 4)
        ]
        self.assertEqual(seconds, sorted(seconds, reverse=True))
        self.assertGreater(seconds[0], 1.5 * seconds[-1])


if __name__ == "__main__":
    absltest.main()
