"""Episodes of a run by seed and index, and the figures of an evaluation."""

import dataclasses
import math

from absl.testing import absltest, parameterized

from glm5_jax import environments, intervals
from glm5_jax.config import RLConfig, TrainConfig
from glm5_jax.environments import mixture, protocol
from glm5_jax.rl import episodes, held_out, jobs
from tests.rl import faults

RL = RLConfig(
    environment="reverse:5",
    prompts_per_step=6,
    group_size=3,
    max_turns=5,
    max_new_tokens=9,
    slots=7,
    temperature=0.75,
    step_timeout_seconds=11.0,
    answer_timeout_seconds=50.0,
    episode_timeout_seconds=70.0,
    max_rounds=4,
    num_eval_tasks=8,
)
CONFIG = TrainConfig(stage="rl", seed=13, rl=RL)
LIMIT = 2**30  # request ids of training are below it, those of evaluations not


def episode(total, tag="", label=protocol.Label.OK):
    reward = None if total is None else protocol.Reward(total)
    task = protocol.Task("t", (), tag=tag)
    counts = {"num_turns": 1, "num_forks": 0, "num_drift_tokens": 0, "num_truncated": 0}
    return episodes.Episode(
        task, 0, [], reward, label, transcript=[], reason="", close_error="", **counts
    )


