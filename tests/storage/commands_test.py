"""Commands with addresses: data, models and runs in buckets, from end to end."""

import json
import pathlib
import tempfile

from absl.testing import absltest

from tests import environment, forked, small_configs
from tests.storage import emulators

ROOT = pathlib.Path(__file__).parents[2]


class CommandsTest(absltest.TestCase):
    """One store a part: Cloud Storage reads what S3 is given, and the other way."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.root = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        home = cls.root / "home"
        cls.environ = cls.enterClassContext(emulators.serving("gs", home))
        cls.environ |= cls.enterClassContext(emulators.serving("s3", home))

    def run_command(self, name, *flags, **environ):
        """What `python -m glm5_jax.NAME` prints."""
        # A fork does not start itself again with large pages.
        environ = {"GLIBC_TUNABLES": ""} | self.environ | environ
        done = forked.run(name, *flags, environ=environ)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_data_models_and_runs_in_buckets(self):
        corpus = self.root / "corpus"
        small_configs.write_corpus(corpus)
        system = emulators.system("gs")
        for path in corpus.rglob("*"):
            if path.is_file():
                name = path.relative_to(corpus).as_posix()
                system.put_file(str(path), f"bucket/corpus/{name}")
        prepared = self.run_command(
            "prepare",
            "--source=gs://bucket/corpus",
            "--target=s3://bucket/rows",
            "--tokenizer=byte",
            "--sequence_length=64",
        )
        self.assertIn("index.json", " ".join(emulators.objects("s3", "rows")))
        self.assertEqual(json.loads(prepared)["target"], "s3://bucket/rows")
        run = [
            f"--config={ROOT}/configs/quickstart.py",
            "--config.data.source=s3://bucket/rows",
            "--config.data.tokenizer=byte",
            "--workdir=gs://bucket/run",
            "--config.sample_tokens=0",
            "--config.eval_every=0",
            "--config.data.sequence_length=64",
            "--config.data.batch_size=2",
            "--config.model.attention=dense",
            "--config.model.num_hidden_layers=1",
            "--config.model.first_k_dense_replace=1",
            "--config.model.num_nextn_predict_layers=0",
            "--config.optim.name=adamw",
            "--config.optim.warmup_steps=0",
        ]
        first = json.loads(self.run_command("train", *run, "--config.num_steps=1"))
        self.assertEqual(first["steps"], 1)
        self.assertEqual(first["workdir"], "gs://bucket/run")
        dry = self.run_command("train", *run, "--dry_run")
        self.assertIn("gs://bucket/run holds step 1", dry)
        # On another machine.
        other = {"GLM5_JAX_BUCKETS": str(self.root / "other")}
        second = self.run_command("train", *run, "--config.num_steps=2", **other)
        self.assertEqual(json.loads(second)["steps"], 2)
        listed = self.run_command("checkpoint", "--checkpoint=gs://bucket/run")
        self.assertIn("sizes match", listed)
        self.run_command(
            "convert", "--source=gs://bucket/run", "--target=s3://bucket/model"
        )
        self.assertIn("model.safetensors", emulators.objects("s3", "model"))
        text = self.run_command(
            "generate",
            "--checkpoint=s3://bucket/model",
            "--prompt=a",
            "--max_new_tokens=2",
        )
        self.assertTrue(text)
        self.run_command(
            "quantize",
            "--checkpoint=s3://bucket/model",
            "--target=gs://bucket/small",
            "--scheme=fp8",
        )
        self.assertIn("quantization.json", emulators.objects("gs", "small"))
        here = self.root / "other" / "runs" / "gs" / "bucket" / "run"
        told = self.run_command("compare", "gs://bucket/run", str(here))
        self.assertIn("loss", told)
        back = self.run_command(
            "checkpoint", "--checkpoint=gs://bucket/run", "--roll_back=1"
        )
        self.assertIn("resumes from step 1", back)
        self.assertIn("rollback.json", emulators.objects("gs", "run"))
        self.assertNotIn("checkpoints/2", " ".join(emulators.objects("gs", "run")))


if __name__ == "__main__":
    environment.main()
