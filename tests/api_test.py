"""The face of the package: a model from a preset or a folder, its logits, its texts."""

import dataclasses
import pathlib
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

import glm5_jax
from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.inference import engine, requests, scoring
from glm5_jax.weights import generation_config, loading
from tests import environment
from tests.model import tiny

ATOL = 1e-5  # float32 sums in another order
GOLDEN = pathlib.Path(__file__).parent / "golden"
TINY = tiny.model(
    vocab_size=320, num_hidden_layers=1, num_nextn_predict_layers=0, eos_token_id=(319,)
)


class ApiTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.model = glm5_jax.new(TINY)

    def test_rows_may_have_all_positions_and_no_more(self):
        scoring.require_positions(8, config_lib.ModelConfig(max_position_embeddings=8))
        with self.assertRaisesRegex(config_lib.InputError, "9 tokens, more than .*=8"):
            scoring.require_positions(
                9, config_lib.ModelConfig(max_position_embeddings=8)
            )

    def test_importing_the_package_does_not_import_jax(self):
        command = "import glm5_jax, sys; sys.exit('jax' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", command], check=False)
        self.assertEqual(done.returncode, 0)

    def test_logits_are_those_of_the_model(self):
        ids = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
        expected = tiny.logits(self.model.params, TINY, jnp.asarray(ids))
        np.testing.assert_allclose(self.model.logits(ids), expected, atol=ATOL)

    def test_ids_and_lengths_that_a_model_lacks_are_refused(self):
        with self.assertRaisesRegex(config_lib.InputError, "0..319"):
            self.model.logits([1, 320])
        with self.assertRaisesRegex(config_lib.InputError, "257 tokens"):
            self.model.logits([1] * 257)

    def test_generation_is_the_engine_s(self):
        tokenizer = self.model.tokenizer
        ids = tokenizer.encode("def ")
        settings = {"max_new_tokens": 8, "temperature": 0.5, "seed": 3}
        [free] = engine.generate(self.model.params, TINY, [ids], **settings)
        text = self.model.generate("def ", **settings)
        self.assertEqual(text, tokenizer.decode(free.tokens))

    def test_the_end_of_text_is_not_of_the_text(self):
        tokens = [*self.model.tokenizer.encode("yes"), 319]
        ended = requests.Completion(tokens, [0.0] * 4, "stop")
        with mock.patch.object(engine, "generate", return_value=[ended]) as generate:
            self.assertEqual(self.model.generate("no?"), "yes")
        eos = self.model.tokenizer.eos_id
        self.assertEqual(generate.call_args.kwargs["stop_ids"], {319, eos})

    def test_a_batch_has_every_byte_of_its_texts_as_a_target_once(self):
        texts = ["first document", "second"]
        batch = self.model.batch(texts, sequence_length=16)
        self.assertEqual(batch["tokens"].shape, (2, 16))
        read = batch["tokens"][batch["segment_ids"] > 0]
        self.assertEqual(self.model.tokenizer.decode(read), "".join(texts))
        targets = batch["targets"][batch["loss_mask"] > 0]
        eos = self.model.tokenizer.eos_id
        expected = [
            i for t in texts for i in [*self.model.tokenizer.encode(t)[1:], eos]
        ]
        self.assertEqual(targets.tolist(), expected)

    def test_a_folder_gives_the_model_that_the_commands_read(self):
        folder = GOLDEN / "chat_model"
        config, params, tokenizer = loading.load_model(folder)
        model = glm5_jax.load(folder)
        self.assertEqual(model.config, config)
        self.assertEqual(model.tokenizer.digest, tokenizer.digest)
        found = (model.temperature, model.top_p)
        self.assertEqual(found, generation_config.sampling_defaults(folder))
        jax.tree.map(np.testing.assert_array_equal, model.params, params)

    def test_messages_name_the_remedy(self):
        with self.assertRaisesRegex(config_lib.InputError, "glm5_1m"):
            glm5_jax.new("glm6")
        model = dataclasses.replace(self.model, tokenizer=None)
        with self.assertRaisesRegex(config_lib.InputError, "tokenizer.load"):
            model.generate("text")
        with self.assertRaisesRegex(config_lib.InputError, "empty"):
            self.model.batch([""])
        with self.assertRaisesRegex(AttributeError, "'lode'"):
            glm5_jax.lode  # noqa: B018

    def test_a_preset_has_its_config(self):
        with mock.patch.dict(presets.MODELS, glm5_1m=TINY):
            model = glm5_jax.new("glm5_1m", seed=0)
        jax.tree.map(np.testing.assert_array_equal, model.params, self.model.params)


if __name__ == "__main__":
    environment.main()
