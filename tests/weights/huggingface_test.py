"""Loads folders that transformers wrote (tests/golden), and exports them again."""

import dataclasses
import json
import os
import pathlib
import shutil
from unittest import mock

import jax
import numpy as np
import safetensors
import safetensors.numpy
from absl.testing import parameterized
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.model import rope, transformer
from glm5_jax.weights import (
    huggingface,
    huggingface_config,
    huggingface_export,
    huggingface_names,
    loading,
)
from tests import environment
from tests.model import tiny

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
YARN_CASES = json.loads((GOLDEN / "yarn.json").read_text())
RTOL = 1e-6  # of a power in float32
ATOL = 2e-5  # of logits, as in tests/model/golden_test.py
FOLDERS = (("glm5", "glm5"), ("glm5_2", "glm5_2"))
YARN = config_lib.RopeScaling(
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=4096,
    mscale=0.5,
    truncate=False,
)
MTP_PREFIX = {"glm5": "model.layers.5.", "glm5_2": "model.layers.11."}


def stored_tensors(folder):
    """Returns all tensors of a folder, whatever its files."""
    tensors = {}
    for path in pathlib.Path(folder).glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def load(folder, config=None, **kwargs):
    config = config or huggingface.read_config(folder)
    abstract = transformer.abstract_params(config)
    return huggingface.load_params(folder, config, abstract, **kwargs)


def as_transformers_writes(text):
    """Returns the same JSON indented by two blanks, with a newline at its end."""
    return json.dumps(json.loads(text), indent=2) + "\n"


class FolderCase(parameterized.TestCase):
    """Makes copies of golden folders to damage."""

    def copy(self, name="glm5"):
        """Returns a folder with a golden model's config.json and tensors."""
        folder = pathlib.Path(self.create_tempdir().full_path) / name
        shutil.copytree(GOLDEN / name, folder)
        return folder

    def edit(self, folder, **changes):
        """Rewrites a folder's tensors with some replaced; None drops one."""
        tensors = stored_tensors(folder) | changes
        tensors = {name: value for name, value in tensors.items() if value is not None}
        safetensors.numpy.save_file(tensors, folder / huggingface.SINGLE_FILE)

    def assert_fails(self, folder, *words, **kwargs):
        with self.assertRaises(config_lib.InputError) as caught:
            load(folder, **kwargs)
        for word in words:
            self.assertIn(word, str(caught.exception))


