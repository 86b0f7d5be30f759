"""Loads whole folders: FP8, shards, fuzzed files, and bad indices."""

import json
import pathlib
import shutil
import struct
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from glm5_jax import config as config_lib
from glm5_jax.model import transformer
from glm5_jax.weights import huggingface, huggingface_export, safetensors_file
from tests import environment
from tests.weights import fp8_folder

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "glm5"
FUZZ_CASES = 300
ONE = np.ones((1, 1), np.float32)


def open_params(folder, **kwargs):
    config = huggingface.read_config(folder)
    abstract = transformer.abstract_params(config)
    return huggingface.open_params(folder, config, abstract, **kwargs)


def load(folder, **kwargs):
    config = huggingface.read_config(folder)
    abstract = transformer.abstract_params(config)
    return huggingface.load_params(folder, config, abstract, **kwargs)


class FolderCase(parameterized.TestCase):
    def folder(self):
        return pathlib.Path(self.create_tempdir().full_path)

    def copy(self):
        folder = self.folder() / "glm5"
        shutil.copytree(GOLDEN, folder)
        return folder

    def fp8(self):
        folder = self.folder() / "fp8"
        fp8_folder.write(GOLDEN, folder)
        return folder

    def assert_fails(self, folder, *words):
        with self.assertRaises(config_lib.InputError) as caught:
            open_params(folder)
        for word in words:
            self.assertIn(word, str(caught.exception))


class Fp8Test(FolderCase):
    """A folder that loops over blocks wrote, with partial blocks at the borders."""

    @parameterized.parameters("float32", "bfloat16")
    def test_import_equals_float64(self, dtype):
        folder = self.fp8()
        expected = self.folder() / "expected"
        fp8_folder.write_products(folder, expected, dtype)
        params = load(folder, dtype=dtype)
        jax.tree.map(np.testing.assert_array_equal, params, load(expected, dtype=dtype))

    def test_shards_equal_the_whole(self):
        folder = self.fp8()
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
        config = huggingface.read_config(folder)

        def sharding(leaf):
            axes = [i for i, n in enumerate(leaf.shape) if n % 8 == 0]
            spec = ["x" if axes and i == axes[-1] else None for i in range(leaf.ndim)]
            return NamedSharding(mesh, PartitionSpec(*spec))

        shardings = jax.tree.map(sharding, transformer.abstract_params(config))
        sharded = load(folder, shardings=shardings)
        jax.tree.map(np.testing.assert_array_equal, sharded, load(folder))

    @parameterized.parameters(10**9, 10**5)
    def test_export_of_an_import_is_byte_identical(self, max_shard_bytes):
        folder, out = self.fp8(), self.folder() / "out"
        config = huggingface.read_config(folder)
        huggingface_export.save_params(
            load(folder, dtype="float32"), config, out, "fp8", max_shard_bytes
        )
        before, after = map(fp8_folder.stored_tensors, (folder, out))
        self.assertEqual(set(before), set(after))
        for name, value in before.items():
            self.assertEqual(value.dtype, after[name].dtype, name)
            self.assertEqual(value.tobytes(), after[name].tobytes(), name)
        settings = json.loads((out / "config.json").read_text())
        self.assertEqual(settings["dtype"], "bfloat16")
        kept = settings["quantization_config"]["modules_to_not_convert"]
        self.assertIn("model.layers.3.mlp.gate", kept)
        self.assertIn("model.layers.5.eh_proj", kept)
        self.assertNotIn("model.layers.3.mlp.gate_proj", kept)
        for name in kept:
            self.assertNotIn(f"{name}.weight_scale_inv", before)

    def edit(self, folder, **changes):
        tensors = fp8_folder.stored_tensors(folder) | changes
        tensors = {k: v for k, v in tensors.items() if v is not None}
        safetensors.numpy.save_file(tensors, folder / huggingface.SINGLE_FILE)

    def test_scales_are_checked(self):
        scale = "model.layers.0.self_attn.q_a_proj.weight_scale_inv"
        folder = self.fp8()
        self.edit(folder, **{scale: None})
        self.assert_fails(folder, scale, "missing")
        self.edit(folder, **{scale: np.ones((2, 1), np.float32)})
        self.assert_fails(folder, scale, "[2, 1] instead of [1, 1]")
        self.edit(folder, **{scale: np.ones((1, 1), ml_dtypes.bfloat16)})
        self.assert_fails(folder, scale, "BF16")
        self.edit(folder, **{scale: ONE, "x_scale_inv": ONE})
        self.assert_fails(folder, "x_scale_inv", "unexpected")

    def test_codes_of_an_unknown_meaning_are_refused(self):
        folder = self.fp8()
        settings = json.loads((folder / "config.json").read_text())
        del settings["quantization_config"]
        (folder / "config.json").write_text(json.dumps(settings))
        self.assert_fails(folder, "q_a_proj.weight F8_E4M3", "unexpected")


