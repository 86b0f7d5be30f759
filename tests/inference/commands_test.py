"""What generate, evaluate and chat ask of a model, which the tests stand in for.

weights/loading_test.py runs them with models.
"""

import dataclasses
import pathlib
from unittest import mock

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import commands, engine, scoring
from glm5_jax.processes import together
from glm5_jax.weights import generation_config, loading, quantized_loading
from tests import environment

BYTES = tokenizer_lib.byte_tokenizer()
CHAT = tokenizer_lib.named("byte_chat")
MODEL = config_lib.ModelConfig(eos_token_id=(5,), pad_token_id=7, vocab_size=2**18)
DEFAULTS = 0.7, 0.9  # temperature and top_p of the model
GLM5_2 = f"{templates.PREFIX[0]} Reasoning Effort"  # what tells the version


class CommandCase(parameterized.TestCase):
    """Stands in for the model: `self.config`, `self.tokenizer`, `self.new`."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.config, self.tokenizer = MODEL, BYTES
        self.new = [[1]]  # tokens of each completion
        for module, name, stand_in in (
            (quantized_loading, "load_model", self.load),
            (generation_config, "sampling_defaults", lambda _: DEFAULTS),
            (engine, "generate", self.draw),
        ):
            self.enterContext(mock.patch.object(module, name, stand_in))

    def load(self, *args):
        return self.config, {}, self.tokenizer

    def announced(self, function):
        """Wraps a stand-in that compiles: the log must say so before it is called."""

        def call(*args, **kwargs):
            self.assertTrue(any("Compiling and" in text for text in self.said))
            return function(*args, **kwargs)

        self.said = []
        record = lambda text, *args: self.said.append(text % args)
        self.enterContext(mock.patch.object(commands.logging, "info", record))
        return call

    def draw(self, params, config, prompts, **asked):
        self.prompts, self.asked = prompts, asked
        return [engine.Completion(new, [0.0] * len(new), "stop") for new in self.new]

    def generate(self, prompt, sampling=None, **options):
        sampling = sampling or commands.Sampling()
        return commands.generate("RUN", (), prompt, sampling, **options)

    def save(self, ids):
        path = str(self.folder / "ids.npy")
        np.save(path, ids)
        return path


class GenerateTest(CommandCase):
    def test_defaults(self):
        self.generate(commands.Prompt(text="a"))
        wanted = {"max_new_tokens": 128, "temperature": 0.7, "top_p": 0.9}
        wanted |= {"stop_ids": {5, BYTES.eos_id}, "seed": 0, "num_drafts": 0}
        self.assertEqual(self.asked, wanted)

    def test_compiling_is_announced_before_it_starts(self):
        """It takes half a minute for a small model, in which nothing else is said."""
        draw = mock.Mock(side_effect=self.announced(self.draw))
        with mock.patch.object(engine, "generate", draw):
            self.generate(commands.Prompt(text="a"))
        draw.assert_called_once()

    def test_settings(self):
        sampling = commands.Sampling(
            max_new_tokens=3,
            temperature=0.0,
            top_p=0.25,
            seed=4,
            ignore_eos=True,
            num_drafts=2,
        )
        self.generate(commands.Prompt(text="a"), sampling)
        wanted = {"max_new_tokens": 3, "temperature": 0.0, "top_p": 0.25}
        wanted |= {"stop_ids": (), "seed": 4, "num_drafts": 2}
        self.assertEqual(self.asked, wanted)

    def test_an_answer_ends_with_its_turn_and_a_text_does_not(self):
        self.tokenizer = CHAT
        self.generate(commands.Prompt(text="a", chat="glm5"))
        turn = templates.Template(CHAT).stop_ids
        self.assertEqual(self.asked["stop_ids"], {5, CHAT.eos_id, *turn})
        for prompt in (
            commands.Prompt(text="a"),
            commands.Prompt(tokens=self.save([1, 2])),
        ):
            self.generate(prompt)
            self.assertEqual(self.asked["stop_ids"], {5, CHAT.eos_id})

    @parameterized.parameters((7, 7), (None, 0))
    def test_rows_of_ids_are_written_with_padding(self, given, padding):
        self.config = dataclasses.replace(MODEL, pad_token_id=given)
        self.tokenizer, self.new = None, [[1, 2], [3]]
        out = str(self.folder / "out")
        prompt = commands.Prompt(tokens=self.save([[8], [9]]))
        shown = self.generate(prompt, tokens_out=out)
        np.testing.assert_array_equal(np.load(out), [[8, 1, 2], [9, 3, padding]])
        self.assertEqual(shown, ["8 1 2", "9 3"])

    def test_one_row_of_ids_is_written_as_one(self):
        out = str(self.folder / "out")
        self.generate(commands.Prompt(tokens=self.save([8, 9])), tokens_out=out)
        np.testing.assert_array_equal(np.load(out), [8, 9, 1])
        self.generate(commands.Prompt(tokens=self.save([[8, 9]])), tokens_out=out)
        np.testing.assert_array_equal(np.load(out), [[8, 9, 1]])

    def test_texts_are_shown_although_the_disk_is_full(self):
        self.tokenizer, self.new = None, [[1, 2]]
        shown, prompt = [], commands.Prompt(tokens=self.save([8, 9]))
        with self.assertRaisesRegex(OSError, "/dev/full cannot be written"):
            self.generate(prompt, tokens_out="/dev/full", show=shown.extend)
        self.assertEqual(shown, ["8 9 1 2"])

    def test_processes_compare_all_that_they_were_given(self):
        """Each of these calls would draw something else."""
        prompts = commands.Prompt(text="a"), commands.Prompt(text="b")
        asked = [(prompt, commands.Sampling()) for prompt in prompts]
        for change in ({"seed": 1}, {"max_new_tokens": 9}, {"top_p": 0.5}):
            asked.append((prompts[0], commands.Sampling(**change)))
        with mock.patch.object(together, "require_same") as compared:
            for arguments in (*asked, *asked):
                self.generate(*arguments)
        told = [call.args[1] for call in compared.call_args_list]
        self.assertLen(set(told), len(asked))
        self.assertEqual(told[: len(asked)], told[len(asked) :])

    def test_the_version_of_a_chat_is_that_of_the_run(self):
        self.tokenizer = CHAT
        settings = {"data": {"chat_template": "glm5.2"}}
        source = loading.Source(self.folder, self.folder, settings)
        with mock.patch.object(loading, "find", return_value=source):
            self.generate(commands.Prompt(text="a", chat="auto"))
        said = [{"role": "user", "content": "a"}]
        template = templates.Template(CHAT, "glm5.2")
        wanted = template.render(said, add_generation_prompt=True).tokens
        self.assertEqual(self.prompts, [wanted])

    def test_a_tokenizer_without_the_tokens_of_a_chat(self):
        with self.assertRaisesRegex(config_lib.InputError, "that this model's token"):
            self.generate(commands.Prompt(text="a", chat="auto"))
        with self.assertRaisesRegex(config_lib.InputError, "that this model's token"):
            commands.converse("RUN", (), "auto", commands.Sampling())


class EvaluateTest(CommandCase):
    def evaluate(self, **options):
        given = {"tokens": None, "text": None, "logits_out": None}
        return commands.evaluate("RUN", (), **given | options)

    def test_ids_or_a_text_are_scored(self):
        for both in ({}, {"tokens": self.save([1, 2]), "text": "x"}):
            with self.assertRaisesRegex(config_lib.InputError, "either --tokens or"):
                self.evaluate(**both)

    def test_processes_compare_all_that_they_were_given(self):
        with (
            mock.patch.object(together, "require_same") as compared,
            mock.patch.object(scoring, "score", self.score),
        ):
            for ids in ([1, 2], [1, 3], [1, 2]):
                self.evaluate(tokens=self.save(ids))
        first, other, again = (call.args[1] for call in compared.call_args_list)
        self.assertEqual(first, again)
        self.assertNotEqual(first, other)

    def score(self, params, config, rows, logits):
        if logits is not None:
            self.assertEqual(logits.shape, (1, 3, MODEL.vocab_size))
            logits[0, 2, 5] = 7
            self.assertEqual(logits[0, 0, 0], 7)  # all are one number
        return np.zeros(rows["tokens"].shape, np.float32)

    def test_compiling_is_announced_before_it_starts(self):
        score = mock.Mock(side_effect=self.announced(self.score))
        with mock.patch.object(scoring, "score", score):
            self.evaluate(tokens=self.save([1, 2]))
        score.assert_called_once()

    def test_other_processes_write_nothing(self):
        out = self.folder / "logits"
        with (
            mock.patch.object(together, "is_first", return_value=False),
            mock.patch.object(scoring, "score", self.score),
        ):
            found = self.evaluate(tokens=self.save([1, 2, 3]), logits_out=str(out))
        self.assertEqual(found, {})
        self.assertFalse(out.exists())


class TemplateTest(parameterized.TestCase):
    def source(self, file=None, **settings):
        folder = pathlib.Path(self.create_tempdir().full_path)
        if file is not None:
            (folder / "chat_template.jinja").write_text(file)
        return loading.Source(folder, folder, settings)

    @parameterized.named_parameters(
        ("release", GLM5_2, {"model_type": "x"}, None, "glm5.2"),
        ("release_without_a_file", None, {"model_type": "x"}, None, "glm5"),
        ("asked_for", GLM5_2, {"model_type": "x"}, "glm5.1", "glm5.1"),
        ("run", GLM5_2, {"data": {"chat_template": "glm5.1"}}, None, "glm5.1"),
        ("run_without_data", None, {}, None, "glm5"),
    )
    def test_version(self, file, settings, asked, wanted):
        with self.assertNoLogs("absl", "WARNING"):
            found = commands.template_of(CHAT, self.source(file, **settings), asked)
        self.assertEqual(found.version, wanted)

    def test_another_models_template_is_named(self):
        source = self.source("{{ messages }}", model_type="x")
        with self.assertLogs("absl", "WARNING") as logs:
            found = commands.template_of(CHAT, source, None)
        self.assertEqual(found.version, "glm5")
        self.assertIn("is none of GLM-5, 5.1 and 5.2", logs.output[0])

    def test_a_run_says_whether_answers_begin_with_a_thought(self):
        self.assertTrue(commands.template_of(CHAT, self.source(), None).enable_thinking)
        source = self.source(data={"enable_thinking": False})
        self.assertFalse(commands.template_of(CHAT, source, None).enable_thinking)

    def test_without_special_tokens_there_is_none(self):
        for tokenizer in (None, BYTES):
            self.assertIsNone(commands.template_of(tokenizer, self.source(), None))


if __name__ == "__main__":
    environment.main()
