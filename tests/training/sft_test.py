"""Stage sft: a whole run on conversations, and its resumption."""

import dataclasses
import math
import shutil

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data.preparation import prepare
from glm5_jax.data.rows import sft
from glm5_jax.model import transformer
from glm5_jax.training import loop
from glm5_jax.training.reporting import metrics
from tests import environment, runs, small_configs

FLOAT32_TOLERANCE = 1e-5  # relative; sums of a few hundred terms in another order


def lines_of(workdir):
    records = metrics.read(workdir / "metrics.jsonl")
    keys = ("step", "train/loss", "train/lm_loss", "eval/bits_per_byte")
    return [[record[key] for key in keys] for record in records]


class SftTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_conversations(cls.root / "data.jsonl")
        cls.config = small_configs.chat_run(cls.root)
        cls.enterClassContext(runs.compile_once(cls.config))
        cls.workdir = cls.root / "run"
        cls.summary = loop.train(cls.config, cls.workdir)

    def test_the_loss_is_the_mean_over_trained_tokens(self):
        config = self.config
        pipeline = sft.make_pipeline(config.data, config.seed)
        init = jax.jit(transformer.init_params, static_argnums=0)
        params = init(config.model, jax.random.key(config.seed))
        batch = pipeline.train_batch(0)
        self.assertBetween(batch["loss_mask"].mean(), 0.05, 0.95)
        out = jax.jit(transformer.forward, static_argnums=1)(
            params,
            config.model,
            batch["tokens"],
            batch["segment_ids"],
            batch["positions"],
        )
        hidden = np.asarray(out.hidden, np.float64)
        logits = hidden @ np.asarray(params["lm_head"], np.float64)
        norm = np.log(np.exp(logits).sum(-1))
        chosen = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        mask = batch["loss_mask"]
        expected = ((norm - chosen) * mask).sum() / mask.sum()
        lm_loss = lines_of(self.workdir)[0][2]
        self.assertLess(abs(lm_loss / expected - 1), FLOAT32_TOLERANCE)

    def test_leaves_a_run_folder_with_an_answer(self):
        self.assertTrue(math.isfinite(self.summary["eval/bits_per_byte"]))
        sample = (self.workdir / "samples" / "2.txt").read_text()
        prompt = "[gMASK]<sop><|user|>Reverse 12<|assistant|></think>"
        self.assertStartsWith(sample, prompt)

    def test_resumed_run_ends_bit_for_bit_alike(self):
        folder = self.root / "resumed"
        shutil.copytree(self.workdir, folder)
        shutil.rmtree(folder / "checkpoints" / "2")
        (folder / "summary.json").unlink()
        loop.train(self.config, folder)
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.params_of(folder, self.config.model),
            runs.params_of(self.workdir, self.config.model),
        )
        self.assertEqual(lines_of(folder), lines_of(self.workdir))

    def test_a_prepared_folder_takes_the_same_steps(self):
        data = self.config.data
        settings = config_lib.PrepareConfig(
            source=data.source,
            kind="conversations",
            tokenizer="byte_chat",
            packing="best_fit",
            sequence_length=data.sequence_length,
            held_out_percent=data.held_out_percent,
            enable_thinking=False,
        )
        prepare.prepare(settings, self.root / "prepared")
        data = dataclasses.replace(data, source=str(self.root / "prepared"))
        loop.train(
            small_configs.chat_run(self.root, data=data), self.root / "from_disk"
        )
        here, there = (lines_of(self.root / name) for name in ("from_disk", "run"))
        self.assertEqual([line[:3] for line in here], [line[:3] for line in there])
        bits = [[line[3] for line in lines] for lines in (here, there)]
        np.testing.assert_allclose(*bits, rtol=FLOAT32_TOLERANCE)  # in another order
        prompt = "[gMASK]<sop><|user|>Reverse 12<|assistant|></think>"
        sample = (self.root / "from_disk" / "samples" / "2.txt").read_text()
        self.assertStartsWith(sample, prompt)

    def test_another_template_is_other_data(self):
        folder = self.root / "changed"
        shutil.copytree(self.workdir, folder)
        data = config_lib.DataConfig(
            **(vars(self.config.data) | {"chat_template": "glm5.2"})
        )
        with self.assertRaisesRegex(config_lib.InputError, "chat_template"):
            loop.train(small_configs.chat_run(self.root, data=data), folder)


if __name__ == "__main__":
    environment.main()
