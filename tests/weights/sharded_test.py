"""Loading onto several devices: no host holds a sharded parameter whole."""

import dataclasses
import json
import pathlib
import tempfile

import jax
import pytest
from absl.testing import parameterized

from glm5_jax.model import transformer
from glm5_jax.weights import conversion, huggingface_export
from tests import environment
from tests.model import tiny
from tests.processes import launch
from tests.weights import sharded_child

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
# Two chunks of 32 MiB of a run stay decoded; the next one and a window join them.
WINDOWS = 4 * 2**25


class MemoryTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        made = tempfile.TemporaryDirectory()
        cls.folder = written(CONFIG, pathlib.Path(cls.enterClassContext(made)))

    def load(self, axis, *folders, count=1):
        """Returns what each process found for each of the folders."""
        done = launch.fork(sharded_child.main, axis, *folders, count=count)
        for code, output in done:
            self.assertEqual(code, 0, output)
        found = [json.loads(output.splitlines()[-1]) for _, output in done]
        return [*zip(*found, strict=True)]

    def check(self, found, share, slack=SLACK, stack=STACK):
        for sizes in found:
            self.assertBetween(sizes["kept"], 3 * stack * share, 4 * stack * share)
            self.assertLess(sizes["used"], sizes["kept"] + slack)

    def test_a_folder_of_tensors(self):
        (found,) = self.load("fsdp", self.folder)
        self.check(found, share=1)

    def test_each_process_reads_its_part(self):
        """Also of a run folder."""
        run = self.folder.parent / "run"
        conversion.convert(self.folder, run)
        tensors, arrays = self.load("expert", self.folder, run, count=2)
        self.check(tensors, share=0.5)
        self.check(arrays, share=0.5, slack=WINDOWS)

    @pytest.mark.slow
    def test_a_larger_run_folder_takes_no_more_beside_its_parts(self):
        larger = dataclasses.replace(CONFIG, n_routed_experts=256)
        folder = pathlib.Path(self.create_tempdir().full_path)
        conversion.convert(written(larger, folder), folder / "run")
        for axis, count in (("fsdp", 1), ("fsdp", 2), ("expert", 2)):
            (found,) = self.load(axis, folder / "run", count=count)
            self.check(found, share=1 / count, slack=WINDOWS, stack=4 * STACK)


def written(config, folder):
    """Writes a model of these shapes as a folder of tensors."""
    shapes = transformer.abstract_params(config)
    params = jax.tree.map(lambda x: sharded_child.numbered(x.shape, x.dtype), shapes)
    huggingface_export.save_params(params, config, folder / "model")
    return folder / "model"


if __name__ == "__main__":
    environment.main()
