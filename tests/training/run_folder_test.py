"""Whose folder it is, before anything in it is touched."""

import dataclasses
import json
import pathlib

from absl.testing import parameterized

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib
from glm5_jax.config import fields
from glm5_jax.training.run import folder as run_folder
from tests import environment

CONFIG = config_lib.TrainConfig(model=presets.GLM5_1M)


class ClaimTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path) / "run"

    def files(self):
        return {p: p.read_bytes() for p in self.folder.rglob("*") if p.is_file()}

    def begin(self):
        """Claims the folder for a run that logs a step."""
        run_folder.claim(self.folder, CONFIG)
        (self.folder / "metrics.jsonl").touch()

    def test_a_new_folder_gets_the_resolved_config(self):
        run_folder.claim(self.folder, CONFIG)
        written = json.loads((self.folder / "config.json").read_text())
        self.assertEqual(written["model"]["hidden_size"], 96)

    def test_every_other_field_makes_another_run(self):
        """A closed list: whoever adds a field decides here on which side it is."""
        free = {
            *("num_steps", "log_every", "eval_every", "eval_batches"),
            *("checkpoint_every", "sample_every", "sample_prompt", "sample_tokens"),
            *("checkpoints_to_keep", "checkpoints_keep_every", "checkpoints_keep_best"),
            *("host_copy_every", "host_copy_folder"),
            *("mesh.slices", "mesh.data", "mesh.fsdp", "mesh.expert", "mesh.tensor"),
            *("mesh.context", "data.cache_dir"),
            *("eval_success", "stop_metric", "stop_at"),
            *("rl.max_logprob_gap", "rl.num_eval_tasks", "rl.answer_timeout_seconds"),
            *("rl.min_start_success", "rl.max_start_success", "rl.episodes_gib"),
            "rl.concurrency",
            *("rl.servers", "rl.weights_store", "rl.num_engines"),
            *("rl.eval_servers", "rl.evaluates_beside"),
            *("rl.quarantine", "rl.canary_every"),
            *("health.spike_nats", "health.on_spike", "health.max_skipped_in_a_row"),
            *("health.on_not_finite", "health.max_rollbacks"),
            *("health.watchdog_seconds", "trackers", "profile_steps"),
        }
        theirs = command_line.to_json_dict(CONFIG)
        refused = set()
        for path, _, _ in fields.of(config_lib.TrainConfig):
            *sections, name = path.split(".")
            tree = json.loads(json.dumps(theirs))
            section = tree
            for key in sections:
                section = section[key]
            section[name] = "another"
            try:
                run_folder.require_same_run(tree, CONFIG, self.folder)
            except config_lib.InputError as error:
                self.assertIn(f"\n  {path}: another there", str(error))
                refused.add(path)
        every = {path for path, _, _ in fields.of(config_lib.TrainConfig)}
        self.assertEqual(every - refused, free)

    def test_the_same_run_may_change_fields_that_change_no_number(self):
        self.begin()
        run_folder.claim(self.folder, dataclasses.replace(CONFIG, eval_every=7))
        written = json.loads((self.folder / "config.json").read_text())
        self.assertEqual(written["eval_every"], 7)

    def test_a_run_without_its_metrics_resumes(self):
        run_folder.claim(self.folder, CONFIG)
        (self.folder / "checkpoints" / "3").mkdir(parents=True)
        run_folder.claim(self.folder, CONFIG)
        other = dataclasses.replace(CONFIG, model=presets.GLM5_10M)
        with self.assertRaisesRegex(config_lib.InputError, r"model\.hidden_size: 96"):
            run_folder.claim(self.folder, other)

    def test_json_has_no_nan(self):
        self.folder.mkdir()
        path = self.folder / "summary.json"
        run_folder.write_json(path, {"a": float("nan"), "b": [1, float("inf")]})
        self.assertEqual(json.loads(path.read_text()), {"a": None, "b": [1, None]})

    def test_the_same_run_may_go_on_on_another_mesh(self):
        self.begin()
        mesh = config_lib.MeshConfig(fsdp=2, expert=2)
        run_folder.claim(self.folder, dataclasses.replace(CONFIG, mesh=mesh))
        written = json.loads((self.folder / "config.json").read_text())
        self.assertEqual((written["mesh"]["fsdp"], written["mesh"]["expert"]), (2, 2))

    def test_a_run_from_before_a_field_resumes_with_its_behaviour(self):
        self.begin()
        path = self.folder / "config.json"
        written = json.loads(path.read_text())
        del written["optim"]["router_gate"]
        path.write_text(json.dumps(written))
        message = r"optim\.router_gate: adamw there, muon here"
        with self.assertRaisesRegex(config_lib.InputError, message):
            run_folder.claim(self.folder, CONFIG)
        optim = dataclasses.replace(CONFIG.optim, router_gate="adamw")
        run_folder.claim(self.folder, dataclasses.replace(CONFIG, optim=optim))

    def test_a_run_from_before_a_field_became_a_constant_resumes_if_it_had_it(self):
        self.begin()
        path = self.folder / "config.json"
        written = json.loads(path.read_text())
        written["optim"]["ns_steps"] = 5
        written["data"]["num_prefetch"] = 3  # changes no number
        path.write_text(json.dumps(written))
        run_folder.claim(self.folder, CONFIG)
        written["optim"]["ns_steps"] = 7
        path.write_text(json.dumps(written))
        message = r"optim\.ns_steps: 7 there, 5 here"
        with self.assertRaisesRegex(config_lib.InputError, message):
            run_folder.claim(self.folder, CONFIG)

    def test_changed_data_is_refused_and_named(self):
        self.begin()
        data = dataclasses.replace(CONFIG.data, sequence_length=128, batch_size=8)
        message = r"data\.batch_size: 16 there, 8 here\n  data\.sequence_length: 256"
        with self.assertRaisesRegex(config_lib.InputError, message):
            run_folder.claim(self.folder, dataclasses.replace(CONFIG, data=data))

    def test_data_may_lie_elsewhere_where_a_checkpoint_knows_them(self):
        self.begin()
        data = dataclasses.replace(CONFIG.data, source="elsewhere", tokenizer="byte")
        config = dataclasses.replace(CONFIG, data=data)
        with self.assertRaisesRegex(config_lib.InputError, r"data\.source: python"):
            run_folder.claim(self.folder, config)
        (self.folder / "checkpoints" / "3").mkdir(parents=True)
        run_folder.claim(self.folder, config)

    def test_a_start_that_fails_leaves_the_config_as_it_was(self):
        self.begin()
        before = self.files()
        other = dataclasses.replace(CONFIG, num_steps=7)
        claimed = run_folder.claimed(self.folder, other)
        with self.assertRaises(ZeroDivisionError), claimed:
            self.assertNotEqual(self.files(), before)
            raise ZeroDivisionError
        self.assertEqual(self.files(), before)

    def test_a_new_run_that_fails_to_start_leaves_nothing(self):
        root, folder = self.folder, self.folder / "of" / "mine"
        with (
            self.assertRaises(KeyboardInterrupt),
            run_folder.locked(folder),
            run_folder.claimed(folder, CONFIG),
        ):
            (folder / "checkpoints").mkdir()
            (folder / "tokenizer.json").touch()
            raise KeyboardInterrupt
        self.assertFalse(root.exists())

    def test_a_failed_start_takes_nothing_of_others_along(self):
        self.folder.mkdir()
        (self.folder / "logs").mkdir()
        with (
            self.assertRaises(ZeroDivisionError),
            run_folder.locked(self.folder),
            run_folder.claimed(self.folder, CONFIG),
        ):
            raise ZeroDivisionError
        self.assertEqual([path.name for path in self.folder.iterdir()], ["logs"])

    def test_another_model_is_refused_and_nothing_changes(self):
        self.begin()
        before = self.files()
        other = dataclasses.replace(CONFIG, model=presets.GLM5_10M)
        with self.assertRaisesRegex(config_lib.InputError, r"model\.hidden_size: 96"):
            run_folder.claim(self.folder, other)
        self.assertEqual(self.files(), before)

    def test_a_run_that_never_began_leaves_the_folder_free(self):
        run_folder.claim(self.folder, CONFIG)
        other = dataclasses.replace(CONFIG, model=presets.GLM5_10M)
        run_folder.claim(self.folder, other)
        written = json.loads((self.folder / "config.json").read_text())
        self.assertEqual(written["model"]["hidden_size"], 240)

    def test_a_foreign_folder_is_refused(self):
        self.folder.mkdir()
        (self.folder / "thesis.tex").write_text("precious")
        with self.assertRaisesRegex(config_lib.InputError, "not empty"):
            run_folder.claim(self.folder, CONFIG)
        self.assertLen(self.files(), 1)

    @parameterized.parameters("model.safetensors", "tokenizer.json")
    def test_a_model_of_others_is_not_overwritten(self, name):
        self.folder.mkdir()
        (self.folder / name).write_text("precious")
        (self.folder / "config.json").write_text('{"model_type": "glm_moe_dsa"}')
        with self.assertRaisesRegex(config_lib.InputError, "holds a model, not a run"):
            run_folder.claim(self.folder, CONFIG)
        self.assertIn("model_type", (self.folder / "config.json").read_text())
        self.assertLen(self.files(), 2)

    def test_an_object_store_is_refused(self):
        with self.assertRaisesRegex(config_lib.InputError, "no path of a file system"):
            run_folder.claim(pathlib.Path("gs://bucket/run"), CONFIG)

    def test_a_file_in_the_way_is_the_users_error(self):
        self.folder.write_text("a file")
        with self.assertRaisesRegex(config_lib.InputError, "--workdir"):
            run_folder.claim(self.folder, CONFIG)

    @parameterized.parameters('{"model": ', "null", "[]", "[" * 100_000)
    def test_a_damaged_config_is_the_users_error(self, text):
        self.begin()
        (self.folder / "config.json").write_text(text)
        with self.assertRaisesRegex(config_lib.InputError, "cannot be read"):
            run_folder.claim(self.folder, CONFIG)


if __name__ == "__main__":
    environment.main()
