"""Kept episodes that the present environment scores, from their tokens alone."""

import asyncio
import dataclasses
import json

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.environments import protocol
from glm5_jax.rl import episodes as episodes_lib
from glm5_jax.rl import gateway, long_json, rescoring, trajectories
from tests import environment

DATA = config_lib.DataConfig(tokenizer="byte_chat", enable_thinking=False)
TEMPLATE = templates.make_template(DATA, tokenizer_lib.for_corpus(DATA, []))
SETTINGS = episodes_lib.Settings(max_new_tokens=64, max_turns=4, num_concurrent=2)
CAPACITY = 512


def played(index=0, **changes):
    """An episode that calls the calculator, reads its answer and repeats it."""
    taskset = environments.make("calculator_untold:2-3")
    task = taskset.task("train", 0, index)
    rendered = TEMPLATE.render(taskset.demonstration(task), task.tools)
    size = len(rendered.tokens) - rendered.mask[::-1].index(True)  # ends sampled
    stop = TEMPLATE.tokenizer.special_ids["<|user|>"]  # ends the last turn
    tokens, mask = [*rendered.tokens[:size], stop], [*rendered.mask[:size], True]
    versions = [0 if sampled else gateway.NOT_SAMPLED for sampled in mask]
    fields = {
        "task": task,
        "group": 0,
        "samples": [gateway.Sample(tokens, mask, [-0.5 * m for m in mask], versions)],
        "reward": protocol.Reward(1.0, {"correct": 1.0}),
        "label": protocol.Label.OK,
        "num_turns": 2,
        "num_forks": 0,
        "transcript": [],
        "reason": "",
        "num_drift_tokens": 0,
        "num_truncated": 0,
        "close_error": "",
    }
    return episodes_lib.Episode(**(fields | changes))


def with_text(episode, old, new):
    """The episode, in which a text of the same length was said."""
    encode = TEMPLATE.tokenizer.encode
    (sample,) = episode.samples
    before, after = encode(old), encode(new)
    places = [
        i
        for i in range(len(sample.tokens))
        if sample.tokens[i : i + len(before)] == before
    ]
    tokens = [*sample.tokens]
    tokens[places[-1] : places[-1] + len(before)] = after
    return dataclasses.replace(
        episode, samples=[dataclasses.replace(sample, tokens=tokens)]
    )


def verdict(episode, settings=SETTINGS, taskset="calculator_untold:2-3"):
    (found,) = rescoring.rescore(
        environments.make(taskset), TEMPLATE, settings, CAPACITY, [episode]
    )
    return found


class RescoringTest(parameterized.TestCase):
    def test_episodes_of_several_turns_get_the_same_reward(self):
        episodes = [played(i) for i in range(5)]
        found = rescoring.rescore(
            environments.make("calculator_untold:2-3"),
            TEMPLATE,
            SETTINGS,
            CAPACITY,
            episodes,
        )
        self.assertEqual([v.before for v in found], episodes)
        for v in found:
            self.assertTrue(v.is_same, v.reason)
            self.assertEqual(v.now.num_turns, 2)
            self.assertEqual(v.now.samples, v.before.samples)

    @parameterized.parameters(((), 4), ((1, 0), 1))
    def test_those_of_a_part_keep_its_bound(self, concurrency, wanted):
        taskset = environments.make("calculator_untold:2-3+gcd")
        under_way, most, (part, _) = 0, 0, taskset.parts

        def counted(make=part.environment):
            made, reset, close = (x := make()), x.reset, x.close

            async def begin(task):
                nonlocal under_way, most
                under_way += 1
                most = max(most, under_way)
                await asyncio.sleep(0.001)
                return await reset(task)

            async def end():
                nonlocal under_way
                under_way -= 1
                await close()

            made.reset, made.close = begin, end
            return made

        part.environment = counted
        settings = dataclasses.replace(
            SETTINGS, num_concurrent=4, concurrency=concurrency
        )
        kept = [played(i) for i in range(5)]
        tasks = [dataclasses.replace(e.task, id=f"0/{e.task.id}") for e in kept]
        episodes = [
            dataclasses.replace(e, task=task)
            for e, task in zip(kept, tasks, strict=True)
        ]
        found = rescoring.rescore(taskset, TEMPLATE, settings, CAPACITY, episodes)
        self.assertTrue(all(v.is_same for v in found))
        self.assertEqual(most, wanted)

    @parameterized.named_parameters(
        ("total", {"reward": protocol.Reward(0.5, {"correct": 1.0})}),
        ("part", {"reward": protocol.Reward(1.0, {"correct": 0.0})}),
        ("label", {"label": protocol.Label.TIMEOUT, "reward": None}),
    )
    def test_what_was_paid_otherwise_differs(self, change):
        found = verdict(played(**change))
        self.assertFalse(found.is_same)
        self.assertEqual(found.now.reward.total, 1.0)

    def test_without_the_right_answer_there_is_no_reward(self):
        """Of `code` it is an object, whose repr was kept."""
        task = environments.make("code").task("train", 0, 0)
        record = json.loads(long_json.dumps(trajectories.to_json(played(task=task))))
        kept = trajectories.from_json(record)
        self.assertEqual(kept.task.answer, trajectories.Unkept(repr(task.answer)))
        self.assertEqual(
            trajectories.to_json(kept)["task"],
            record["task"] | {"messages": task.messages, "tools": task.tools},
        )
        found = verdict(kept, taskset="code")
        self.assertIsNone(found.now)
        self.assertRegex(found.reason, "no JSON")

    def test_a_wrong_answer_is_not_paid(self):
        episode = played()
        answer = str(episode.task.answer)
        wrong = answer[:-1] + str((int(answer[-1]) + 1) % 10)
        found = verdict(with_text(episode, answer, wrong))
        self.assertEqual(found.now.reward.total, 0.0)
        self.assertFalse(found.is_same)

    def test_the_present_environment_decides(self):
        found = verdict(played(), taskset="reverse:3-6")  # it scores the first turn
        self.assertIsNone(found.now)
        self.assertRegex(found.reason, "it ends 1 turns earlier")

    def test_another_answer_of_the_environment_is_no_reward(self):
        episode = played()
        answer = str(episode.task.answer)
        said = with_text(episode, answer, answer[:-1] + "?")  # by the model
        found = verdict(with_text(said, answer, answer[:-1] + "!"))  # by the tool
        self.assertIsNone(found.now)
        self.assertFalse(found.is_same)
        self.assertRegex(found.reason, "the prompt of turn 2 is not the recorded one")

    def test_an_episode_that_goes_on_diverges(self):
        (sample,) = played().samples
        end = sample.mask.index(True)
        while sample.mask[end]:
            end += 1
        cut = gateway.Sample(
            sample.tokens[:end],
            sample.mask[:end],
            sample.logprobs[:end],
            sample.versions[:end],
        )
        found = verdict(played(samples=[cut]))
        self.assertRegex(found.reason, "it goes on after its 1 recorded turns")

    def test_the_limits_are_those_of_a_run(self):
        settings = dataclasses.replace(SETTINGS, max_turns=1)
        found = verdict(played(), settings)
        self.assertRegex(found.reason, "it ends 1 turns earlier")


if __name__ == "__main__":
    environment.main()
