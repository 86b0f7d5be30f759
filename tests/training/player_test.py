"""Held-out tasks of which no two are alike, and rollouts with pages of the cache."""

import dataclasses
from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import engine as engine_lib
from glm5_jax.rl import episodes, held_out
from glm5_jax.training.feeds import player
from tests import environment
from tests.model import tiny
from tests.training import rl_runs


class HeldOutTest(parameterized.TestCase):
    @parameterized.parameters("gcd", "arithmetic:1-2", "reverse:3-6", "countdown")
    def test_no_task_is_asked_twice(self, name):
        taskset = environments.make(name)
        tasks = held_out.tasks(taskset, 128)
        self.assertLen(tasks, 128)
        self.assertLen({task.messages[0]["content"] for task in tasks}, 128)
        first = [taskset.task("held_out", 0, i) for i in range(200)]
        ids = [task.id for task in first]
        places = [ids.index(task.id) for task in tasks[:32]]
        self.assertEqual(places, sorted(places))

    def test_where_there_are_fewer_it_says_so(self):
        with self.assertLogs(level="WARNING") as logs:
            tasks = held_out.tasks(environments.make("reverse:1"), 64)
        self.assertBetween(len(tasks), 1, 12)  # a fifth of 26 letters
        self.assertIn("fewer than rl.num_eval_tasks=64", logs.output[0])


LONG = {"role": "user", "content": "Reverse the last of these words. " * 5}


class LongPrompts(rl_runs.Lottery):
    """Tasks whose prompts have several pages."""

    def task(self, split, seed, index):
        task = super().task(split, seed, index)
        return dataclasses.replace(task, messages=(LONG, *task.messages))


def template_of(config):
    tokenizer = tokenizer_lib.for_corpus(config.data, [])
    return templates.make_template(config.data, tokenizer)


class PublishTest(parameterized.TestCase):
    @parameterized.parameters((False, 1, 0), (True, 1, 1), (True, 0, 0))
    def test_texts_that_are_under_way_are_read_again(self, clears, pending, cleared):
        """Only where requests run: the cache of others is not kept for new weights."""
        config = rl_runs.make_async(1, {"clears_cache": clears})
        plays = player.Player(config, rl_runs.Lottery(), template_of(config))
        engine = mock.Mock(spec=engine_lib.Engine, version=3, num_pending=pending)
        plays._service = mock.Mock(
            call=lambda act: mock.Mock(result=lambda: act(engine))
        )
        with mock.patch.object(player.publisher, "publish") as publish:
            plays.publish({}, 3, "same")
            self.assertEqual(publish.call_count, 1 - pending)
            engine.clear_cache.assert_not_called()
            engine.version = 2
            plays.publish({}, 3, "same")
            self.assertEqual(publish.call_count, 2 - pending)
        self.assertEqual(engine.clear_cache.call_count, cleared)

    @parameterized.parameters("rl", "distill")
    def test_between_steps_there_is_nothing_to_read_again(self, stage):
        teachers = ("a",) if stage == "distill" else ()
        rl = {"clears_cache": True, "teachers": teachers}
        with self.assertRaisesRegex(
            config_lib.InputError, "rl.clears_cache must be false in stage"
        ):
            rl_runs.make_config(rl, stage=stage)


class PagesTest(parameterized.TestCase):
    def test_a_group_reads_its_prompt_once_and_draws_the_same(self):
        model = {"attention": "dense", "num_hidden_layers": 1, "mtp_num_steps": 0}
        model |= {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
        config = rl_runs.make_config({"prefill_chunk": 256}, model)  # compiles fast
        data = dataclasses.replace(config.data, sequence_length=256)
        config = dataclasses.replace(config, data=data)
        params, taskset = tiny.params(config.model), LongPrompts()
        template = template_of(config)
        found, num_read = {}, {}
        for num_pages in (0, 40):
            rl = dataclasses.replace(config.rl, num_pages=num_pages)
            changed = dataclasses.replace(config, rl=rl)
            plays = player.Player(changed, taskset, template)
            plays.publish(params, 3, "same")
            task = taskset.task("train", 0, 0)
            jobs = [episodes.Job(task, 0, i) for i in range(8)]
            found[num_pages] = plays.play(jobs, "rollouts")
            num_read[num_pages] = plays.num_read
        size = len(template.render(task.messages, task.tools, True).tokens)
        self.assertEqual(num_read[0], 8 * size)
        shared = (size - 1) // 64 * 64
        self.assertGreater(shared, 0)
        self.assertEqual(num_read[40], size + 7 * (size - shared))
        for one, other in zip(found[0], found[40], strict=True):
            self.assertEqual(one.transcript, other.transcript)
            (a,), (b,) = one.samples, other.samples
            self.assertEqual(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)

    def test_pages_must_hold_an_episode(self):
        config = rl_runs.make_config({"num_pages": 1})
        data = dataclasses.replace(config.data, sequence_length=128)
        config = dataclasses.replace(config, data=data)
        with self.assertRaisesRegex(config_lib.InputError, "at least the 2 pages"):
            player.Player(config, rl_runs.Lottery(), template_of(config))


if __name__ == "__main__":
    environment.main()