class ShardsTest(FolderCase):
    """Checks that a process reads only the windows of its own devices."""

    def count(self, leaf, window):
        sizes = []
        read = safetensors_file.Tensor._read

        def counted(tensor, file, shape):
            out = read(tensor, file, shape)
            sizes.append(out.nbytes)
            return out

        with mock.patch.object(safetensors_file.Tensor, "_read", counted):
            values = leaf.read(window)
        return values.nbytes, sum(sizes)

    @parameterized.parameters(
        ("embed_tokens", 0),  # rows of a file
        ("lm_head", 1),
        ("mlp/experts/up_proj", 1),  # experts
        ("mlp/experts/up_proj", 3),  # rows of an expert
        ("self_attn/q_b_proj", 2),  # heads
        ("indexer/wq_b", 2),
    )
    def test_no_byte_of_other_shards_is_read(self, name, axis):
        leaves = open_params(GOLDEN)
        path = tuple(name.split("/"))
        leaf = leaves.get(path) or leaves["layers_1", "block_0", *path]
        for part in range(2):
            window = [slice(0, n) for n in leaf.shape]
            half = leaf.shape[axis] // 2
            window[axis] = slice(part * half, (part + 1) * half)
            wanted, read = self.count(leaf, tuple(window))
            self.assertEqual(wanted, read)

    def test_a_band_of_columns_is_read_row_by_row(self):
        path = self.folder() / "x.safetensors"
        values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
        safetensors.numpy.save_file({"x": values}, path)
        tensor = safetensors_file.read_header(path)["x"]
        leaf = mock.Mock(read=lambda window: tensor[window])
        wanted, read = self.count(leaf, (slice(0, 64), slice(8, 16)))
        self.assertEqual(wanted, read)


class FuzzTest(FolderCase):
    def test_a_damaged_header_never_loads_other_tensors(self):
        """Loading raises an InputError or returns the same tensors."""
        folder = self.copy()
        path = folder / huggingface.SINGLE_FILE
        sound = path.read_bytes()
        expected = {p: leaf.pieces for p, leaf in open_params(folder).items()}
        config = huggingface.read_config(folder)
        abstract = transformer.abstract_params(config)
        length = 8 + struct.unpack("<Q", sound[:8])[0]
        rng = np.random.default_rng(0)
        num_refused = 0
        for case in range(FUZZ_CASES):
            data, at = bytearray(sound), int(rng.integers(length))
            if case % 4 == 0:
                data[at] ^= 1 << int(rng.integers(8))
            elif case % 4 == 1:
                data[at] = int(rng.choice(list(b'0123456789"{}[],:.aF\x00\xff')))
            elif case % 4 == 2:
                del data[at : at + int(rng.integers(1, 40))]
            else:
                data[at:at] = data[at - 20 : at + 20]
            path.write_bytes(bytes(data))
            try:
                leaves = huggingface.open_params(folder, config, abstract)
            except config_lib.InputError:
                num_refused += 1
                continue
            for name, leaf in leaves.items():
                for index, (tensor, _, part) in leaf.pieces.items():
                    wanted = expected[name][index]
                    self.assertEqual((tensor, part), (wanted[0], wanted[2]))
        self.assertGreater(num_refused, 0.9 * FUZZ_CASES)

    def test_index(self):
        """Covers foreign names, absent tensors, and a name in two files."""
        source, folder = self.copy(), self.folder() / "out"
        config = huggingface.read_config(source)
        huggingface_export.save_params(
            load(source), config, folder, max_shard_bytes=10**5
        )
        path = folder / huggingface.INDEX_FILE
        sound = json.loads(path.read_text())
        names = list(sound["weight_map"])

        def write(**changes):
            weight_map = sound["weight_map"] | changes
            path.write_text(json.dumps({"weight_map": weight_map}))

        write(**{names[0]: sound["weight_map"][names[-1]]})
        self.assert_fails(folder, names[0], "missing")
        write(surprise=sound["weight_map"][names[0]])
        self.assert_fails(folder, "surprise", "missing")
        path.write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
        self.assert_fails(folder, "a occurs twice")
        path.write_text('{"weight_map": {}}')
        self.assert_fails(folder, "empty")
        path.write_text("[" * 10**5)
        self.assert_fails(folder, huggingface.INDEX_FILE)
        # If a file holds a tensor that the index places elsewhere, it is not read.
        write()
        first = folder / sound["weight_map"][names[0]]
        last = folder / sound["weight_map"][names[-1]]
        wrong = {names[0]: np.zeros_like(fp8_folder.stored_tensors(source)[names[0]])}
        safetensors.numpy.save_file(safetensors.numpy.load_file(last) | wrong, last)
        self.assertNotEqual(first, last)
        jax.tree.map(np.testing.assert_array_equal, load(folder), load(source))

    def test_a_cache_of_links_is_read(self):
        """The folder has the layout of huggingface_hub's cache."""
        folder = self.copy()
        path, blob = folder / huggingface.SINGLE_FILE, folder.parent / "blob"
        path.rename(blob)
        path.symlink_to(blob)
        jax.tree.map(np.testing.assert_array_equal, load(folder), load(GOLDEN))
        blob.unlink()
        self.assert_fails(folder, huggingface.SINGLE_FILE)


if __name__ == "__main__":
    environment.main()
