"""Models read for suites, as they are stored or with quantized weights."""

import pathlib

import jax
from absl.testing import absltest

from glm5_jax.evals import runner, subject
from glm5_jax.quantization import leaf
from glm5_jax.weights import huggingface_export
from tests import environment
from tests.evals import subjects


class QuantizedTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.made = subjects.subject(
            num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=0
        )
        self.path = self.folder / "model"
        self.save(self.path)

    def save(self, path, dtype=None):
        params, config = self.made.params, self.made.config
        huggingface_export.save_params(params, config, path, dtype)
        subjects.BYTES.save(path / "tokenizer.json")

    def run_suites(self, model, name, *suites):
        found = runner.run(
            model,
            ["bits_per_byte", *suites],
            lengths=[64],
            num_tasks=2,
            out=self.folder / name,
            source="configs",
        )
        return {
            f"{result.suite}/{name}": figure.mean
            for result in found
            for name, figure in result.figures.items()
        }

    def test_suites_measure_the_codes(self):
        plain, coded = (
            subject.load(self.path, scheme=scheme) for scheme in ("stored", "int4")
        )
        self.assertNotEqual(plain.digest(), coded.digest())
        held = jax.tree.leaves(coded.params, is_leaf=leaf.is_quantized)
        self.assertTrue(any(map(leaf.is_quantized, held)))
        before = self.run_suites(plain, "plain")
        after = self.run_suites(coded, "coded", "recall", "router")
        self.assertGreater(len(after), len(before) + 3)  # of probes
        for name, figure in before.items():
            self.assertNotEqual(after[name], figure)
        self.save(self.folder / "folder", "int4")
        stored = subject.load(self.folder / "folder")
        for name, figure in self.run_suites(stored, "stored").items():
            self.assertEqual(after[name], figure)


if __name__ == "__main__":
    environment.main()
