"""Histories are shortened by the rules, and environments see every turn."""

import dataclasses

from absl.testing import absltest, parameterized

from glm5_jax import config, environments
from glm5_jax.environments import context, protocol
from tests.rl import rollouts_test, scripted

TASK = {"role": "user", "content": "a task"}
THOUGHT = {"role": "assistant", "content": "I look"}


def result(number):
    return {"role": "tool", "content": f"result {number}"}


def history(num):
    """Returns the task and `num` turns, each with its result."""
    turns = [(THOUGHT, result(number)) for number in range(num)]
    return (TASK, *(message for turn in turns for message in turn))


class RulesTest(parameterized.TestCase):
    @parameterized.parameters((0, 4, ""), (4, 4, "0123"), (2, 4, "23"), (9, 4, "0123"))
    def test_results_before_the_last_are_left_out(self, kept, num, expected):
        shown = context.keep_recent(history(num), kept)
        self.assertLen(shown, 1 + 2 * num)
        self.assertEqual(shown[0], TASK)
        said = [m["content"] for m in shown if m["role"] == "tool"]
        omitted = num - len(expected)
        self.assertEqual(said[:omitted], [context.OMITTED] * omitted)
        self.assertEqual([text[-1] for text in said[omitted:]], list(expected))
        self.assertEqual(
            [m for m in shown if m["role"] == "assistant"], [THOUGHT] * num
        )

    def test_characters_count_all_that_is_said(self):
        call = {"function": {"name": "abc", "arguments": {"x": ["de", "f"], "n": 7}}}
        message = {"role": "tool", "content": "ghi", "tool_calls": [call]}
        self.assertEqual(context.num_characters([message]), 4 + 3 + 3 + 2 + 1)


class EnvironmentTest(parameterized.TestCase):
    def made(self, name):
        """Returns an environment after its task, whose task is one message."""
        inner = rollouts_test.Scripted(None)
        taskset = context.Context(name, lambda name: inner)
        return taskset.environment(), taskset.task("train", 0, 0)

    def test_all_is_left_out_beyond_the_limit_and_only_then(self):
        most = context.num_characters(history(3))
        for limit, begins_again in ((most, False), (most - 1, True)):
            played, task = self.made(f"context:9,{limit}:scripted")
            self.assertIsInstance(played, protocol.Editor)
            done = played.reset(task)
            with self.assertRaises(StopIteration):
                done.send(None)
            self.assertEqual(tuple(played.shown(history(2))), history(2))
            shown = (TASK,) if begins_again else history(3)
            self.assertEqual(tuple(played.shown(history(3))), shown)
            later = (TASK, *history(5)[7:]) if begins_again else (TASK,)
            self.assertEqual(tuple(played.shown(history(5))), later)

    def test_an_episode_forks_where_its_history_is_rewritten(self):
        async def step(environment, message):
            if environment.num_turns == 4:
                return rollouts_test.ends()
            return rollouts_test.goes_on(f"result {environment.num_turns}")

        inner = rollouts_test.Scripted(step)
        for kept, forks in ((1, 2), (2, 1), (3, 0)):
            taskset = context.Context(f"context:{kept}:own", lambda name: inner)
            (episode,) = rollouts_test.collect(
                taskset, 1, settings=SETTINGS, engine=engine()
            )
            self.assertEqual(episode.reward.total, 1.0)
            self.assertEqual((episode.num_turns, episode.num_forks), (4, forks))
            self.assertLen(episode.samples, 1 + forks)
            said = [m["content"] for m in episode.transcript if m["role"] == "tool"]
            self.assertEqual(said, ["result 1", "result 2", "result 3"])

    def test_a_part_of_a_mixture_keeps_its_rule(self):
        taskset = environments.make("context:5:calculator:2+reverse")
        played, task = taskset.environment(), taskset.task("train", 0, 0)
        with self.assertRaises(StopIteration):
            played.reset(task).send(None)
        long = (*task.messages, *history(6)[1:])
        shown = played.shown(long)
        omitted = [m for m in shown if m["content"] == context.OMITTED]
        self.assertLen(omitted, 1)

    @parameterized.parameters(
        ("context:5", "must be context:KEPT:NAME"),
        ("context:x:reverse", "must be context:KEPT:NAME"),
        ("context:5,0:reverse", "must be context:KEPT:NAME"),
        ("context:5:nothing", "nothing"),
    )
    def test_wrong_names_are_refused(self, name, message):
        with self.assertRaisesRegex(config.InputError, message):
            environments.make(name)


SETTINGS = dataclasses.replace(rollouts_test.SETTINGS, max_turns=5)


def engine():
    return scripted.ScriptedEngine(rollouts_test.answers_ok)


if __name__ == "__main__":
    absltest.main()
