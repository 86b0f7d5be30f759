"""Whole runs on prepared data: more processes on the way, and changes that are refused.

The same steps by one process, then two, then four, against one process all the time.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from glm5_jax import config as config_lib
from glm5_jax.training import loop
from glm5_jax.training.feeds import corpus
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import state as run_lib
from tests import environment, runs, small_configs
from tests.data import corpora
from tests.processes import launch

CONFIG = """
import dataclasses

from glm5_jax import command_line
from tests import small_configs

def get_config():
    config = small_configs.mixture_run({web!r}, {code!r})
    config = dataclasses.replace(config, model=small_configs.DENSE_MODEL)
    return command_line.to_config_dict(config)
"""
# The same partitioned program; only the order in which gloo adds may differ, which
# updates carry on. Other tokens would change the loss by percents.
LOSS_RTOL = 1e-5
STEPS = 6


def prepare(root):
    folders = []
    for seed, name in enumerate(("web", "code")):
        source = corpora.write_jsonl(root / f"{name}_corpus", 2, 30, seed)
        folder = corpora.make_prepared(source, root / name, sequence_length=24)
        folders.append(str(folder))
    return folders


class ChangedDataTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.web, cls.code = prepare(cls.root)
        cls.config = small_configs.mixture_run(cls.web, cls.code)
        cls.enterClassContext(runs.compile_once(cls.config))
        cls.workdir = cls.root / "run"
        cls.summary = loop.train(cls.config, cls.workdir)

    def unfinished(self, name):
        """A copy of the run without its last step: a finished one reads no data."""
        workdir = self.root / name
        shutil.copytree(self.workdir, workdir)
        shutil.rmtree(workdir / "checkpoints" / str(STEPS))
        return workdir

    def test_epochs_and_waits_are_reported(self):
        last = metrics.read(self.workdir / "metrics.jsonl")[-1]
        # Three steps of each stage, of 8 rows.
        for name in ("web", "code"):
            index = json.loads((self.root / name / "index.json").read_text())
            size = sum(shard["rows"] for shard in index["train"])
            self.assertAlmostEqual(last[f"data/epochs/{name}"], 24 / size)
            self.assertIn(f"eval/bits_per_byte/{name}", last)
        self.assertBetween(self.summary["perf/data_wait"], 0, 1)

    def test_another_mixture_is_refused_by_its_fields(self):
        config = small_configs.mixture_run(
            self.web, self.code, mixture_steps=(4,), batch_size=16
        )
        with self.assertRaises(config_lib.InputError) as caught:
            loop.train(config, self.workdir)
        message = str(caught.exception)
        self.assertIn("data.batch_size: 8 there, 16 here", message)
        self.assertIn("data.mixture_steps: [3] there, [4] here", message)

    def test_a_folder_prepared_again_otherwise_is_refused_by_the_change(self):
        workdir, web = self.unfinished("copy"), self.root / "web"
        self.addCleanup(shutil.move, self.root / "aside", web)
        shutil.move(web, self.root / "aside")
        self.addCleanup(shutil.rmtree, web)
        corpora.make_prepared(
            self.root / "web_corpus", web, packing="best_fit", sequence_length=24
        )
        with self.assertRaises(config_lib.InputError) as caught:
            loop.train(small_configs.mixture_run(self.web, self.code), workdir)
        message = str(caught.exception)
        name = "mixture[0].packing"
        self.assertIn(f'{name}="truncate" there, {name}="best_fit" here', message)
        self.assertIn("mixture[0].rows=", message)
        self.assertNotIn("mixture[0].seed", message)
        self.assertNotIn("mixture[1]", message)

    def test_a_renamed_folder_resumes(self):
        workdir, web = self.unfinished("moved_run"), self.root / "moved" / "internet"
        shutil.copytree(self.web, web)
        with self.assertRaisesRegex(config_lib.InputError, r"mixture\[1\].rows="):
            loop.train(small_configs.mixture_run(str(web), self.web), workdir)
        loop.train(small_configs.mixture_run(str(web), self.code), workdir)

    def test_weights_are_not_given_other_ids(self):
        data = config_lib.DataConfig(
            source=str(self.root / "web_corpus"),
            tokenizer="byte_chat",
            sequence_length=24,
            cache_dir=self.create_tempdir().full_path,
        )
        config = dataclasses.replace(
            self.config, init_from=str(self.workdir), data=data
        )
        with self.assertRaisesRegex(
            config_lib.InputError, "'byte_chat' is not the tokenizer of init_from"
        ):
            run_lib.make_feed(config)


# A process of several tells what its own rows make likely.
ESTIMATED = ("data/padding", "data/document_flops")


class FeedTest(runs.FolderTest):
    def test_one_then_two_then_four_processes_make_the_rows_of_one(self):
        """Two steps each, the weights of the mixture changing on the way."""
        config = small_configs.mixture_run(*prepare(self.root))
        size = config.data.batch_size
        whole = corpus.Corpus(config)
        whole.restrict_to({size: range(size)})
        wanted = [whole.next({}, step) for step in range(STEPS)]
        self.assertLen({batch["tokens"].tobytes() for batch, _ in wanted}, STEPS)
        for first, num_processes in ((0, 1), (2, 2), (4, 4)):
            shares = np.split(np.arange(size), num_processes)
            feeds = [corpus.Corpus(config) for _ in shares]
            for step in (first, first + 1):
                batch, metrics = wanted[step]
                of_rows = {name: [] for name in ESTIMATED}
                for feed, rows in zip(feeds, shares, strict=True):
                    if step == first:
                        feed.restrict_to({size: rows.tolist()})
                    got, seen = feed.next({}, step)
                    for name, values in of_rows.items():
                        values.append(seen.pop(name))
                    self.assertEqual({n: metrics[n] for n in seen}, seen)
                    self.assertEqual(got.keys(), batch.keys())
                    for key, value in batch.items():
                        np.testing.assert_array_equal(got[key], value[rows])
                for name, values in of_rows.items():
                    np.testing.assert_allclose(np.mean(values), metrics[name])


@pytest.mark.slow
class ProcessesTest(runs.FolderTest):
    def test_one_then_two_then_four_processes_take_the_same_steps(self):
        web, code = prepare(self.root)
        path = self.root / "tiny.py"
        path.write_text(CONFIG.format(web=web, code=code))
        mesh = "--config.mesh.data=8"
        records = {}
        for name, plan in (("alone", [(STEPS, 1)]), ("more", [(2, 1), (4, 2), (6, 4)])):
            workdir = self.root / name
            for num_steps, processes in plan:
                got, output = launch.train(
                    path,
                    workdir,
                    mesh,
                    f"--simulate_processes={processes}",
                    f"--config.num_steps={num_steps}",
                    "--config.optim.schedule=constant",
                )
                self.assertEqual(got, 0, output)
            records[name] = metrics.read(workdir / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records["more"]], [1, 2, 3, 4, 5, 6])
        for ours, theirs in zip(records["more"], records["alone"], strict=True):
            np.testing.assert_allclose(
                ours["train/loss"], theirs["train/loss"], rtol=LOSS_RTOL
            )
            for name in ("web", "code"):
                key = f"data/epochs/{name}"
                self.assertEqual(ours[key], theirs[key])


if __name__ == "__main__":
    environment.main()