class LoadTest(FolderCase):
    """Compares loaded values with loops over the documented layout."""

    def test_natural_layout_of_every_kind_of_tensor(self):
        stored, params = stored_tensors(GOLDEN / "glm5"), load(GOLDEN / "glm5")
        config = huggingface.read_config(GOLDEN / "glm5")
        layer = "model.layers.3."  # the second of the scanned MoE layers
        block = jax.tree.map(lambda x: np.asarray(x)[1], params["layers_1"]["block_0"])
        attention, indexer, mlp = block["self_attn"], block["indexer"], block["mlp"]
        n, p, o = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
        q_b = stored[layer + "self_attn.q_b_proj.weight"]
        kv_b = stored[layer + "self_attn.kv_b_proj.weight"]
        o_proj = stored[layer + "self_attn.o_proj.weight"]
        wq_b = stored[layer + "self_attn.indexer.wq_b.weight"]
        h, j = config.qk_head_dim, config.index_head_dim
        equal = np.testing.assert_array_equal
        for head in range(n):
            equal(attention["q_b_proj"][:, head], q_b[head * h :][:h].T)
            kv = kv_b[head * (p + o) :][: p + o]
            equal(attention["k_b_proj"][:, head], kv[:p].T)
            equal(attention["v_b_proj"][:, head], kv[p:].T)
            equal(attention["o_proj"][head], o_proj[:, head * o :][:, :o].T)
        for head in range(config.index_n_heads):
            equal(indexer["wq_b"][:, head], wq_b[head * j :][:j].T)
        for e in range(config.n_routed_experts):
            for proj, values in mlp["experts"].items():
                equal(values[e], stored[f"{layer}mlp.experts.{e}.{proj}.weight"].T)
        equal(mlp["gate"], stored[layer + "mlp.gate.weight"].T)
        bias = stored[layer + "mlp.gate.e_score_correction_bias"]
        equal(mlp["e_score_correction_bias"], bias)
        self.assertEqual(bias.dtype, np.float32)
        equal(indexer["k_norm_bias"], stored[layer + "self_attn.indexer.k_norm.bias"])
        equal(params["lm_head"], stored["lm_head.weight"].T)
        equal(params["embed_tokens"], stored["model.embed_tokens.weight"])
        mtp = params["mtp"]
        equal(mtp["eh_proj"], stored["model.layers.5.eh_proj.weight"].T)
        equal(mtp["norm"], stored["model.layers.5.shared_head.norm.weight"])
        gate = stored["model.layers.5.mlp.shared_experts.gate_proj.weight"]
        equal(mtp["block"]["mlp"]["shared_experts"]["gate_proj"], gate.T)

    def test_windows_are_whole_rows_of_the_file(self):
        """The axis of its rows is cut before the others, after layers and experts."""
        config = huggingface.read_config(GOLDEN / "glm5")
        abstract = transformer.abstract_params(config)
        leaves = huggingface.open_params(GOLDEN / "glm5", config, abstract)
        block = ("layers_1", "block_0")
        experts = leaves[*block, "mlp", "experts", "gate_proj"]  # [L, E, D, F] of FD
        self.assertEqual(experts.cuts, (0, 1, 3, 2))
        o_proj = leaves[*block, "self_attn", "o_proj"]  # [L, N, O, D] of D(NO)
        self.assertEqual(o_proj.cuts, (0, 3, 1, 2))

    def test_layer_order_of_index_share(self):
        stored, params = stored_tensors(GOLDEN / "glm5_2"), load(GOLDEN / "glm5_2")
        for repeat in range(2):
            for p in range(4):
                name = f"model.layers.{3 + 4 * repeat + p}.input_layernorm.weight"
                value = params["layers_1"][f"block_{p}"]["input_layernorm"][repeat]
                np.testing.assert_array_equal(value, stored[name])

    def test_dtype(self):
        params = load(GOLDEN / "glm5", dtype="float32")
        kept = load(GOLDEN / "glm5")
        places = {device for x in jax.tree.leaves(kept) for device in x.devices()}
        self.assertEqual(places, {jax.local_devices()[0]})
        self.assertEqual({x.dtype.name for x in jax.tree.leaves(params)}, {"float32"})
        self.assertEqual(kept["lm_head"].dtype.name, "bfloat16")
        half = load(GOLDEN / "glm5", dtype="bfloat16")["layers_1"]["block_0"]["mlp"]
        self.assertEqual(half["gate"].dtype.name, "bfloat16")
        self.assertEqual(half["e_score_correction_bias"].dtype.name, "float32")
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a, b.astype("float32")),
            params,
            kept,
        )

    @parameterized.named_parameters(*FOLDERS)
    def test_sharded_equals_whole(self, name):
        devices = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)

        def sharding(leaf):
            """Cuts the last dims that are divisible, also inside merged dims."""
            sizes, spec = {"x": 4, "y": 2}, [None] * len(leaf.shape)
            for i in reversed(range(len(spec))):
                axis = next((a for a, s in sizes.items() if leaf.shape[i] % s == 0), 0)
                if axis:
                    spec[i] = axis
                    del sizes[axis]
            return NamedSharding(devices, PartitionSpec(*spec))

        config = huggingface.read_config(GOLDEN / name)
        shardings = jax.tree.map(sharding, transformer.abstract_params(config))
        sharded = load(GOLDEN / name, shardings=shardings)
        jax.tree.map(lambda x, s: self.assertEqual(x.sharding, s), sharded, shardings)
        jax.tree.map(np.testing.assert_array_equal, sharded, load(GOLDEN / name))