class JobsTest(parameterized.TestCase):
    def test_a_group(self):
        taskset = environments.make("reverse:5")
        found = jobs.of_group(CONFIG, taskset, index=4, group=2)
        self.assertEqual([job.group for job in found], [2, 2, 2])
        self.assertEqual([job.request_id for job in found], [60, 65, 70])
        self.assertEqual({job.task.id for job in found}, {"reverse:5/train/13/4"})

    def test_request_ids_begin_again_where_those_of_evaluations_begin(self):
        rl = dataclasses.replace(RL, group_size=2, max_turns=4)
        config = dataclasses.replace(CONFIG, rl=rl)
        taskset = environments.make("reverse:5")
        (_, last) = jobs.of_group(config, taskset, LIMIT // 8 - 1, 0)
        (first, _) = jobs.of_group(config, taskset, LIMIT // 8, 0)
        self.assertEqual((last.request_id, first.request_id), (LIMIT - 4, 0))
        self.assertEqual(held_out.FIRST_ID, LIMIT)

    def test_limits_come_from_the_config(self):
        wanted = episodes.Settings(
            max_new_tokens=9,
            max_turns=5,
            num_concurrent=14,
            temperature=0.75,
            call_timeout=11.0,
            episode_timeout=70.0,
        )
        self.assertEqual(jobs.settings(RL), wanted)
        self.assertEqual(jobs.most_dropped(RL), 24)

    def test_each_engine_has_slots_of_its_own(self):
        """Those that somebody else keeps have rl.slots together."""
        engines = dataclasses.replace(RL, num_engines=3)
        self.assertEqual(jobs.settings(engines).num_concurrent, 42)
        others = {"servers": "http://a:1", "weights_store": "/tmp"}
        others = dataclasses.replace(RL, **others)
        self.assertEqual(jobs.settings(others).num_concurrent, 14)

    def test_nothing_that_may_take_so_long_is_a_stall(self):
        """A call and an answer; of an agent, a whole episode, and its end."""
        taskset = faults.FaultyTaskset(faults.Fault.NONE)
        self.assertEqual(jobs.stall_seconds(RL, taskset), 61.0)
        taskset.has_agents = True
        self.assertEqual(jobs.stall_seconds(RL, taskset), 81.0)
        quick = dataclasses.replace(RL, episode_timeout_seconds=1.0)
        self.assertEqual(jobs.stall_seconds(quick, taskset), 22.0)  # step and close
        self.assertGreater(jobs.stall_seconds(RLConfig(), taskset), 600.0)

    def test_a_mixture_stalls_as_its_slowest_part_does(self):
        def make(name):
            taskset = faults.FaultyTaskset(faults.Fault.NONE)
            taskset.has_agents = name == "agents"
            return taskset

        both = mixture.Mixture("turns+agents", make)
        self.assertEqual(jobs.stall_seconds(RL, both), 81.0)
        quick = dataclasses.replace(RL, episode_timeout_seconds=1.0)
        self.assertEqual(jobs.stall_seconds(quick, both), 61.0)

    def test_an_evaluation(self):
        found = held_out.jobs(environments.make("reverse:5"), RL)
        self.assertEqual([job.group for job in found], [*range(8)])
        ids = [LIMIT + 5 * i for i in range(8)]
        self.assertEqual([job.request_id for job in found], ids)
        seeds = {job.task.id.rpartition("/")[0] for job in found}
        self.assertEqual(seeds, {"reverse:5/held_out/0"})

    def test_tasks_of_one_problem_or_with_the_same_words_are_one(self):
        class Tasks(faults.FaultyTaskset):
            def task(self, split, seed, index):
                answer = {"a": 1, "b": 2} if index % 2 else {"b": 2, "a": 1}
                words = "same" if index < 2 else f"words {index}"
                messages = ({"role": "user", "content": words},)
                problem = "" if index < 4 else f"problem {index // 2}"
                return protocol.Task(str(index), messages, answer, problem=problem)

        found = held_out.tasks(Tasks(faults.Fault.NONE), 5)
        self.assertEqual([task.id for task in found], ["0", "2", "3", "4", "6"])


class FiguresTest(parameterized.TestCase):
    def test_a_reward_of_1_is_a_success(self):
        truncated = protocol.Label.TRUNCATED
        played = [
            episode(1.0),
            episode(1.5),
            episode(0.99),
            episode(0.0, label=truncated),
            episode(None, label=protocol.Label.TIMEOUT),
            episode(math.nan),
        ]
        found = held_out.figures(played)
        solved = intervals.proportion_interval(2, 4)
        self.assertEqual(
            found,
            {
                "eval/success": 0.5,
                "eval/success_low": solved.low,
                "eval/success_high": solved.high,
                "eval/reward": 3.49 / 4,
                "eval/tasks": 4,
                "eval/invalid": 2,
            },
        )

    def test_tags(self):
        played = [episode(1.0, "a"), episode(0.0, "a"), episode(1.0), episode(0.0, "b")]
        found = held_out.figures(played)
        shown = {k: v for k, v in found.items() if k.startswith("eval/success/")}
        wanted = {"a": 0.5, "untagged": 1.0, "b": 0.0}
        self.assertEqual(shown, {f"eval/success/{k}": v for k, v in wanted.items()})

        self.assertEqual(
            held_out.figures(played[1:3]).keys() - held_out.figures(played[:2]).keys(),
            {"eval/success/a", "eval/success/untagged"},
        )

    def test_one_episode(self):
        found = held_out.figures([episode(1.0)])
        self.assertEqual((found["eval/success"], found["eval/reward"]), (1.0, 1.0))

    def test_nothing_was_scored(self):
        found = held_out.figures([episode(None, label=protocol.Label.TIMEOUT)])
        self.assertEqual((found["eval/success"], found["eval/reward"]), (0.0, 0.0))
        self.assertEqual((found["eval/tasks"], found["eval/invalid"]), (0, 1))


class SettingsTest(parameterized.TestCase):
    def test_defaults(self):
        found = episodes.Settings(max_new_tokens=1, max_turns=1, num_concurrent=1)
        self.assertEqual(
            (found.temperature, found.call_timeout, found.episode_timeout),
            (1.0, 60.0, 600.0),
        )
        self.assertEqual((found.max_reward, found.continue_truncated), (100.0, False))

    @parameterized.parameters("call_timeout", "episode_timeout", "max_reward")
    def test_small_limits_are_limits(self, name):
        least = {"max_new_tokens": 1, "max_turns": 1, "num_concurrent": 1}
        found = episodes.Settings(**least, **{name: 1e-9})
        self.assertEqual(getattr(found, name), 1e-9)


if __name__ == "__main__":
    absltest.main()
