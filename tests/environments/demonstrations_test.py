"""What an environment says between the turns of a demonstration is played."""

import asyncio
import dataclasses
import pathlib
import unittest
from unittest import mock

from absl.testing import parameterized

from glm5_jax import command_line, config, environments, messages
from glm5_jax.data.chat import conversations
from glm5_jax.data.rows import sft
from glm5_jax.environments import demonstrations, mixture, protocol, tool_calls
from glm5_jax.environments.sandbox import bubblewrap
from tests import environment

MISSING = bubblewrap.missing()
CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"


def turn(text):
    return {"role": "assistant", "content": text}


def said(text):
    return {"role": "tool", "content": text}


class Echo:
    """Tasks whose environment repeats what it heard, and counts."""

    name = "echo"

    def __init__(self, num_turns=99, fails=False):
        self.num_turns, self.fails = num_turns, fails
        self.heard, self.open, self.most_open = [], 0, 0

    def task(self, split, seed, index):
        asked = {"role": "user", "content": f"task {index}"}
        return protocol.Task(f"{index}", (asked,))

    def demonstration(self, task):
        turns = [turn(f"{task.id}.{number}") for number in range(int(task.id) + 1)]
        return (*task.messages, *turns)

    def environment(self):
        return Episode(self)


class Episode:
    def __init__(self, taskset):
        self.taskset, self.num_turns = taskset, 0

    async def reset(self, task):
        self.taskset.open += 1
        self.taskset.most_open = max(self.taskset.open, self.taskset.most_open)
        await asyncio.sleep(0.001)
        return task.messages

    async def step(self, message):
        await asyncio.sleep(0.001)
        if self.taskset.fails:
            raise OSError("no shell")
        self.num_turns += 1
        self.taskset.heard.append(message["content"])
        results = (said(f"heard {message['content']}"), said(f"{self.num_turns}"))
        is_over = self.num_turns == self.taskset.num_turns
        return protocol.StepResult(results, None, is_over, False)

    async def close(self):
        self.taskset.open -= 1


def given(taskset, count):
    tasks = [taskset.task("train", 0, i) for i in range(count)]
    return [(task, taskset.demonstration(task)) for task in tasks]


class WholeTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.given = given(Echo(), 3)

    def test_each_turn_but_the_last_is_played(self):
        taskset = Echo()
        found = demonstrations.whole(taskset, given(taskset, 12))
        for index, shown in enumerate(found):
            expected = [{"role": "user", "content": f"task {index}"}]
            for number in range(index):
                one = f"{index}.{number}"
                results = said(f"heard {one}"), said(f"{number + 1}")
                expected += [turn(one), *results]
            self.assertEqual([*shown], [*expected, turn(f"{index}.{index}")])
        self.assertEqual((taskset.open, taskset.most_open), (0, 8))

    def test_whole_ones_are_not_played(self):
        taskset = Echo(fails=True)
        results = [said("heard 1.0"), said("1")]
        task, (asked, first, last) = self.given[1]
        whole = [asked, first, *results, last]
        found = demonstrations.whole(taskset, [self.given[0], (task, whole)])
        self.assertEqual(found, [self.given[0][1], whole])
        self.assertEqual(taskset.most_open, 0)

    def test_it_works_beside_a_running_loop(self):
        async def notebook():
            return demonstrations.whole(Echo(), self.given)

        self.assertLen(asyncio.run(notebook())[2], 8)

    def test_what_cannot_be_played_is_refused(self):
        for taskset, message in (
            (
                Echo(num_turns=1),
                "'echo'.* '1' could not be .*ends before its last turn",
            ),
            (Echo(fails=True), "task '[12]' could not be played: OSError: no shell"),
        ):
            with self.assertRaisesRegex(config.InputError, message):
                demonstrations.whole(taskset, self.given)
            self.assertEqual(taskset.open, 0)
        taskset.has_agents = True
        with self.assertRaisesRegex(config.InputError, "must have the results"):
            demonstrations.whole(taskset, self.given)

    def test_those_of_a_mixture_are_played_but_for_agents(self):
        parts = {"echo": Echo(), "agents": Echo()}
        parts["agents"].has_agents = True
        taskset = mixture.Mixture("echo+agents", parts.get)
        by_echo, by_agents = given(taskset, 4)[2:]
        (found,) = demonstrations.whole(taskset, [by_echo])
        self.assertEqual(found[2], said("heard 1.0"))
        with self.assertRaisesRegex(config.InputError, "must have the results"):
            demonstrations.whole(taskset, [by_echo, by_agents])
        self.assertEqual(parts["agents"].heard, [])


@unittest.skipIf(MISSING, f"no bubblewrap: {MISSING}")
class CronTest(parameterized.TestCase):
    """The recipe of configs/small_sft_cron.py, on a few demonstrations."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(conversations, "_MAX_PLAYED", 12))
        self.sft, self.rl = (
            command_line.Arguments(
                config=str(CONFIGS / f"small_{stage}_cron.py")
            ).train_config()
            for stage in ("sft", "rl")
        )

    def test_demonstrations_are_episodes_of_real_shells(self):
        found = conversations.read_conversations(self.sft.data.source)
        self.assertBetween(len(found), 10, 12)  # without repeated ones
        for conversation in found:
            self.assertEqual(conversation.tools, ())
            messages.check(conversation.messages, tool_calls.SHELL)
            asked, call, result, submit = conversation.messages
            command = call["tool_calls"][0]["function"]["arguments"]["command"]
            name = asked["content"].split("/usr/local/bin/")[1].split()[0]
            self.assertRegex(command, rf"echo '.* /usr/local/bin/{name}' >> crontab")
            self.assertEqual(result, said("(no output)"))
            self.assertEqual(submit, tool_calls.turn("submit"))

    def test_they_fit_the_rows_of_sft_and_of_rl(self):
        data = dataclasses.replace(
            self.sft.data,
            cache_dir=self.create_tempdir().full_path,
            batch_size=2,
            held_out_percent=50,
        )
        with self.assertLogs("absl", "INFO") as logged:
            pipeline = sft.make_pipeline(data, seed=0)
        self.assertIn("0 are cut to 112 tokens; 0 have nothing", "".join(logged.output))
        batch = next(pipeline.train_iterator(0))
        spell = pipeline.tokenizer.spell
        for tokens in batch["tokens"]:
            self.assertIn(">> crontab</arg_value></tool_call>", spell(tokens))
            self.assertIn("<tool_response>(no output)</tool_response>", spell(tokens))
        self.assertLessEqual(pipeline.tokenizer.vocab_size, self.rl.model.vocab_size)

    def test_rl_has_the_model_and_the_task_of_sft(self):
        self.assertEqual(self.rl.model, self.sft.model)
        self.assertEqual(self.rl.rl.environment, self.sft.rl.environment)
        self.assertEqual(self.sft.data.source, f"tasks:{self.rl.rl.environment}")
        self.assertEqual(self.rl.data.sequence_length, self.sft.data.sequence_length)
        taskset = environments.make(self.rl.rl.environment)
        self.assertEqual(taskset.task("held_out", 0, 0).tag, "cron_line")


if __name__ == "__main__":
    environment.main()
