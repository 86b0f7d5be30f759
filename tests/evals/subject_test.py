"""Models read for suites, as they are stored or with quantized weights."""

import pathlib

import jax
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax.data.sources import documents
from glm5_jax.evals import held_out, record, runner, subject
from glm5_jax.quantization import leaf
from glm5_jax.weights import huggingface_export
from tests import environment, small_configs
from tests.data import corpora
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


class CorpusTest(absltest.TestCase):
    def test_a_prepared_run_is_asked_what_its_folders_held_out(self):
        root = pathlib.Path(self.create_tempdir().full_path)
        source = corpora.write_jsonl(root / "source")
        few, more = (
            str(corpora.make_prepared(source, root / name, held_out_percent=percent))
            for name, percent in (("few", 15), ("more", 30))
        )

        def percent(**data):
            settings = config_lib.DataConfig(**data)
            config = config_lib.TrainConfig(
                data=settings, model=small_configs.DENSE_MODEL
            )
            return subject.corpus_of(config).percent

        self.assertEqual([percent(source=few), percent(source=more)], [15, 30])
        # What the smallest percentage holds out, no folder of a mixture trains on.
        self.assertEqual(percent(mixture=(more, few)), 15)
        self.assertEqual(percent(source=str(source), held_out_percent=7), 7)
        corpus = record.Corpus(source=str(source), percent=percent(source=few))
        asked = {text for texts in held_out._texts(corpus).values() for text in texts}
        self.assertEqual(
            asked,
            {
                document.text
                for document in documents.read_documents(str(source))
                if documents.is_held_out(document.name, 15)
            },
        )


if __name__ == "__main__":
    environment.main()
