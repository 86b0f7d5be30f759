"""The command quantize, and a quantized folder in the engine."""

import contextlib
import json
import os
import pathlib
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.inference import commands, engine, quantizing, scoring
from glm5_jax.quantization import equivalents, leaf
from glm5_jax.storage import sent
from glm5_jax.weights import huggingface_export, loading, quantized_loading
from tests import environment
from tests.model import tiny

MODEL = tiny.model(
    num_hidden_layers=1,  # with experts
    first_k_dense_replace=0,
    num_nextn_predict_layers=0,
    vocab_size=260,
    index_topk=64,
)
LOGPROBS = 1e-4  # one program decodes token by token, the other reads the row at once


class QuantizingTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.plain = self.folder / "plain"
        huggingface_export.save_params(tiny.params(MODEL), MODEL, self.plain)
        tokenizer_lib.byte_tokenizer().save(self.plain / "tokenizer.json")
        self.text = self.folder / "text.txt"
        self.text.write_text("Codes and scales. " * 12)

    def test_a_folder_is_described_scored_and_decoded(self):
        options = quantizing.Options(
            scheme="w4a16", data=str(self.text), calibration="auto"
        )
        target = self.folder / "coded"
        report = quantizing.quantize(str(self.plain), str(target), options)
        written = json.loads((target / quantizing.MANIFEST).read_text())
        self.assertEqual(written, report)
        tried = report["bits_per_byte_of_calibrations"]
        self.assertLen(tried, 4)
        self.assertEqual(tried[report["calibration"]], min(tried.values()))
        change = report["bits_per_byte"] / report["bits_per_byte_before"] - 1
        self.assertBetween(abs(change), 1e-6, 0.1)
        self.assertGreater(report["bytes_by_dtype"]["I32"], 0)
        config, params, _ = quantized_loading.load_model(target)
        held = jax.tree.leaves(params, is_leaf=leaf.is_quantized)
        self.assertTrue(any(leaf.is_quantized(x) for x in held))
        prompt = list(b"Codes and")
        (done,) = engine.generate(
            params, config, [prompt], max_new_tokens=6, temperature=0.0
        )
        rows = scoring.rows_of_tokens(np.array([[*prompt, *done.tokens]]), config)
        nll = scoring.score(params, config, rows)[0, len(prompt) - 1 : -1]
        np.testing.assert_allclose(done.logprobs, -nll, atol=LOGPROBS)

    def test_a_source_is_rounded_once(self):
        options = quantizing.Options(scheme="int8")
        target = self.folder / "coded"
        report = quantizing.quantize(str(self.plain), str(target), options)
        self.assertLess(report["bytes"], 4 * report["num_parameters"])
        self.assertEqual(report["bytes"], self.bytes_of_tensors(target))
        self.assertEqual(report["bytes"], sum(report["bytes_by_dtype"].values()))
        with self.assertRaisesRegex(config_lib.InputError, "quantized already"):
            quantizing.quantize(str(target), str(self.folder / "again"), options)
        with self.assertRaisesRegex(config_lib.InputError, "quantized already"):
            commands.evaluate(
                str(target),
                (),
                tokens=None,
                text=str(self.text),
                logits_out=None,
                scheme="int8",
            )

    def bytes_of_tensors(self, folder):
        """Returns the bytes behind the headers, whose length is in 8 bytes."""
        files = [file.read_bytes() for file in folder.glob("*.safetensors")]
        return sum(len(x) - 8 - int.from_bytes(x[:8], "little") for x in files)

    def test_a_target_in_the_home_folder_is_described_there(self):
        with (
            mock.patch.dict(os.environ, HOME=str(self.folder)),
            contextlib.chdir(self.create_tempdir().full_path),
            sent.new_folder("~/coded") as target,
        ):
            options = quantizing.Options(scheme="int8")
            quantizing.quantize(str(self.plain), str(target), options)
            options = quantizing.Options(scheme="int8", calibration="smooth")
            quantizing.quantize(str(self.plain), "~/smooth", options)
        for name in ("coded", "smooth"):
            text = (self.folder / name / quantizing.MANIFEST).read_text()
            self.assertGreater(json.loads(text)["bytes"], 0)

    def test_a_calibration_needs_no_text(self):
        options = quantizing.Options(scheme="int8", calibration="smooth")
        target = self.folder / "coded"
        report = quantizing.quantize(str(self.plain), str(target), options)
        self.assertEqual(report["calibration"], "smooth")
        self.assertNotIn("bits_per_byte", report)
        _, params, tokenizer = quantized_loading.load_model(target)
        self.assertIsNotNone(tokenizer)
        changed, other = self.folder / "changed", self.folder / "other"
        rewritten = equivalents.rewritten(loading.load_model(self.plain)[1], "smooth")
        huggingface_export.save_params(rewritten, MODEL, changed)
        options = quantizing.Options(scheme="int8")
        quantizing.quantize(str(changed), str(other), options)
        wanted = quantized_loading.load_model(other)[1]
        jax.tree.map(np.testing.assert_array_equal, params, wanted)

    def test_the_same_mathematics_is_scored_before_and_after(self):
        """The new folder's config.json can hold neither of these fields."""
        wanted = {"attention": "dense", "index_dtype": "fp8"}
        overrides = [(f"model.{name}", value) for name, value in wanted.items()]
        options = quantizing.Options(scheme="int8", data=str(self.text))
        target = str(self.folder / "coded")
        with mock.patch.object(quantizing, "_bits_per_byte", return_value=1.0) as score:
            quantizing.quantize(str(self.plain), target, options, overrides)
        self.assertEqual(score.call_count, 2)
        for call in score.call_args_list:
            found = {name: getattr(call.args[1], name) for name in wanted}
            self.assertEqual(found, wanted)

    def test_a_text_is_cut_into_halves(self):
        """The first chooses, the second is scored; the middle row is in the second."""
        rows = {"tokens": np.arange(10).reshape(5, 2), "num_bytes": np.arange(5)}
        first, second = quantizing._halves(rows)
        for name, whole in rows.items():
            np.testing.assert_array_equal(first[name], whole[:2])
            np.testing.assert_array_equal(second[name], whole[2:])
        single = {name: x[:1] for name, x in rows.items()}
        for half in quantizing._halves(single):
            jax.tree.map(np.testing.assert_array_equal, half, single)

    def test_auto_needs_a_text(self):
        with self.assertRaisesRegex(config_lib.InputError, "--data"):
            quantizing.Options(scheme="int8", calibration="auto")


if __name__ == "__main__":
    environment.main()
