"""Replayed demonstrations earn their reward, on the same ids as in SFT."""

import dataclasses
import itertools
import unittest

from absl.testing import parameterized

from glm5_jax import environments
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import demonstrations, protocol
from glm5_jax.environments.sandbox import bubblewrap
from glm5_jax.rl import episodes as episodes_lib
from tests import environment
from tests.rl import scripted

TOKENIZER = tokenizer_lib.named("byte_chat")
SETTINGS = episodes_lib.Settings(max_new_tokens=200, max_turns=4, num_concurrent=3)
NUM_TASKS = 6
MISSING = bubblewrap.missing()


def turns(rendered):
    """Returns the trained ids of each turn."""
    runs = itertools.groupby(zip(rendered.tokens, rendered.mask, strict=True), _mask)
    return [[token for token, _ in run] for is_turn, run in runs if is_turn]


def _mask(pair):
    return pair[1]


class DemonstrationsTest(parameterized.TestCase):
    @parameterized.product(
        name=environments.names(),
        version=("glm5", "glm5.1", "glm5.2"),
        thinking=(True, False),
    )
    def test_a_demonstration_is_an_episode(self, name, version, thinking):
        num_turns = 1 + (name in ("calculator", "calculator_untold"))
        self.check(name, version, thinking, num_turns)

    @unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
    @parameterized.parameters("terminal:cron_line", "untold:terminal:checksum")
    def test_a_played_demonstration_is_an_episode(self, name):
        self.check(name, "glm5", thinking=False, num_turns=2)

    def check(self, name, version, thinking, num_turns):
        taskset = environments.make(name)
        template = templates.Template(TOKENIZER, version, thinking)
        tasks = [taskset.task("train", 0, i) for i in range(NUM_TASKS)]
        rendered = [
            template.render(self.thought(taskset, task, thinking), task.tools, end=True)
            for task in tasks
        ]

        def answer(request):
            i, turn = divmod(request.id, SETTINGS.max_turns)
            return turns(rendered[i])[turn]

        jobs = [
            episodes_lib.Job(task, i, i * SETTINGS.max_turns)
            for i, task in enumerate(tasks)
        ]
        engine = scripted.ScriptedEngine(answer, capacity=4096)
        found = scripted.collect(engine, taskset, template, jobs, SETTINGS)
        for episode, expected in zip(found, rendered, strict=True):
            self.assertEqual(episode.num_turns, num_turns)
            self.assertIs(episode.label, protocol.Label.OK, episode.reason)
            self.assertEqual(episode.reward.total, 1.0)
            self.assertEqual(episode.num_forks, 0)
            self.assertEqual(episode.num_drift_tokens, 0)
            (sample,) = episode.samples
            self.assertEqual(sample.tokens, expected.tokens)
            self.assertEqual(sample.mask, expected.mask)

    def thought(self, taskset, task, thinking):
        """Returns the demonstration, with a thought if the template asks for one."""
        extra = {"reasoning_content": "so"} if thinking else {}
        return [
            {**message, **extra} if message["role"] == "assistant" else message
            for message in demonstrations.whole(
                taskset, [(task, taskset.demonstration(task))]
            )[0]
        ]

    def test_saying_something_else_earns_nothing(self):
        template = templates.Template(TOKENIZER, enable_thinking=False)
        said = [*TOKENIZER.encode("who knows"), TOKENIZER.eos_id]
        for name in environments.names():
            taskset = environments.make(name)
            job = episodes_lib.Job(taskset.task("train", 0, 0), 0, 0)
            engine = scripted.ScriptedEngine(lambda request: said, capacity=4096)
            settings = dataclasses.replace(SETTINGS, max_turns=1)
            (episode,) = scripted.collect(engine, taskset, template, [job], settings)
            self.assertIs(episode.label, protocol.Label.OK)
            self.assertLess(episode.reward.total, 0.5, name)


if __name__ == "__main__":
    environment.main()
