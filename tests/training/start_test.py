"""What a start compiles, and what is compiled meanwhile."""

import dataclasses
import re
import threading
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest

from glm5_jax.model import transformer
from glm5_jax.training import program as program_lib
from glm5_jax.training.feeds import corpus
from tests import runs, small_configs

COMPILES = re.compile(r"Compiling jit\((eval_step|prefill|decode)\)")
LIMIT = 60  # seconds


class StartTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_corpus(cls.root / "corpus")
        # Nobody else's programs.
        model = dataclasses.replace(small_configs.DENSE_MODEL, rope_theta=3e4)
        cls.config = small_configs.text_run(
            cls.root / "corpus", cls.root / "cache", model=model
        )

    def test_evaluations_and_samples_are_compiled_before_the_first_step(self):
        feed = corpus.Corpus(self.config)
        feed.restrict_to({8: range(8)})
        params = transformer.init_params(self.config.model, jax.random.key(0))
        with jax.log_compiles(), self.assertLogs("jax", "WARNING") as logs:
            feed.prepare(params, jax.device_put)
            first = COMPILES.findall("\n".join(logs.output))
            feed.evaluate(params, 0, jax.device_put)
            feed.sample(params)
        self.assertCountEqual(first, ["eval_step", "prefill", "decode"])
        self.assertEqual(COMPILES.findall("\n".join(logs.output)), first)

    def test_the_step_is_compiled_beside_other_work(self):
        is_called = threading.Event()

        def compile_step():
            assert is_called.wait(LIMIT), "nothing was done beside it"
            return lambda params, state, batch: ("compiled",)

        lowered = mock.Mock(compile=compile_step)
        program = program_lib.make_program(self.config, runs.first_devices())
        with mock.patch.object(program_lib.Program, "lower", return_value=lowered):
            step = program.compile(8, beside=is_called.set)
        batch = {"tokens": np.zeros((8, 24), np.int32)}
        self.assertEqual(step({}, {}, batch), ("compiled",))

    def test_an_error_beside_the_step_ends_the_start(self):
        def fail():
            raise MemoryError("the evaluation")

        program = program_lib.make_program(self.config, runs.first_devices())
        with (
            mock.patch.object(program_lib.Program, "lower"),
            self.assertRaisesRegex(MemoryError, "the evaluation"),
        ):
            program.compile(8, beside=fail)


if __name__ == "__main__":
    absltest.main()
