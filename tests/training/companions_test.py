"""From a release of others through a training run and out again, texts and all."""

import dataclasses
import json
import pathlib
import shutil

from glm5_jax import config as config_lib
from glm5_jax.training import loop
from glm5_jax.weights import companions, conversion, loading
from tests import environment, runs, small_configs

RELEASE = pathlib.Path(__file__).parent.parent / "golden" / "chat_model"
TEXTS = (
    *("tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "generation_config.json"),
)


class CarriedTest(runs.OneDeviceTest):
    """transformers' folder -> import -> SFT -> export."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_conversations(cls.root / "data.jsonl")
        conversion.convert(RELEASE, cls.root / "imported")
        cls.config = cls.make_config(cls.root / "imported")
        cls.enterClassContext(runs.compile_once(cls.config))
        loop.train(cls.config, cls.root / "sft")

    @classmethod
    def make_config(cls, init_from, **changes):
        config = small_configs.chat_run(cls.root, num_steps=1, sample_tokens=0)
        model = loading.read_config(loading.find(init_from))
        model = dataclasses.replace(model, dtype="float32", param_dtype="float32")
        tokenizer = str(pathlib.Path(init_from) / "tokenizer.json")
        data = dataclasses.replace(config.data, tokenizer=tokenizer)
        changes = {"init_from": str(init_from), "model": model, "data": data} | changes
        return dataclasses.replace(config, **changes)

    def assert_leaves_as_it_came(self, run):
        """Texts byte by byte, config.json key by key."""
        out = self.root / f"{run.name}_out"
        conversion.convert(run, out, dtype="bfloat16")
        for name in TEXTS:
            self.assertEqual((out / name).read_bytes(), (RELEASE / name).read_bytes())
        before, after = (
            json.loads((folder / "config.json").read_text())
            for folder in (RELEASE, out)
        )
        self.assertIn("a_key_of_others", before)
        self.assertEqual(before, {key: after.get(key, "absent") for key in before})
        loading.load_model(out)

    def test_export_after_training_has_the_files_of_the_release(self):
        self.assert_leaves_as_it_came(self.root / "sft")

    def test_a_second_stage_takes_it_from_the_first(self):
        workdir = self.root / "second"
        workdir.mkdir()
        tokenizer = loading.load_model(self.root / "sft")[2]
        companions.into_training(workdir, str(self.root / "sft"), tokenizer)
        for name in (*TEXTS, companions.ORIGINAL_CONFIG):
            there = (self.root / "sft" / name).read_bytes()
            self.assertEqual((workdir / name).read_bytes(), there)

    def test_a_resumed_run_keeps_it_whatever_became_of_its_source(self):
        folder, source = self.root / "resumed", self.root / "imported"
        shutil.copytree(self.root / "sft", folder)
        for name in (*TEXTS[1:], companions.ORIGINAL_CONFIG):
            (source / name).unlink()
        loop.train(self.config, folder)
        self.assert_leaves_as_it_came(folder)


class IntoTrainingTest(runs.FolderTest):
    """Files of others are not taken for the run's own."""

    def names(self, folder):
        return {path.name for path in folder.iterdir()}

    def release_without(self, *names):
        folder = pathlib.Path(self.create_tempdir().full_path) / "release"
        ignore = shutil.ignore_patterns(*names)
        shutil.copytree(RELEASE, folder, ignore=ignore)
        return folder

    def carry(self, init_from, workdir=None):
        workdir = workdir or pathlib.Path(self.create_tempdir().full_path)
        tokenizer = loading.load_model(RELEASE)[2]
        companions.into_training(workdir, init_from and str(init_from), tokenizer)
        return workdir

    def test_from_the_release_itself(self):
        workdir = self.carry(RELEASE)
        self.assertEqual(self.names(workdir), {*TEXTS, companions.ORIGINAL_CONFIG})
        for name in TEXTS:
            there = (RELEASE / name).read_bytes()
            self.assertEqual((workdir / name).read_bytes(), there)

    def test_another_tokenizers_settings_stay_behind(self):
        folder = self.release_without("tokenizer.json")
        want = {"tokenizer.json", "chat_template.jinja", "generation_config.json"}
        names = self.names(self.carry(folder))
        self.assertEqual(names, want | {companions.ORIGINAL_CONFIG})

    def test_from_nothing_there_is_the_tokenizer_alone(self):
        self.assertEqual(self.names(self.carry(None)), {"tokenizer.json"})

    def test_of_a_run_that_never_began_nothing_is_left(self):
        workdir = self.carry(RELEASE)
        self.assertIn("chat_template.jinja", self.names(workdir))
        self.carry(None, workdir)
        self.assertEqual(self.names(workdir), {"tokenizer.json"})

    def test_a_damaged_original_is_named(self):
        imported = self.root / "damaged"
        conversion.convert(RELEASE, imported)
        (imported / companions.ORIGINAL_CONFIG).write_text("{")
        with self.assertRaisesRegex(config_lib.InputError, "damaged.*Delete it"):
            self.carry(imported)
        with self.assertRaisesRegex(config_lib.InputError, "damaged.*Delete it"):
            conversion.convert(imported, self.root / "out")
        self.assertFalse((self.root / "out").exists())


if __name__ == "__main__":
    environment.main()
