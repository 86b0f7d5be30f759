"""--dry_run refuses what a start would refuse, with all of it in one message."""

import dataclasses
import json

from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.training.run import folder as run_folder
from glm5_jax.training.run import preflight
from tests import environment, runs

MODEL = dataclasses.replace(presets.GLM5_1M, vocab_size=300, index_topk=8)


class PreflightTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        (cls.root / "corpus").mkdir()
        for i in range(40):
            text = f"def f{i}(x):\n    return x + {i}\n"
            (cls.root / "corpus" / f"{i}.txt").write_text(text)
        cls.data = config_lib.DataConfig(
            source=str(cls.root / "corpus"),
            tokenizer="byte",
            sequence_length=24,
            batch_size=8,
            cache_dir=str(cls.root / "cache"),
        )
        cls.config = config_lib.TrainConfig(model=MODEL, data=cls.data, num_steps=8)

    def refused(self, config, workdir=None):
        """The lines of the message."""
        with self.assertRaises(config_lib.InputError) as caught:
            preflight.check(config, workdir)
        return str(caught.exception).splitlines()

    def test_a_run_that_fits_is_described(self):
        text = preflight.check(self.config, str(self.root / "new"))
        self.assertIn("tokenizer: 257 ids; the model has room for 300", text)
        self.assertRegex(text, r"corpus, \d\.\d+ epochs in 8 steps")
        self.assertIn("new is free", text)
        self.assertFalse((self.root / "new").exists())

    def test_a_folder_with_half_a_first_checkpoint_is_free(self):
        """As after a kill in the first save: a start makes no use of it."""
        folder = self.root / "half"
        run_folder.claim(folder, self.config)
        for name in ("4.orbax-checkpoint-tmp", "2.damaged"):
            (folder / "checkpoints" / name).mkdir(parents=True)
        self.assertIn("half is free", preflight.check(self.config, str(folder)))

    @parameterized.named_parameters(
        ("of a missing folder", {"source": "nowhere"}, "nowhere"),
        ("of a missing tokenizer", {"tokenizer": "nowhere.json"}, "nowhere.json"),
    )
    def test_data_are_refused(self, changes, message):
        data = dataclasses.replace(self.data, **changes)
        (line,) = self.refused(dataclasses.replace(self.config, data=data))
        self.assertRegex(line, message)

    def test_everything_wrong_is_said_at_once(self):
        model = dataclasses.replace(MODEL, vocab_size=256)
        config = dataclasses.replace(self.config, model=model, init_from="/nowhere")
        (self.root / "taken").mkdir(exist_ok=True)
        (self.root / "taken" / "mine.txt").touch()
        lines = self.refused(config, str(self.root / "taken"))
        self.assertLen(lines, 2)
        self.assertEqual(lines[0], "There is no folder /nowhere.")
        self.assertIn("taken is not empty", lines[1])
        (line,) = self.refused(dataclasses.replace(config, init_from=None))
        self.assertIn("model.vocab_size must be at least", line)
        (line,) = self.refused(dataclasses.replace(self.config, eval_suites=("rcall",)))
        self.assertIn("Did you mean recall", line)

    def test_an_environment_is_looked_up(self):
        data = dataclasses.replace(self.data, tokenizer="byte_chat")
        for name, changes in (("reverse", {}), ("revrese", {})):
            rl = config_lib.RLConfig(environment=name, max_new_tokens=8, **changes)
            config = dataclasses.replace(self.config, stage="rl", data=data, rl=rl)
            if name == "reverse":
                self.assertIn("environment: reverse", preflight.check(config))
            else:
                (line,) = self.refused(config)
                self.assertIn("revrese", line)

    def test_weights_of_another_shape_are_refused_unread(self):
        folder = self.root / "model"
        folder.mkdir()
        settings = {"model": dataclasses.asdict(MODEL)}
        (folder / "config.json").write_text(json.dumps(settings))
        config = dataclasses.replace(self.config, init_from=str(folder))
        (line,) = self.refused(config)
        self.assertIn("there is no checkpoint in", line)

    def test_a_folder_of_another_run_is_refused(self):
        folder = self.root / "other"
        run_folder.claim(folder, dataclasses.replace(self.config, seed=1))
        (folder / "metrics.jsonl").touch()
        lines = self.refused(self.config, str(folder))
        self.assertIn("belongs to another run", lines[0])
        self.assertIn("seed: 1 there, 0 here", lines[1])


if __name__ == "__main__":
    environment.main()
