"""Folders of int8 and int4 codes: against the package compressed-tensors, and in full.

golden/make_compressed.py made the codes and products that the package computes.
"""

import functools
import itertools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.model import transformer
from glm5_jax.quantization import leaf, schemes
from glm5_jax.quantization import products as products_lib
from glm5_jax.weights import (
    coded_folder,
    coded_leaves,
    coded_tensor,
    compressed_tensors,
    huggingface,
    huggingface_export,
    huggingface_names,
    loading,
    quantized_loading,
    safetensors_file,
)
from tests import environment
from tests.model import tiny

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "compressed.npz"
MODEL = tiny.model(num_hidden_layers=2, num_nextn_predict_layers=0)
DIMS = transformer.param_dims(MODEL)
ALL = np.s_[:, :]


@functools.partial(jax.jit, static_argnums=1)
def quantized(params, scheme):
    return schemes.quantized(params, DIMS, schemes.SCHEMES[scheme])


def products(params):
    return jax.tree.map(
        lambda x: leaf.dequantized(x, jnp.float32) if leaf.is_quantized(x) else x,
        params,
        is_leaf=leaf.is_quantized,
    )


class PackageTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.golden = np.load(GOLDEN)

    def test_packed_codes_are_those_of_the_package(self):
        codes, words = self.golden["int4"], self.golden["packed"]
        np.testing.assert_array_equal(coded_tensor.packed(codes), words)
        read = coded_tensor.PackedCodes(words, codes.shape)
        np.testing.assert_array_equal(read[ALL], codes)
        np.testing.assert_array_equal(read[2:5, 3:21], codes[2:5, 3:21])

    def test_words_are_read_from_any_column_to_any(self):
        codes, words = self.golden["int4"], self.golden["packed"]
        read, width = coded_tensor.PackedCodes(words, codes.shape), codes.shape[1]
        for left, right in itertools.combinations(range(width + 1), 2):
            np.testing.assert_array_equal(
                read[:, left:right], codes[:, left:right], f"{left}:{right}"
            )

    @parameterized.parameters(("int4", "by_group", 8), ("int8", "by_channel", 32))
    def test_products_are_those_of_the_package(self, kind, scales, width):
        golden = self.golden
        codes = golden[kind]
        if kind == "int4":
            codes = coded_tensor.PackedCodes(golden["packed"], codes.shape)
        tensor = coded_tensor.CodedTensor(codes, golden[scales], (1, width), kind)
        wanted = golden[f"{kind}_weights"]
        np.testing.assert_array_equal(tensor[ALL], wanted)
        np.testing.assert_array_equal(tensor[1:4, 5:19], wanted[1:4, 5:19])


class FolderTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)
        self.params = tiny.params(MODEL)

    def write(self, scheme, name="model"):
        folder = self.folder / name
        huggingface_export.save_params(self.params, MODEL, folder, scheme)
        return folder

    @parameterized.parameters("w4a8", "w8a8", "fp8", "int4")
    def test_a_folder_holds_the_codes_that_training_rounds_to(self, scheme):
        """Bit for bit; FP8 where its format cuts a matrix into the same blocks."""
        config, got, _ = quantized_loading.load_model(self.write(scheme))
        self.assertEqual(config.num_hidden_layers, 2)
        wanted = quantized(self.params, scheme)
        flat = jax.tree_util.tree_leaves_with_path(wanted, is_leaf=leaf.is_quantized)
        num_equal = 0
        for (path, a), b in zip(
            flat, jax.tree.leaves(got, is_leaf=leaf.is_quantized), strict=True
        ):
            self.assertEqual(leaf.is_quantized(a), leaf.is_quantized(b), path)
            if not leaf.is_quantized(a):
                if scheme != "fp8":  # which stores the rest in bfloat16
                    np.testing.assert_array_equal(a, b)
            elif scheme == "fp8":
                self.assertEqual(b.values.dtype, jnp.float8_e4m3fn)
                is_shared = path[-1].key in schemes.BOTH_WAYS  # by keys and values
                if a.layout.blocks == b.layout.blocks and not is_shared:
                    num_equal += 1
                    np.testing.assert_array_equal(
                        b.values.view(jnp.uint8), a.values.view(jnp.uint8)
                    )
                    np.testing.assert_array_equal(
                        jnp.broadcast_to(b.scales, a.scales.shape), a.scales
                    )
            else:
                self.assertEqual(b.layout.activations, a.layout.activations)
                np.testing.assert_array_equal(a.values, b.values)
                np.testing.assert_array_equal(
                    jnp.broadcast_to(b.scales, a.scales.shape), a.scales
                )
        if scheme == "fp8":
            self.assertGreater(num_equal, 9)

    @parameterized.parameters("w4a8", "fp8", "int4")
    def test_floats_are_the_products_of_codes_and_scales(self, scheme):
        """In FP8 too, whose blocks run over heads, and over keys and values."""
        folder = self.write(scheme)
        override = [("model.param_dtype", "float32")]
        _, dense, _ = loading.load_model(folder, override)
        _, coded, _ = quantized_loading.load_model(folder, override)
        wanted = jax.jit(products)(coded)
        for a, b in zip(jax.tree.leaves(dense), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
        if scheme != "fp8":
            scheme = schemes.SCHEMES[scheme]
            rounded = jax.jit(lambda p: schemes.rounded(p, DIMS, scheme))(self.params)
            for a, b in zip(*map(jax.tree.leaves, (dense, rounded)), strict=True):
                np.testing.assert_array_equal(a, b)

    def test_rounding_while_reading_gives_the_same_codes_as_a_folder(self):
        plain = self.write(None, "plain")
        _, got, _ = quantized_loading.load_model(plain, scheme="w4a8")
        wanted = quantized(self.params, "w4a8")
        self.assertEqual(jax.tree.structure(got), jax.tree.structure(wanted))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
        with self.assertRaisesRegex(config_lib.InputError, "quantized already"):
            quantized_loading.load_model(self.write("int8"), scheme="int8")

    def test_config_json_names_the_modules_of_each_kind(self):
        folder = self.write("w4a8")
        settings = json.loads((folder / "config.json").read_text())
        found = settings["quantization_config"]
        groups = {g["weights"]["num_bits"]: g for g in found["config_groups"].values()}
        experts = r"re:^model\.layers\.\d+\.mlp\.experts\.\d+\.gate_proj$"
        self.assertIn(experts, groups[4]["targets"])
        self.assertIn(
            r"re:^model\.layers\.\d+\.self_attn\.o_proj$", groups[8]["targets"]
        )
        self.assertIn("model.layers.1.mlp.gate", found["ignore"])
        signed = {"type": "int", "symmetric": True}
        by_token = signed | {"num_bits": 8, "dynamic": True, "strategy": "token"}
        by_row = signed | {"dynamic": False, "strategy": "channel", "group_size": None}
        for num_bits, group in groups.items():
            kind = "int-quantized" if num_bits == 8 else "pack-quantized"
            self.assertEqual(group["format"], kind)
            self.assertEqual(group["input_activations"], by_token)
            size = {"strategy": "group", "group_size": 32} if num_bits == 4 else {}
            weights = by_row | {"num_bits": num_bits} | size
            self.assertEqual(group["weights"], weights)
        self.assertEqual(found["format"], "mixed-precision")
        header = safetensors_file.read_header(folder / "model.safetensors")
        num_shapes = 0
        for name, tensor in header.items():
            if name.endswith(compressed_tensors.SHAPE):
                words = name.removesuffix(compressed_tensors.SHAPE)
                rows, columns = header[words + compressed_tensors.PACKED].shape
                np.testing.assert_array_equal(tensor[:,], (rows, 8 * columns))
                num_shapes += 1
        self.assertGreater(num_shapes, 5)

    def test_int4_has_groups_in_experts_alone(self):
        folder = self.write("int4")
        settings = json.loads((folder / "config.json").read_text())
        found = settings["quantization_config"]
        num_dense = 0
        for group in found["config_groups"].values():
            for target in group["targets"]:
                is_int4 = group["weights"]["num_bits"] == 4
                is_expert = r".experts\." in target
                has_groups = group["weights"]["group_size"] is not None
                self.assertEqual(has_groups, is_int4 and is_expert, target)
                kind = "group" if has_groups else "channel"
                self.assertEqual(group["weights"]["strategy"], kind)
                num_dense += is_int4 and not is_expert
        self.assertGreater(num_dense, 5)

    @parameterized.parameters(
        ("weights", {"num_bits": 3}, "symmetric int8 or int4"),
        ("weights", {"symmetric": False}, "symmetric int8 or int4"),
        ("input_activations", {"dynamic": False}, "dynamic int8 by token"),
    )
    def test_other_codes_are_refused(self, part, change, message):
        folder = self.write("w8a8")
        path = folder / "config.json"
        settings = json.loads(path.read_text())
        groups = settings["quantization_config"]["config_groups"]
        groups["group_0"][part] |= change
        path.write_text(json.dumps(settings))
        with self.assertRaisesRegex(config_lib.InputError, message):
            quantized_loading.load_model(folder)

    @parameterized.parameters(
        # q_b_proj: 4 heads of 8 dims in the rows, 6 inputs in the columns.
        ("(NH)Q -> QNH", "", [(6, 4, 8)], (128, 128), [(0, 0, 0)]),
        ("(NH)Q -> QNH", "", [(6, 4, 8)], (32, 6), [(0, 0, 0)]),
        ("(NH)Q -> QNH", "", [(6, 4, 8)], (16, 6), [(0, 1, 8)]),
        ("(NH)Q -> QNH", "", [(6, 4, 8)], (12, 3), [(3, 1, 4)]),
        # kv_b_proj: 4 dims of a head are its key's, the next 6 its value's.
        (
            "(NP)C -> CNP",
            "P",
            [(5, 3, 4), (5, 3, 6)],
            (8, 5),
            [(0, 1, 2), (0, 1, 2)],
        ),
        ("(NP)C -> CNP", "P", [(5, 3, 4), (5, 3, 6)], (30, 1), [(1, 0, 0)] * 2),
    )
    def test_blocks_of_merged_dims_are_cut_where_heads_end(
        self, dims, join, shapes, block, wanted
    ):
        """A block as large as the matrix is the whole; 0 stands for it."""
        stored = huggingface_names.Layout(
            huggingface_names.Row("", "", dims, join), shapes
        )
        codes = np.zeros(stored.shape, np.int8)
        tensor = coded_tensor.CodedTensor(codes, None, block, "int8")
        found = [coded_tensor.layout(tensor, stored, i, 1) for i in range(len(shapes))]
        self.assertEqual(found, [leaf.Layout("int8", blocks) for blocks in wanted])

    def test_a_stack_of_unlike_codes_is_read_as_floats(self):
        row = huggingface_names.Row("", "", "FD -> DF")
        stored = huggingface_names.Layout(row, [(8, 3)])

        def opened(name, *blocks):
            tensors = [
                coded_tensor.CodedTensor(
                    np.ones((3, 8), np.int8), scales, block, "int8"
                )
                for block in blocks
                for scales in [np.ones((3, 8 // block[1]), np.float32)]
            ]
            pieces = {(i,): (tensor, stored, 0) for i, tensor in enumerate(tensors)}
            shape = (len(blocks), 8, 3)
            made = huggingface.StoredLeaf(shape, np.dtype(np.float32), pieces)
            found = coded_leaves.opened(("layers_0", "block_0", "mlp", name), made)
            return leaf.is_quantized(found)

        self.assertTrue(opened("up_proj", (1, 8), (1, 8)))
        self.assertFalse(opened("up_proj", (1, 8), (1, 4)))
        self.assertFalse(opened("gate", (1, 8), (1, 8)))  # no code takes codes here

    @parameterized.parameters((4, "same"), (8, "int8"))
    def test_groups_over_heads_are_multiplied_by_unrounded_rows(self, block, wanted):
        row = huggingface_names.Row("", "", "D(NO) -> NOD")
        stored = huggingface_names.Layout(row, [(2, 4, 3)])
        rng = np.random.default_rng(0)
        codes = rng.integers(-127, 128, (3, 8), np.int8)
        scales = rng.uniform(1, 2, (3, 8 // block)).astype(np.float32)
        tensor = coded_tensor.CodedTensor(codes, scales, (1, block), "int8", "int8")
        pieces = {(): (tensor, stored, 0)}
        made = huggingface.StoredLeaf((2, 4, 3), np.dtype(np.float32), pieces)
        found = coded_leaves.opened(("layers_0", "block_0", "attn", "o_proj"), made)
        self.assertEqual(found.layout.activations, wanted)
        read = jax.tree.map(
            lambda part: jnp.asarray(part.read(tuple(slice(0, n) for n in part.shape))),
            found,
        )
        x = rng.normal(size=(5, 2, 4)).astype(np.float32)
        y = products_lib.dot(jnp.asarray(x), read)
        exact = x.reshape(5, 8) @ tensor[ALL].T
        tolerance = 1e-5 if wanted == "same" else 0.02
        np.testing.assert_allclose(y, exact, atol=tolerance * np.abs(exact).max())

    @parameterized.parameters((64, 8), (65, 9), (72, 9), (73, 10))
    def test_a_word_holds_eight_codes(self, width, num_words):
        """And a scale a group of equally many; one a row where groups do not divide."""

        def tensor(dtype, *shape):
            return safetensors_file.Tensor(self.folder / "x", dtype, shape, 0)

        for groups in (1, 8, 0):
            found = {
                "w" + compressed_tensors.PACKED: tensor("I32", 4, num_words),
                "w" + compressed_tensors.SCALE: tensor("F32", 4, groups),
            }
            coding = coded_folder.Coding(is_compressed=True)
            shapes, dtypes = coding.expected({"w": (4, width)}, found)
            divides = groups and width % groups == 0
            self.assertEqual(
                shapes,
                {
                    "w" + compressed_tensors.PACKED: (4, num_words),
                    "w" + compressed_tensors.SHAPE: (2,),
                    "w" + compressed_tensors.SCALE: (4, groups if divides else 1),
                },
            )
            self.assertEqual(dtypes.keys(), shapes.keys())

    @parameterized.parameters("w4a8", "fp8")
    def test_a_device_reads_its_part_of_codes_and_scales(self, scheme):
        """Devices that share experts read later layers of a stack, too."""
        source = loading.find(self.write(scheme))
        config = loading.read_config(source)
        found = quantized_loading._open(source, config)
        num_coded = 0
        for name, stored in found.items():
            opened = coded_leaves.opened(name, stored)
            num_coded += leaf.is_quantized(opened)
            for part in jax.tree.leaves(opened):
                whole = part.read(tuple(slice(0, n) for n in part.shape))
                cut = tuple(slice(n // 2, n) for n in part.shape)
                np.testing.assert_array_equal(
                    part.read(cut), whole[cut], ".".join(name)
                )
        self.assertGreater(num_coded, 5)

    def test_missing_scales_are_named(self):
        folder = self.write("w8a8")
        file = folder / "model.safetensors"
        header = safetensors_file.read_header(file)
        name = next(n for n in header if n.endswith(compressed_tensors.SCALE))
        shutil.move(file, folder / "old.safetensors")
        kept = {n: x for n, x in header.items() if n != name}
        entries = {
            n: (safetensors_file.DTYPES[x.dtype], x.shape) for n, x in kept.items()
        }
        made = safetensors_file.create(file, entries)
        old = safetensors_file.read_header(folder / "old.safetensors")
        for n, tensor in made.items():
            tensor.write(0, old[n][tuple(slice(0, size) for size in tensor.shape)])
        with self.assertRaisesRegex(config_lib.InputError, f"missing: {name}"):
            quantized_loading.load_model(folder)


if __name__ == "__main__":
    environment.main()
