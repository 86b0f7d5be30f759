"""Plans of RL: runs that can be computed by hand, bounds, and whole rankings."""

import dataclasses
import functools
import json
import pathlib
import tempfile

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.rl.actors import simulator
from glm5_jax.scale.plan import planner as step_planner
from glm5_jax.scale.rl import planner, request, table, tasks
from tests import environment

SPEEDS = simulator.Speeds(
    num_engines=2,
    slots=8,
    step_seconds=lambda number: 0.01,
    train_seconds=lambda tokens: 2.0,
    publish_seconds=0.0,
)
SETTINGS = simulator.Settings(
    batch_size=2, group_size=4, max_staleness=0, num_concurrent=16, num_steps=10
)
FASTER = planner.NOTHING  # seconds of a token


def equal(group, number):
    """A turn of 100 tokens, a second at SPEEDS, and a second of a tool."""
    return [simulator.Turn(100, 1.0)]


@functools.cache
def drawn(group, number, factor=1.0):
    limits = tasks.Limits(turns=8, turn_tokens=2_000, row_tokens=8_000)
    kinds = {"coding": tasks.KINDS["coding"]}
    found = tasks.Mixture(kinds=kinds, shares=[("coding", 1.0)], limits=limits)
    turns = found.turns(group, number)
    return tuple(simulator.Turn(t.tokens, factor * t.seconds) for t in turns)


