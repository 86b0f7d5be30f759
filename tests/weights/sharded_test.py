"""Loading onto several devices: no host holds a sharded parameter whole."""

import json
import pathlib
import sys
import tempfile

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax.model import transformer
from glm5_jax.weights import conversion, huggingface_export
from tests import environment
from tests.model import tiny
from tests.processes import launch

# Two layers of 64 experts: 101 MB, and 34 MB in each of three stacks of matrices.
CONFIG = tiny.model(
    hidden_size=256,
    kv_lora_rank=16,
    moe_intermediate_size=256,
    n_routed_experts=64,
    num_nextn_predict_layers=0,
)
STACK = 2 * 64 * 256 * 256 * 4
SLACK = STACK // 2  # of allocators and libraries, beside the devices' own shards


class MemoryTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        shapes = transformer.abstract_params(CONFIG)
        params = jax.tree.map(lambda x: np.arange(x.size, dtype=x.dtype), shapes)
        params = jax.tree.map(lambda x, like: x.reshape(like.shape), params, shapes)
        made = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.enterClassContext(made)) / "model"
        huggingface_export.save_params(params, CONFIG, cls.folder)

    def load(self, folder, axis, count=1):
        command = [sys.executable, "-m", "tests.weights.sharded_child"]
        done = launch.together([*command, str(folder), axis], count=count)
        for code, output in done:
            self.assertEqual(code, 0, output)
        return [json.loads(output.splitlines()[-1]) for _, output in done]

    def check(self, found, share, slack=SLACK):
        for sizes in found:
            self.assertBetween(sizes["kept"], 3 * STACK * share, 4 * STACK * share)
            self.assertLess(sizes["used"], sizes["kept"] + slack)

    def test_a_folder_of_tensors(self):
        self.check(self.load(self.folder, "fsdp"), share=1)

    def test_a_run_folder(self):
        run = self.folder.parent / "run"
        conversion.convert(self.folder, run)
        # Orbax decodes chunks of all parameters at the same time, up to 96 GB.
        self.check(self.load(run, "fsdp"), share=1, slack=3 * STACK)

    def test_each_process_reads_its_part(self):
        self.check(self.load(self.folder, "expert", count=2), share=0.5)


if __name__ == "__main__":
    environment.main()