class SaveTest(FolderCase):
    """Exports parameter trees."""

    @parameterized.parameters(
        (1, [(0, 128), (128, 256), (256, 300)]),  # less than a step: a block of codes
        (2 * 128 * 64 - 1, [(0, 128), (128, 256), (256, 300)]),
        (2 * 128 * 64, [(0, 256), (256, 300)]),
        (10**6, [(0, 300)]),
    )
    def test_rows_are_written_in_windows(self, size, wanted):
        """Rows of 16 weights take 64 bytes in float32."""
        row = huggingface_names.TABLE["model"][0]
        layout = huggingface_names.Layout(row, [(300, 16)])
        with mock.patch.object(leaves_lib, "WINDOW_BYTES", size):
            windows = huggingface_export._row_windows(layout)
            found = [(window.start, window.stop) for window in windows]
        self.assertEqual(found, wanted)

    @parameterized.named_parameters(
        ("glm5", "glm5", 10**9),
        ("glm5_2", "glm5_2", 10**9),
        ("sharded", "glm5", 10**5),
    )
    def test_export_of_an_import_is_byte_identical(self, name, max_shard_bytes):
        folder = pathlib.Path(self.create_tempdir().full_path) / "out"
        config = huggingface.read_config(GOLDEN / name)
        flushed, fsync = set(), os.fsync

        def noted(file):
            flushed.add(os.fstat(file).st_ino)
            fsync(file)

        with mock.patch.object(os, "fsync", noted):
            huggingface_export.save_params(
                load(GOLDEN / name), config, folder, max_shard_bytes=max_shard_bytes
            )
        files = {path.stat().st_ino for path in folder.glob("*.safetensors")}
        self.assertContainsSubset(files, flushed)  # on the disk before their name is
        before, after = stored_tensors(GOLDEN / name), stored_tensors(folder)
        self.assertEqual(set(before), set(after))
        for key, value in before.items():
            self.assertEqual(value.dtype, after[key].dtype, key)
            self.assertEqual(value.shape, after[key].shape, key)
            self.assertEqual(value.tobytes(), after[key].tobytes(), key)
        self.assertEqual(huggingface.read_config(folder), config)
        if max_shard_bytes < 10**9:
            self.assert_is_index_of(folder, after, max_shard_bytes)
        else:
            self.assertFalse((folder / huggingface.INDEX_FILE).exists())
        jax.tree.map(np.testing.assert_array_equal, load(folder), load(GOLDEN / name))

    def test_files_hold_up_to_five_gigabytes(self):
        """As transformers' do; files without content take no room."""
        half = 2_500_000_000
        plans = [
            huggingface_export._Plan(None, {f"x{i}": (np.dtype(np.uint8), [size])})
            for i, size in enumerate((half, half, 1, half, half - 1))
        ]
        folder = pathlib.Path(self.create_tempdir().full_path)
        limit = huggingface_export.MAX_SHARD_BYTES
        huggingface_export._create_files(folder, plans, limit)
        index = json.loads((folder / huggingface.INDEX_FILE).read_text())
        self.assertEqual(index["metadata"]["total_size"], 4 * half)
        files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        wanted = {f"x{i}": files[i > 1] for i in range(5)}
        self.assertEqual(index["weight_map"], wanted)
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        self.assertEqual(found, files)

    def assert_is_index_of(self, folder, tensors, max_bytes):
        """Checks that the index names every tensor of files of at most that size."""
        text = (folder / huggingface.INDEX_FILE).read_text()
        self.assertEqual(text, as_transformers_writes(text))
        index = json.loads(text)
        sizes = {name: value.nbytes for name, value in tensors.items()}
        self.assertEqual(index["metadata"]["total_size"], sum(sizes.values()))
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        last = f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
        self.assertEqual(files[-1], last)
        self.assertGreater(len(files), sum(sizes.values()) // max_bytes)
        self.assertEqual(sorted({*index["weight_map"].values()}), files)
        for file in files:
            names = {n for n, where in index["weight_map"].items() if where == file}
            self.assertEqual(set(safetensors.numpy.load_file(folder / file)), names)
            self.assertLessEqual(sum(sizes[name] for name in names), max_bytes)

    def test_cast(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "out"
        config = huggingface.read_config(GOLDEN / "glm5")
        params = load(GOLDEN / "glm5", dtype="float32")
        huggingface_export.save_params(params, config, folder, dtype="bfloat16")
        before = stored_tensors(GOLDEN / "glm5")
        for key, value in stored_tensors(folder).items():
            self.assertEqual(value.tobytes(), before[key].tobytes(), key)
        self.assertEqual(
            json.loads((folder / "config.json").read_text())["dtype"], "bfloat16"
        )

    def test_never_overwrites(self):
        folder = self.copy()
        with self.assertRaisesRegex(config_lib.InputError, "exists"):
            huggingface_export.save_params({}, config_lib.ModelConfig(), folder)

    def test_other_attention_has_no_such_folder(self):
        """transformers would compute MLA, or not find its weights."""
        config = tiny.variants()
        message = "layer_types .*latent_sliding.* has no Hugging Face form"
        folder = pathlib.Path(self.create_tempdir().full_path) / "out"
        with self.assertRaisesRegex(config_lib.InputError, message):
            huggingface_export.save_params(tiny.params(config), config, folder)
        with self.assertRaisesRegex(config_lib.InputError, message):
            huggingface.write_config(config, folder)
        self.assertFalse(folder.exists())

    def test_an_indexer_in_8_bits_is_not_forgotten_in_silence(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        config = tiny.model(index_dtype="fp8")
        with self.assertLogs("absl", "WARNING") as logs:
            huggingface.write_config(config, folder)
        self.assertIn("config.json cannot say index_dtype=fp8", logs.output[0])
        self.assertNotIn("index_dtype", (folder / "config.json").read_text())

    def test_dense_attention_is_not_forgotten_in_silence(self):
        for attention in ("dense", "dense_with_indexer_loss"):
            folder = pathlib.Path(self.create_tempdir().full_path)
            with self.assertLogs("absl", "WARNING") as logs:
                huggingface.write_config(tiny.model(attention=attention), folder)
            self.assertIn(f"cannot say attention={attention}", logs.output[0])
            self.assertIn("give --config.model.attention=dense", logs.output[0])
            self.assertEqual(huggingface.read_config(folder).attention, "sparse")

    def test_several_modules_of_drafts_have_no_such_folder(self):
        for num_modules in (0, 1):
            config = tiny.model(num_nextn_predict_layers=num_modules)
            huggingface_config.require_writable(config)
            self.assertNotEmpty(
                huggingface_names.tensor_slots(
                    config, leaves_lib.flatten(transformer.abstract_params(config))[0]
                )
            )
        config = tiny.model(num_nextn_predict_layers=2)
        for refuse in (
            lambda: huggingface_config.require_writable(config),
            lambda: huggingface_names.tensor_slots(config, {}),
        ):
            with self.assertRaisesRegex(config_lib.InputError, "no Hugging Face form"):
                refuse()

    def test_a_failure_leaves_nothing(self):
        parent = pathlib.Path(self.create_tempdir().full_path)
        config = huggingface.read_config(GOLDEN / "glm5")
        params = load(GOLDEN / "glm5")
        params["lm_head"].delete()
        with self.assertRaises(RuntimeError):
            huggingface_export.save_params(params, config, parent / "out")
        self.assertEmpty(list(parent.iterdir()))


class ErrorTest(FolderCase):
    """Checks that a message names every fault and the remedy."""

    def test_no_mtp(self):
        folder = self.copy()
        names = [n for n in stored_tensors(folder) if n.startswith(MTP_PREFIX["glm5"])]
        self.edit(folder, **dict.fromkeys(names))
        words = (names[0], "num_nextn_predict_layers=0")
        self.assert_fails(folder, *words)
        config = huggingface.read_config(folder)
        config = dataclasses.replace(config, num_nextn_predict_layers=0)
        self.assertNotIn("mtp", load(folder, config))

    def test_a_folder_without_mtp_is_read_without_it(self):
        """As transformers writes folders: the layer is in config.json alone."""
        folder = self.copy()
        names = [n for n in stored_tensors(folder) if n.startswith(MTP_PREFIX["glm5"])]
        self.edit(folder, **dict.fromkeys(names))
        with self.assertLogs("absl", "WARNING") as logs:
            config, params, _ = loading.load_model(folder)
        self.assertIn("has no tensors of the MTP layer", logs.output[0])
        self.assertEqual(config.num_nextn_predict_layers, 0)
        self.assertNotIn("mtp", params)
        with self.assertRaisesRegex(config_lib.InputError, "has no MTP layer"):
            loading.load_model(folder, [("model.num_nextn_predict_layers", "1")])

    def test_a_tensor_in_two_files(self):
        """The index says which of them counts."""
        folder = self.copy()
        stored, name = stored_tensors(folder), "model.norm.weight"
        (folder / huggingface.SINGLE_FILE).unlink()
        first, other = (
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        )
        safetensors.numpy.save_file(stored, folder / first)
        safetensors.numpy.save_file({name: stored[name] + 1}, folder / other)
        for file, shift in ((first, 0), (other, 1)):
            files = dict.fromkeys(stored, first) | {name: file}
            text = json.dumps({"weight_map": files})
            (folder / huggingface.INDEX_FILE).write_text(text)
            np.testing.assert_array_equal(load(folder)["norm"], stored[name] + shift)

    def test_mtp_left_out(self):
        """Skips MTP in a single file, and in a folder without MTP's own files."""
        config = huggingface.read_config(GOLDEN / "glm5")
        without = dataclasses.replace(config, num_nextn_predict_layers=0)
        whole = load(GOLDEN / "glm5")
        del whole["mtp"]
        params = load(GOLDEN / "glm5", without)
        jax.tree.map(np.testing.assert_array_equal, params, whole)
        folder = pathlib.Path(self.create_tempdir().full_path) / "out"
        huggingface_export.save_params(
            load(GOLDEN / "glm5"), config, folder, max_shard_bytes=10**4
        )
        index = json.loads((folder / huggingface.INDEX_FILE).read_text())["weight_map"]
        names = [n for n in index if n.startswith(MTP_PREFIX["glm5"])]
        rest = {index[name] for name in index if name not in names}
        for file in {index[name] for name in names} - rest:
            (folder / file).unlink()
        self.assert_fails(folder, "download")
        params = load(folder, without)
        jax.tree.map(np.testing.assert_array_equal, params, whole)
        shallow = dataclasses.replace(without, num_hidden_layers=4)
        self.assert_fails(GOLDEN / "glm5", "unexpected: model.layers.4", config=shallow)

    def test_copies_in_the_mtp_layer(self):
        folder = self.copy()
        stored = stored_tensors(folder)
        copies = {
            "embed_tokens.weight": stored["model.embed_tokens.weight"],
            "shared_head.head.weight": stored["lm_head.weight"],
        }
        copies = {MTP_PREFIX["glm5"] + k: v.copy() for k, v in copies.items()}
        self.edit(folder, **copies)
        want = load(GOLDEN / "glm5")
        jax.tree.map(np.testing.assert_array_equal, load(folder), want)
        name = MTP_PREFIX["glm5"] + "shared_head.head.weight"
        copies[name][79, 63] += 1
        self.edit(folder, **copies)
        self.assert_fails(folder, name, "lm_head.weight", "predict_layers=0")

    def test_shared_experts_of_width_0(self):
        folder = self.copy()
        names = [n for n in stored_tensors(folder) if ".shared_experts." in n]
        nothing = np.zeros((0, 64), np.float32)
        self.edit(folder, **dict.fromkeys(names, nothing))
        config = huggingface.read_config(folder)
        config = dataclasses.replace(config, n_shared_experts=0)
        mlp = load(folder, config)["layers_1"]["block_0"]["mlp"]
        self.assertNotIn("shared_experts", mlp)

    def test_fp8_without_its_settings(self):
        folder = self.copy()
        name = "model.layers.1.self_attn.o_proj.weight"
        self.edit(
            folder, **{name: stored_tensors(folder)[name].astype("float8_e4m3fn")}
        )
        self.assert_fails(folder, name, "quantization_config", "FP8 release")

    def test_other_codes_than_those_of_known_releases(self):
        folder = self.copy()
        config = huggingface.read_config(folder)
        settings = {"quantization_config": {"quant_method": "gptq"}}
        (folder / "config.json").write_text(json.dumps(settings))
        self.assert_fails(folder, "config.json: quantization_config", config=config)
        (folder / "config.json").unlink()  # tensors need none
        load(folder, config)

    def test_what_a_folder_without_tensors_lacks_is_no_mtp_layer(self):
        folder = self.copy()
        (folder / huggingface.SINGLE_FILE).unlink()
        self.assertTrue(loading.read_config(loading.find(folder)).has_mtp)

    def test_all_faults_at_once(self):
        folder = self.copy()
        changes = {
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.9.surprise": np.zeros(3, np.float32),
            "model.norm.weight": np.zeros(63, np.float32),
            "lm_head.weight": np.zeros((80, 64), np.int8),
        }
        self.edit(folder, **changes)
        self.assert_fails(folder, *changes, "[63] instead of [64]", "I8", "config.json")

    def test_only_so_many_names_are_listed(self):
        folder = self.copy()
        one = np.zeros(1, np.float32)
        names = [f"model.surprise.{i:03}" for i in range(101)]
        self.edit(folder, **dict.fromkeys(names[:100], one))
        with self.assertRaises(config_lib.InputError) as caught:
            load(folder)
        self.assertIn(f"{names[99]}.\n", str(caught.exception))
        self.edit(folder, **{names[100]: one})
        self.assert_fails(folder, f"{names[99]} and 1 more.")

    def test_truncated(self):
        folder = self.copy()
        path = folder / huggingface.SINGLE_FILE
        for size in (path.stat().st_size - 1, 1000, 3, 0):
            path.write_bytes((GOLDEN / "glm5" / path.name).read_bytes()[:size])
            self.assert_fails(folder, path.name, "download")

    def test_missing_file_of_an_index(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "out"
        config = huggingface.read_config(GOLDEN / "glm5")
        huggingface_export.save_params(
            load(GOLDEN / "glm5"), config, folder, max_shard_bytes=10**5
        )
        file = sorted(folder.glob("*.safetensors"))[2]
        file.unlink()
        self.assert_fails(folder, file.name, "download")

    @parameterized.parameters("../x.safetensors", "/x.safetensors", "x.bin", "a b", 3)
    def test_index_with_a_foreign_path(self, file):
        folder = self.copy()
        (folder / huggingface.SINGLE_FILE).unlink()
        index = {"weight_map": {"lm_head.weight": file}}
        (folder / huggingface.INDEX_FILE).write_text(json.dumps(index))
        self.assert_fails(folder, "do not trust", str(file))

    @parameterized.parameters("", "[]", '{"weight_map": 3}')
    def test_broken_index(self, text):
        folder = self.copy()
        (folder / huggingface.SINGLE_FILE).unlink()
        self.assert_fails(folder, "neither")
        (folder / huggingface.INDEX_FILE).write_text(text)
        self.assert_fails(folder, huggingface.INDEX_FILE, "download")


class ConfigTest(FolderCase):
    """Reads config.json into ModelConfig, and writes it."""

    def test_golden(self):
        config = huggingface.read_config(GOLDEN / "glm5_2")
        self.assertEqual(config.rope_theta, 8e6)
        self.assertEqual(config.latent_norm_eps, 1e-6)
        self.assertEqual(config.rms_norm_eps, 1e-5)
        self.assertEqual(config.index_topk_freq, 4)
        self.assertIsNone(config.index_topk_pattern)
        self.assertEqual(config.eos_token_id, (79,))
        self.assertEqual(config.first_k_dense_replace, 3)

    @parameterized.named_parameters(
        ("glm5", presets.GLM5),
        ("glm5_2", dataclasses.replace(presets.GLM5_2, mtp_num_steps=3)),
        ("yarn", dataclasses.replace(presets.GLM5, rope_scaling=YARN)),
        (
            "no_end",
            dataclasses.replace(presets.GLM5, eos_token_id=(), pad_token_id=None),
        ),
        (
            "pattern",
            config_lib.ModelConfig(num_hidden_layers=4, index_topk_pattern="FSSF"),
        ),
    )
    def test_round_trip(self, config):
        folder = pathlib.Path(self.create_tempdir().full_path) / "new" / "model"
        huggingface.write_config(config, folder)
        self.assertEqual(huggingface.read_config(folder), config)
        text = (folder / "config.json").read_text()
        self.assertEqual(text, as_transformers_writes(text))
        with self.assertRaisesRegex(config_lib.InputError, "exists"):
            huggingface.write_config(config, folder)

    def changed(self, **changes):
        """Reads a golden config.json with some keys replaced; None drops one."""
        folder = pathlib.Path(self.create_tempdir().full_path)
        values = json.loads((GOLDEN / "glm5" / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(values))
        return huggingface.read_config(folder)

    def test_other_spellings(self):
        config = self.changed(rope_parameters=None, rope_theta=5e5, eos_token_id=7)
        self.assertEqual((config.rope_theta, config.eos_token_id), (5e5, (7,)))
        # As GlmMoeDsaConfig of transformers 5.23.0 reads them.
        plain = config.rope_scaling
        self.assertEqual(plain.rope_type, "default")
        for given, theta in (({}, 1e4), ({"rope_theta": 5e5}, 5e5)):
            config = self.changed(rope_parameters={}, **given)
            self.assertEqual((config.rope_theta, config.rope_scaling), (theta, plain))
        types = ["full", "shared", "full", "full", "shared"]
        self.assertEqual(self.changed(indexer_types=types).index_topk_pattern, "FSFFS")
        config = self.changed(indexer_types=None, index_topk_pattern=types)
        self.assertEqual(config.index_topk_pattern, "FSFFS")
        config = self.changed(indexer_types=None, index_topk_pattern="FSFFS")
        self.assertEqual(config.index_topk_pattern, "FSFFS")
        types = ["full"] * 5 + ["shared"] * 2  # of as many layers as there are
        self.assertIsNone(self.changed(indexer_types=types).index_topk_pattern)
        for types in (["full_attention"] * 5, "full_attention"):
            self.assertEqual(self.changed(layer_types=types), self.changed())
        types = ["dense"] + ["sparse"] * 4
        config = self.changed(mlp_layer_types=types)
        self.assertEqual(config.first_k_dense_replace, 1)
        self.assertEqual(self.changed(latent_norm_eps=1e-5).latent_norm_eps, 1e-5)

    def test_yarn_turns_as_often_as_in_transformers(self):
        """Where a config.json does not say from how many turns on it changes a pair."""
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
        scaling = self.changed(rope_parameters=yarn).rope_scaling
        self.assertEqual((scaling.beta_fast, scaling.beta_slow), (32, 1))
        scaling = self.changed(rope_parameters=yarn | {"beta_fast": 9}).rope_scaling
        self.assertEqual((scaling.beta_fast, scaling.beta_slow), (9, 1))

    @parameterized.parameters((64, 4.0), (1, 256.0), (512, 1.0))
    def test_yarn_without_a_factor_reaches_the_longest_context(self, context, factor):
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None}
        yarn |= {"original_max_position_embeddings": context}
        config = self.changed(rope_parameters=yarn, max_position_embeddings=256)
        self.assertEqual(config.rope_scaling.factor, factor)

    def test_ids_outside_the_vocabulary_are_refused(self):
        message = r"config.json: {} must lie in 0..511 .*got {};"
        for name, ids, got in (
            ("eos_token_id", [0, 512, 900], "512, 900"),
            ("eos_token_id", -1, "-1"),
            ("pad_token_id", 512, "512"),
        ):
            with self.assertRaisesRegex(
                config_lib.InputError, message.format(name, got)
            ):
                self.changed(**{"vocab_size": 512, "eos_token_id": 0, name: ids})

    def test_defaults_of_transformers(self):
        """The values are those of GlmMoeDsaConfig 5.23.0 for the same config.json."""
        config = self.changed(rope_parameters=None, index_skip_topk_offset=0)
        self.assertEqual((config.rope_theta, config.index_topk_pattern), (1e4, None))
        config = self.changed(eos_token_id=None, pad_token_id=None)
        self.assertEqual((config.eos_token_id, config.pad_token_id), ((), None))
        config = self.changed(num_experts=16, num_local_experts=4, index_topk_freq=0)
        self.assertEqual((config.n_routed_experts, config.index_topk_freq), (4, 1))
        config = self.changed(mlp_layer_types=None, first_k_dense_replace=9)
        self.assertEqual(config.first_k_dense_replace, 5)
        self.changed(n_group=4, topk_group=4)  # all groups are chosen
        values = json.loads((GOLDEN / "glm5" / "config.json").read_text())
        for name in ("eos_token_id", "pad_token_id", "num_nextn_predict_layers"):
            values.pop(name, None)
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "config.json").write_text(json.dumps(values))
        config = huggingface.read_config(folder)
        self.assertEqual((config.eos_token_id, config.pad_token_id), ((1,), None))
        self.assertFalse(config.has_mtp)

    def test_warns_of_unknown_keys(self):
        with self.assertLogs(level="WARNING") as logged:
            self.changed(attention_sinks=4, transformers_version="6")
        self.assertIn("not know: attention_sinks.", logged.output[0])

    def test_deep_json(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        (folder / "config.json").write_text("[" * 100_000)
        with self.assertRaisesRegex(config_lib.InputError, "too deeply"):
            huggingface.read_config(folder)

    def test_writes_no_key_of_ours(self):
        """A field that ModelConfig gains must be put into one of the sets."""
        config = dataclasses.replace(
            presets.GLM5_2, expert_transport="exchange", expert_chunks=4
        )
        folder = pathlib.Path(self.create_tempdir().full_path)
        ours = {"expert_chunks": 2, "mtp_num_steps": 9, "batch_invariant": True}
        huggingface.write_config(config, folder, ours | {"kept": 1})
        written = json.loads((folder / "config.json").read_text())
        of_transformers = json.loads((GOLDEN / "glm5" / "config.json").read_text())
        of_zai = {  # GLM-5's and GLM-5.2's config.json have these besides
            *("index_share_for_mtp_iteration", "index_skip_topk_offset"),
            *("index_topk_freq", "index_topk_pattern", "indexer_rope_interleave"),
            *("moe_layer_freq", "rope_interleave", "scoring_func", "topk_method"),
        }
        self.assertEmpty(set(written) - set(of_transformers) - of_zai - {"kept"})
        only = {  # as in the releases of GLM-5
            **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu"},
            **{"indexer_rope_interleave": True, "rope_interleave": True},
            **{"moe_layer_freq": 1, "n_group": 1, "topk_group": 1},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
            **{"tie_word_embeddings": False},
        }
        self.assertEqual(written, written | only)
        (folder / "config.json").unlink()
        huggingface.write_config(config, folder)
        text = json.dumps(written | ours | {"expert_transport": "exchange"})
        (folder / "config.json").write_text(text)
        read = huggingface.read_config(folder)
        self.assertEqual((read.expert_transport, read.expert_chunks), ("gather", 1))
        self.assertIsNone(read.batch_invariant)

    def test_an_unusual_latent_eps_survives_a_round_trip(self):
        folder = self.create_tempdir().full_path
        config = dataclasses.replace(presets.GLM5, latent_norm_eps=1e-5)
        with self.assertLogs(level="WARNING") as logged:
            huggingface.write_config(config, folder)
        self.assertIn("latent_norm_eps=1e-05", logged.output[0])
        self.assertEqual(huggingface.read_config(folder).latent_norm_eps, 1e-5)

    @parameterized.named_parameters(
        ("other_model", {"model_type": "llama"}, "glm_moe_dsa"),
        ("groups", {"n_group": 8, "hidden_act": "gelu"}, "hidden_act.*n_group"),
        ("gqa", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("yarn", {"rope_parameters": {"rope_type": "yarn"}}, "yarn"),
        (
            "old_yarn",
            {"rope_parameters": None, "rope_scaling": {"type": "yarn"}},
            "yarn",
        ),
        ("linear", {"rope_scaling": {"type": "linear", "factor": 2}}, "'linear'"),
        ("by_layer", {"rope_parameters": {"x": {"rope_type": "default"}}}, "'x'"),
        ("rope_list", {"rope_parameters": [1]}, "must be an object"),
        ("rope_text", {"rope_scaling": "yarn"}, "must be an object"),
        ("rope_number", {"rope_parameters": {"rope_theta": None}}, "rope_theta must"),
        ("clamp", {"swiglu_limit": 10.0}, "swiglu_limit is 10.0"),
        ("sliding", {"sliding_window": 128}, "sliding_window is 128"),
        ("window", {"layer_types": ["sliding_attention"]}, "layer_types"),
        (
            "first_shared",
            {"index_topk_freq": 2, "index_skip_topk_offset": 0}
            | {"indexer_types": None},
            "first layer",
        ),
        ("huge", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta must"),
        ("fp8", {"quantization_config": {"quant_method": "fp8"}}, "BF16"),
        ("mixed", {"mlp_layer_types": ["sparse"] * 4 + ["dense"]}, "mlp_layer_types"),
        ("few", {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types must list 5"),
        ("no_list", {"mlp_layer_types": "dense"}, "mlp_layer_types must list 5"),
        ("dense_text", {"first_k_dense_replace": "1"}, "_replace must be an integer"),
        ("layers_text", {"num_hidden_layers": "5"}, "_layers must be an integer"),
        ("drafts", {"num_nextn_predict_layers": 2}, "several MTP modules"),
        (
            "no_context",
            {
                "rope_parameters": {"rope_type": "yarn", "factor": None}
                | {"original_max_position_embeddings": 0}
            },
            "original_max_position_embeddings",
        ),
        (
            "context_text",
            {
                "rope_parameters": {"rope_type": "yarn", "factor": None}
                | {"original_max_position_embeddings": "8"}
            },
            "original_max_position_embeddings must be",
        ),
        ("index", {"indexer_types": ["full"] * 4 + ["half"]}, "index_topk_pattern"),
        ("type", {"hidden_size": "64"}, "hidden_size must be an integer"),
        ("value", {"hidden_size": 0}, "hidden_size"),
    )
    def test_refuses(self, changes, words):
        with self.assertRaisesRegex(config_lib.InputError, words):
            self.changed(**changes)

    def test_no_folder(self):
        with self.assertRaisesRegex(config_lib.InputError, "nowhere"):
            huggingface.read_config("nowhere")


class RopeScalingTest(FolderCase):
    """Reads rope_scaling and rope_parameters as transformers does."""

    @parameterized.named_parameters(*((case["name"], case) for case in YARN_CASES))
    def test_frequencies_and_factors(self, case):
        folder = self.changed(case)
        config = huggingface.read_config(folder)
        self.assertEqual(config.rope_theta, case["rope_theta"])
        self.assertAlmostEqual(config.softmax_scale, case["softmax_scale"], places=12)
        factor = config.rope_scaling.rotation_factor
        self.assertAlmostEqual(factor, case["table_factor"], places=12)
        got = rope.frequencies(config)
        np.testing.assert_allclose(got, case["frequencies"], rtol=RTOL)
        back = pathlib.Path(self.create_tempdir().full_path)
        given = json.loads((folder / "config.json").read_text())
        huggingface.write_config(config, back, given)
        again = huggingface.read_config(back)
        np.testing.assert_array_equal(rope.frequencies(again), got)
        self.assertEqual(again.softmax_scale, config.softmax_scale)

    @parameterized.named_parameters(
        *((case["name"], case) for case in YARN_CASES if "logits" in case)
    )
    def test_logits(self, case):
        folder = self.changed(case)
        config = huggingface.read_config(folder)
        config = dataclasses.replace(config, dtype="float32")
        params = load(folder, config, dtype="float32")
        with np.load(GOLDEN / "glm5" / "reference.npz") as reference:
            ids = reference["input_ids"][:1].astype(np.int32)
        out = jax.jit(transformer.forward, static_argnums=1)(params, config, ids)
        logits = transformer.logits(params, config, out.hidden[:, ::8])
        np.testing.assert_allclose(logits[0], case["logits"], rtol=0, atol=ATOL)

    def changed(self, case):
        """Returns a copy of the golden folder with the case's keys."""
        folder = self.copy()
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | case["changes"]))
        return folder


class ReleasedModelsTest(parameterized.TestCase):
    """Compares names and sizes with the published checkpoints of zai-org."""

    @parameterized.named_parameters(
        ("glm5", presets.GLM5, 59_870, 753_864_139_008, 1_507_728_316_928),
        ("glm5_2", presets.GLM5_2, 59_585, 753_329_940_480, 1_506_659_919_872),
    )
    def test_names_and_sizes(self, config, tensors, params, num_bytes):
        """The published index files have these counts; 2 bytes a value, 4 a bias."""
        flat = jax.tree_util.tree_flatten_with_path(transformer.abstract_params(config))
        leaves = {tuple(key.key for key in path): leaf for path, leaf in flat[0]}
        slots = huggingface_names.tensor_slots(config, leaves)
        self.assertLen({slot.name for slot in slots}, tensors)
        sizes = {slot.name: int(np.prod(slot.layout.shape)) for slot in slots}
        self.assertEqual(sum(sizes.values()), params)
        biases = sum(n for k, n in sizes.items() if k.endswith("correction_bias"))
        self.assertEqual(2 * sum(sizes.values()) + 2 * biases, num_bytes)
        shapes = {slot.name: slot.layout.shape for slot in slots}
        layer = "model.layers.78.self_attn."
        self.assertEqual(shapes[layer + "kv_b_proj.weight"], [28672, 512])
        self.assertEqual(shapes[layer + "kv_a_proj_with_mqa.weight"], [576, 6144])
        self.assertEqual(shapes["model.layers.78.eh_proj.weight"], [6144, 12288])

    @parameterized.named_parameters(
        ("glm5", presets.GLM5, 119_028, 756_162_687_872),
        ("glm5_2", presets.GLM5_2, 118_629, 755_617_140_416),
    )
    def test_fp8_names_and_sizes(self, config, tensors, num_bytes):
        """GLM-5.2-FP8 has this count; GLM-5 has 57 more indexers of 5 + 2 tensors."""
        abstract, _ = leaves_lib.flatten(transformer.abstract_params(config))
        leaves = {
            path: huggingface.StoredLeaf(leaf.shape, np.dtype(leaf.dtype), {})
            for path, leaf in abstract.items()
        }
        slots = huggingface_names.tensor_slots(config, leaves)
        plans = [huggingface_export._plan(slot, leaves, "fp8") for slot in slots]
        self.assertEqual(sum(plan.size for plan in plans), num_bytes)
        entries = {k: entry for plan in plans for k, entry in plan.entries.items()}
        self.assertLen(entries, tensors)
        name = "model.layers.78.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
        self.assertEqual(entries[name], (np.dtype(np.float32), [5, 48]))  # ragged


if __name__ == "__main__":
    environment.main()