def run(turns=equal, tokens=100, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return planner.Run(episode_tokens=tokens, turns=turns, settings=settings)


def speeds(**changes):
    return dataclasses.replace(SPEEDS, **changes)


class OutcomeTest(parameterized.TestCase):
    def test_a_synchronous_step_by_hand(self):
        """1 s to draw, 1 s of a tool, 2 s of training: 8 samples in 4 s."""
        found = planner.simulate(run(), SPEEDS)
        self.assertAlmostEqual(found.step_seconds, 4.0)
        self.assertAlmostEqual(found.samples_per_second, 2.0)
        self.assertAlmostEqual(found.tokens_per_second, 200.0)
        self.assertAlmostEqual(found.train_idle, 0.5)
        self.assertAlmostEqual(found.engine_idle, 0.75)
        self.assertAlmostEqual(found.occupancy, 8 / 16 / 4)
        self.assertEqual(found.staleness, {0: 20})
        self.assertEqual(found.mean_staleness, 0.0)

    def test_an_asynchronous_step_by_hand(self):
        """The trainer needs 2 s, as long as an episode: both are always busy."""
        found = planner.simulate(run(max_staleness=1), SPEEDS)
        self.assertAlmostEqual(found.step_seconds, 2.0)
        self.assertAlmostEqual(found.train_idle, 0.0)
        self.assertEqual(found.staleness, {1: 20})

    def test_with_infinite_speed_of_sampling_the_trainer_limits(self):
        quick = speeds(
            step_seconds=lambda number: FASTER, train_seconds=lambda tokens: 7.0
        )
        of = run(functools.partial(drawn, factor=0.0), 500, max_staleness=1)
        found = planner.simulate(of, quick)
        self.assertAlmostEqual(found.step_seconds, 7.0, places=3)
        self.assertAlmostEqual(found.tokens_per_second, 8 * 500 / 7.0, places=1)
        self.assertLess(found.train_idle, 1e-3)
        self.assertEqual(planner.limits(of, quick, found)[0][0], "training")

    def test_with_instant_training_the_engines_limit(self):
        """16 slots draw 1,600 tokens a second, and 100 are of an episode."""
        quick = speeds(train_seconds=lambda tokens: FASTER)
        busy = run(
            lambda group, number: [simulator.Turn(100, 0.0)],
            max_staleness=3,
            num_concurrent=32,
            num_steps=40,
        )
        found = planner.simulate(busy, quick)
        self.assertAlmostEqual(found.samples_per_second, 16.0, delta=0.5)
        self.assertLess(found.engine_idle, 0.02)
        self.assertEqual(planner.limits(busy, quick, found)[0][0], "sampling")

    @parameterized.parameters(0, 1, 4)
    def test_slower_tools_never_raise_the_rate(self, staleness):
        rates = [
            planner.simulate(
                run(functools.partial(drawn, factor=factor), max_staleness=staleness),
                speeds(step_seconds=lambda number: 0.002 + 0.0005 * number),
            ).samples_per_second
            for factor in (0.0, 0.5, 1.0, 3.0, 10.0, 100.0)
        ]
        self.assertEqual(rates, sorted(rates, reverse=True))
        self.assertGreater(rates[0], 5 * rates[-1])

    def test_every_trained_group_has_its_age(self):
        of = run(drawn, max_staleness=2, num_steps=25)
        found = planner.simulate(of, SPEEDS)
        self.assertEqual(sum(found.staleness.values()), 25 * SETTINGS.batch_size)
        self.assertLessEqual(max(found.staleness), 2)

    def test_what_limits(self):
        slow_tools = run(functools.partial(drawn, factor=30.0), max_staleness=4)
        found = planner.simulate(slow_tools, SPEEDS)
        gains = planner.limits(slow_tools, SPEEDS, found)
        self.assertEqual(gains[0][0], "tools")
        factors = [factor for _, factor in gains]
        self.assertEqual(factors, sorted(factors, reverse=True))
        pushed = speeds(publish_seconds=50.0)
        found = planner.simulate(run(max_staleness=1), pushed)
        gains = planner.limits(run(max_staleness=1), pushed, found)
        self.assertEqual(gains[0][0], "pushes")


class TrainSecondsTest(parameterized.TestCase):
    def test_rows_cost_the_same_full_or_not(self):
        seconds = planner.train_seconds(config(), 3.0, 0.25)
        self.assertEqual([seconds(1), seconds(10**9)], [3.0, 3.0])

    def test_packed_rows_make_as_many_batches_as_they_need(self):
        """4 rows of 64 tokens; a fourth of them is drawn: 64 tokens of a batch."""
        seconds = planner.train_seconds(config(rows_per_step=4), 3.0, 0.25)
        self.assertEqual([seconds(n) for n in (1, 64, 65, 129)], [3.0, 3.0, 6.0, 9.0])


def config(stage="async_rl", **rl):
    return config_lib.TrainConfig(
        stage=stage,
        model=dataclasses.replace(presets.GLM5_1M, remat_policy="full"),
        data=config_lib.DataConfig(sequence_length=64),
        optim=config_lib.OptimConfig(name="adamw"),
        rl=config_lib.RLConfig(
            prompts_per_step=4,
            group_size=4,
            max_new_tokens=16,
            max_turns=3,
            **rl,
        ),
        mesh=config_lib.MeshConfig(data=1),
    )


def asked(made, **more):
    kinds = {"coding": tasks.KINDS["coding"]}
    mixture = tasks.Mixture(
        kinds=kinds, shares=[("coding", 1.0)], limits=tasks.Limits.of(made)
    )
    return request.Request(mixture=mixture, num_steps=3, engine="v5p:2x2x1", **more)


class RankingTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.made = config(max_staleness=2)
        cls.ranking = planner.make(cls.made, "tiny", "v5p:2x2x4", asked(cls.made))

    def test_all_chips_are_accounted_for_and_the_fastest_is_first(self):
        rates = [plan.outcome.tokens_per_second for plan in self.ranking.plans]
        self.assertEqual(rates, sorted(rates, reverse=True))
        for plan in self.ranking.plans:
            split = plan.split
            self.assertEqual(split.sampling + split.training + split.unused, 16)
            self.assertEqual(plan.trainer.setting.over("data", "fsdp", "expert") > 0, 1)
        self.assertEqual({p.split.training for p in self.ranking.plans}, {4, 8})

    def test_the_trainer_never_learns_faster_than_its_roofline(self):
        for plan in self.ranking.plans:
            self.assertGreaterEqual(
                plan.outcome.step_seconds * (1 + 1e-9), plan.trainer.seconds
            )

    def test_pages_and_files_have_every_plan(self):
        text, page = table.text(self.ranking), table.page(self.ranking, "typed")
        for written in (text, page):
            self.assertIn("v5p:2x2x4: engines of v5p:2x2x1, 4 groups of 4", written)
            self.assertIn("limited by", written)
        self.assertIn("```\ntyped\n```", page)
        self.assertIn("All medians are assumed", page)
        with tempfile.TemporaryDirectory() as folder:
            stem = pathlib.Path(folder) / "plan"
            self.ranking.write(str(stem), page, "typed")
            found = json.loads(stem.with_suffix(".json").read_text())
            self.assertEqual(stem.with_suffix(".md").read_text(), page)
        self.assertLen(found["plans"], len(self.ranking.plans))
        self.assertEqual(found["plans"][0], planner.row(self.ranking.plans[0]))

    def test_parts_with_bounds_are_simulated_with_them(self):
        """Of one of two parts a group plays at a time; the trainer waits for them."""
        bound = config(max_staleness=2, environment="a+b", concurrency=(0, 4))
        kinds = {"coding": tasks.KINDS["coding"], "search": tasks.KINDS["search"]}
        both = tasks.Mixture(
            kinds=kinds,
            shares=[("coding", 1.0), ("search", 1.0)],
            limits=tasks.Limits.of(bound),
        )
        rates = []
        for made in (bound, config(max_staleness=2, environment="a+b")):
            of = dataclasses.replace(asked(made), mixture=both)
            found = planner.make(made, "tiny", "v5p:2x2x2", of)
            rates.append(found.plans[0].outcome.samples_per_second)
        self.assertLess(rates[0], 0.8 * rates[1])

    def test_the_stage_whose_engine_is_the_trainers_takes_turns(self):
        made = config("rl")
        ranking = planner.make(made, "tiny", "v5p:2x2x2", asked(made))
        turns = [plan for plan in ranking.plans if plan.split.takes_turns]
        self.assertLen(turns, 1)
        self.assertEqual((turns[0].split.num_engines, turns[0].split.training), (2, 8))
        self.assertEqual(turns[0].push_seconds, 0.0)
        apart = next(p for p in ranking.plans if not p.split.takes_turns)
        self.assertLess(turns[0].engine.slots, apart.engine.slots)  # beside its state
        for plan in ranking.plans:
            self.assertEqual(set(plan.outcome.staleness), {0})
            together = plan.outcome.train_idle + plan.outcome.engine_idle
            self.assertGreaterEqual(together, 1 - 1e-6)  # one waits for the other

    def test_chips_of_one_engine_take_turns(self):
        made = config("rl")
        ranking = planner.make(made, "tiny", "v5p:2x2x1", asked(made))
        [plan] = ranking.plans
        self.assertTrue(plan.split.takes_turns)
        self.assertEqual((plan.split.num_engines, plan.split.training), (1, 4))

    def test_nodes_of_gpus(self):
        """A push goes over an adapter of 50 GB/s for each GPU."""
        wanted = dataclasses.replace(asked(self.made), engine="h200:8")
        ranking = planner.make(self.made, "tiny", "h200:2x8", wanted)
        found = {plan.split.training: plan for plan in ranking.plans}
        self.assertEqual({*found}, {8})
        for plan in ranking.plans:
            split = plan.split
            self.assertEqual(split.sampling + split.training + split.unused, 16)
            size = plan.push.num_bytes / 50e9
            want = max(split.num_engines * size / split.training, size / 8)
            self.assertAlmostEqual(plan.push_seconds / want, 1, delta=1e-9)
        rl = dataclasses.replace(self.made.rl, critic=True)
        critic = dataclasses.replace(self.made, rl=rl)
        slower, _ = step_planner.best(critic, "tiny", "h200:8")
        self.assertGreater(slower.seconds, found[8].trainer.seconds)

    def test_a_trainer_that_fits_nowhere_is_refused(self):
        large = dataclasses.replace(
            config(), model=dataclasses.replace(presets.GLM5, remat_policy="full")
        )
        with self.assertRaisesRegex(
            config_lib.InputError, "no room for a sequence of 64 tokens.*more chips"
        ):
            planner.make(large, "large", "v5p:2x2x4", asked(large))
        roomy = dataclasses.replace(asked(large), engine="v5p:2x4x4")
        with self.assertRaisesRegex(
            config_lib.InputError, "large has no split on 1 x v5p:4x4x4.*fits no mesh"
        ):
            planner.make(large, "large", "v5p:4x4x4", roomy)


if __name__ == "__main__":
    environment.main()
