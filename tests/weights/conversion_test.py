"""Converts whole models from one kind of folder to the other, in windows."""

import contextlib
import io
import json
import pathlib
import re
import resource
import runpy
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from absl.testing import parameterized

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.checkpoint import manager, stored
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.model import transformer
from glm5_jax.weights import (
    companions,
    conversion,
    huggingface,
    huggingface_export,
    loading,
    quantized_loading,
)
from tests import environment, forked
from tests.model import tiny
from tests.weights import fp8_folder

ROOT = pathlib.Path(__file__).parent.parent.parent
STREAM = str(ROOT / "benchmarks" / "convert_stream.py")
GOLDEN = ROOT / "tests" / "golden" / "glm5"
# Most matrices have several blocks of 128 in both dims, the last one partial.
WIDE = tiny.model(
    hidden_size=160,
    intermediate_size=200,
    q_lora_rank=140,
    num_hidden_layers=2,
    n_routed_experts=4,
)

# CPU time a tensor with 4.2 times the tensors; a quadratic cost would be 4 times.
FLAT = 2.0
SMALL_FILE = 2**14  # bytes, fewer than most matrices have
SMALL_WINDOW = 2**15  # bytes: most matrices are cut, some of them between heads


class ConversionCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)

    def write(self, name, config=WIDE, dtype=None, **kwargs):
        """Writes a Hugging Face folder of random weights."""
        folder = self.folder / name
        params = tiny.params(config)
        huggingface_export.save_params(params, config, folder, dtype, **kwargs)
        return folder

    def assert_same_bytes(self, one, other):
        before, after = map(fp8_folder.stored_tensors, (one, other))
        self.assertEqual(set(before), set(after))
        for name, value in before.items():
            self.assertEqual(value.dtype, after[name].dtype, name)
            self.assertEqual(value.tobytes(), after[name].tobytes(), name)


class WindowsTest(ConversionCase):
    """Uses small windows, so that every branch of the code is taken."""

    def setUp(self):
        super().setUp()
        names = ((leaves_lib, "WINDOW_BYTES"), (stored, "_CHUNK_BYTES"))
        for module, name in names:
            self.enter_context(mock.patch.object(module, name, SMALL_WINDOW))

    @parameterized.parameters("bfloat16", "float32", "fp8")
    def test_there_and_back_is_the_same_bytes(self, dtype):
        kind = "float32" if dtype == "fp8" else dtype
        source = self.write("source", dtype=dtype, max_shard_bytes=200_000)
        self.assertGreater(len(list(source.glob("*.safetensors"))), 2)
        run, back = self.folder / "run", self.folder / "back"
        conversion.convert(source, run, dtype="float32" if dtype == "fp8" else None)
        conversion.convert(run, back, dtype=dtype)
        self.assert_same_bytes(source, back)
        self.assertEqual(loading.load_model(run)[0].param_dtype, kind)

    def test_orbax_restores_arrays_written_in_windows(self):
        """Reads with the manager, on one and on several devices."""
        params = tiny.params(WIDE)
        params["layers_1"]["block_0"]["mlp"]["e_score_correction_bias"] *= 0
        source, run = self.folder / "source", self.folder / "run"
        huggingface_export.save_params(params, WIDE, source)
        conversion.convert(source, run)
        abstract = transformer.abstract_params(WIDE)
        jax.tree.map(
            np.testing.assert_array_equal, manager.restore_params(run, abstract), params
        )
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None))
        sharded = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            abstract,
        )
        jax.tree.map(
            np.testing.assert_array_equal, manager.restore_params(run, sharded), params
        )

    def test_a_flipped_bit_of_a_run_is_noticed(self):
        source, run = self.write("source"), self.folder / "run"
        conversion.convert(source, run)
        file = max(run.rglob("params.lm_head/*"), key=lambda path: path.stat().st_size)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        for read in (
            lambda: conversion.convert(run, self.folder / "back"),
            lambda: quantized_loading.load_model(run, scheme="int8"),
        ):
            message = "lm_head.*other content"
            with self.assertRaisesRegex(config_lib.DamagedError, message):
                read()
        self.assertFalse((self.folder / "back").exists())
        with self.subTest("but after the config, which costs nothing to read"):
            types = [("model.layer_types", "('latent', 'latent_sliding')")]
            message = "no Hugging Face form"
            with self.assertRaisesRegex(config_lib.InputError, message):
                conversion.convert(run, self.folder / "back", overrides=types)

    @parameterized.parameters(1, 8)
    def test_exports_a_step_that_training_saved(self, num_devices):
        """The step is OCDBT, has chunks of shards, and holds more than parameters."""
        mesh = jax.make_mesh(
            (num_devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)
        )

        def put(leaf):
            axes = [i for i, n in enumerate(leaf.shape) if n % num_devices == 0]
            spec = ["x" if axes and i == axes[-1] else None for i in range(leaf.ndim)]
            spec = jax.sharding.PartitionSpec(*spec)
            return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

        params = jax.tree.map(put, tiny.params(WIDE))
        run = self.folder / "run"
        checkpoints = manager.CheckpointManager(run, keep=2)
        checkpoints.save(7, {"params": params, "step": jnp.int32(7)}, {})
        checkpoints.close()
        settings = {"model": command_line.to_json_dict(WIDE)}
        (run / "config.json").write_text(json.dumps(settings))
        self.assertEqual(conversion.convert(run, self.folder / "out"), "hf")
        self.assert_same_bytes(self.write("expected"), self.folder / "out")

    @parameterized.parameters("hf", "orbax")
    def test_layers_share_indexers_after_a_conversion(self, between):
        """From a folder, or from a run; the export is GLM-5.2's, without indexers."""
        overrides, full = [("model.index_topk_pattern", "FSFFS")], self.folder / "full"
        conversion.convert(GOLDEN, full, to=between)
        target = self.folder / "shared"
        conversion.convert(full, target, to="hf", overrides=overrides)
        before, after = map(fp8_folder.stored_tensors, (GOLDEN, target))
        gone = {name for name in before if ".indexer." in name}
        gone = {name for name in gone if re.search(r"layers\.[14]\.", name)}
        self.assertLen(gone, 2 * 5)
        self.assertEqual(set(after), set(before) - gone)
        for name, value in after.items():
            self.assertEqual(value.tobytes(), before[name].tobytes(), name)
        settings = json.loads((target / "config.json").read_text())
        kinds = {"F": "full", "S": "shared"}
        self.assertEqual(settings["indexer_types"], [kinds[x] for x in "FSFFS"])
        self.assertEqual(
            loading.load_model(target)[0].is_full_index_layer,
            tuple(letter == "F" for letter in "FSFFS"),
        )

    def test_fp8_to_bfloat16_and_to_fp8(self):
        source = self.write("source", dtype="fp8")
        copy, run = self.folder / "copy", self.folder / "run"
        conversion.convert(source, copy, "hf")
        self.assert_same_bytes(source, copy)
        conversion.convert(source, run)
        config, params, _ = loading.load_model(run)
        self.assertEqual(config.param_dtype, "bfloat16")
        expected = self.folder / "expected"
        fp8_folder.write_products(source, expected, "bfloat16")
        jax.tree.map(
            np.testing.assert_array_equal, params, loading.load_model(expected)[1]
        )
        # As the folder itself does when it is used directly.
        jax.tree.map(
            np.testing.assert_array_equal, params, loading.load_model(source)[1]
        )


class FolderTest(ConversionCase):
    """Checks the files beside the weights, and that failures leave no folder."""

    def test_text_files_and_unknown_keys_survive(self):
        source = self.write("source")
        texts = {name: f'"{name}"' for name in companions.TEXT_FILES}
        del texts["tokenizer.json"]  # must be one
        for name, text in texts.items():
            (source / name).write_text(text)
        settings = json.loads((source / "config.json").read_text())
        others = {"ep_size": 1, "pretraining_tp": 1, "a_new_key": {"b": [None]}}
        old = {"torch_dtype": "float16", "rope_scaling": None}
        (source / "config.json").write_text(json.dumps(settings | others | old))
        run, back = self.folder / "run", self.folder / "back"
        conversion.convert(source, run, dtype="bfloat16")
        conversion.convert(run, back)
        for name, text in texts.items():
            self.assertEqual((back / name).read_text(), text)
        found = json.loads((back / "config.json").read_text())
        self.assertEqual(found, settings | others | {"dtype": "bfloat16"})
        originals = run / companions.ORIGINAL_CONFIG
        for file in (run / "config.json", originals, back / "config.json"):
            text = file.read_text()
            self.assertEqual(text, json.dumps(json.loads(text), indent=2) + "\n")

    def test_a_run_that_no_step_was_made_for_begins_at_0(self):
        """Whatever the folder is called."""
        conversion.convert(self.write("12"), self.folder / "run")
        (step,) = (self.folder / "run" / "checkpoints").iterdir()
        self.assertEqual(step.name, "0")
        step.rename(step.with_name("best"))
        conversion.convert(step.with_name("best"), self.folder / "copy", "orbax")
        (step,) = (self.folder / "copy" / "checkpoints").iterdir()
        self.assertEqual(step.name, "0")

    def test_float16_needs_another_dtype(self):
        folder = self.write("hf")
        path = folder / "model.safetensors"
        tensors = safetensors.numpy.load_file(path)
        halves = {name: x.astype(np.float16) for name, x in tensors.items()}
        safetensors.numpy.save_file(halves, path, {"format": "pt"})
        for options in ({}, {"to": "hf"}, {"to": "hf", "dtype": "int8"}):
            with self.assertRaisesRegex(
                config_lib.InputError, "weights of float16, .* give --dtype=float32 or"
            ):
                conversion.convert(folder, self.folder / "new", **options)
            self.assertFalse((self.folder / "new").exists())
        conversion.convert(folder, self.folder / "new", dtype="float32")

    def test_a_tokenizer_with_more_ids_than_the_model_is_not_converted(self):
        source = self.write("source")
        tokenizer_lib.byte_tokenizer().save(source / "tokenizer.json")
        with self.assertRaisesRegex(config_lib.InputError, "tokenizer's 257 ids"):
            conversion.convert(source, self.folder / "run")

    def test_another_tokenizer_is_not_exported(self):
        source, run = self.write("source"), self.folder / "run"
        names = ("<|endoftext|>", "[MASK]")
        one, other = map(tokenizer_lib.byte_tokenizer, (names, names[::-1]))
        with mock.patch.object(tokenizer_lib, "check_vocab"):  # it has more ids
            one.save(source / "tokenizer.json")
            conversion.convert(source, run)
            other.save(run / "tokenizer.json")
            with self.assertRaisesRegex(config_lib.DamagedError, "trained with"):
                conversion.convert(run, self.folder / "back")

    def test_mtp_layer_both_ways(self):
        prefix = f"model.layers.{WIDE.num_hidden_layers}."
        source = self.write("source")
        names = fp8_folder.stored_tensors(source)
        self.assertIn(f"{prefix}mlp.experts.3.down_proj.weight", names)
        self.assertIn(f"{prefix}self_attn.indexer.wk.weight", names)
        conversion.convert(source, self.folder / "run")
        conversion.convert(self.folder / "run", self.folder / "back")
        self.assert_same_bytes(source, self.folder / "back")

    @parameterized.parameters("hf", "orbax")
    def test_a_nan_leaves_no_folder(self, to):
        source = self.write("source")
        tensors = fp8_folder.stored_tensors(source)
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        tensors[name] = tensors[name] * np.nan
        safetensors.numpy.save_file(tensors, source / huggingface.SINGLE_FILE)
        with self.assertRaisesRegex(config_lib.InputError, "NaN"):
            conversion.convert(source, self.folder / "out", to)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["source"])

    @parameterized.parameters("hf", "orbax")
    def test_a_full_disk_is_noticed_before_the_write(self, to):
        source, out = self.write("source"), self.folder / "out"
        size = sum(x.nbytes for x in jax.tree.leaves(tiny.params(WIDE)))
        usage = mock.Mock(free=size - 1)
        message = f"{size - 1:,} bytes free, but the tensors take {size:,}"
        with mock.patch("shutil.disk_usage", return_value=usage):
            with self.assertRaisesRegex(config_lib.InputError, message):
                conversion.convert(source, out, to)
            self.assertEqual([path.name for path in self.folder.iterdir()], ["source"])
            usage.free = size
            conversion.convert(source, out, to)
        self.assertTrue(out.exists())

    @parameterized.parameters("hf", "orbax")
    def test_a_disk_that_fills_while_it_is_written_leaves_no_folder(self, to):
        source = self.write("source")
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, before[1]))
        try:
            with self.assertRaisesRegex(Exception, "(?i)file too large|EFBIG"):
                conversion.convert(source, self.folder / "out", to)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["source"])

    def test_a_target_that_cannot_be_written(self):
        with self.assertRaisesRegex(config_lib.InputError, "choose another target"):
            conversion.convert(GOLDEN, "/proc/model")  # nor may root

    @parameterized.parameters("az://bucket/model", pathlib.Path("az://bucket/model"))
    def test_other_object_stores_are_refused_and_not_taken_for_folders(self, url):
        message = "no path of a file system"
        with self.assertRaisesRegex(config_lib.InputError, message):
            conversion.convert(GOLDEN, url)
        with self.assertRaisesRegex(config_lib.InputError, message):
            conversion.convert(url, self.folder / "out")
        with self.assertRaisesRegex(config_lib.InputError, message):
            manager.CheckpointManager(url, keep=2)

    def test_wrong_dtype_and_shapes(self):
        source, out = self.write("source"), self.folder / "out"
        with self.assertRaisesRegex(config_lib.InputError, "--dtype=fp8"):
            conversion.convert(source, out, dtype="fp8")
        with self.assertRaisesRegex(config_lib.InputError, "float32, bfloat16, got"):
            conversion.convert(source, out, "orbax", dtype="fp8")
        with self.assertRaisesRegex(config_lib.InputError, "must be hf or orbax"):
            conversion.convert(source, out, "onnx")
        conversion.convert(source, out)
        for override, words in {
            ("model.vocab_size", "96"): r"embed_tokens: \(80, 160\) there, \(96, 160\)",
            (
                "model.num_nextn_predict_layers",
                "0",
            ): r"mtp\.block\.indexer\.wk: \(160, 16\) there, absent here",
        }.items():
            with self.assertRaisesRegex(config_lib.InputError, words):
                conversion.convert(out, self.folder / "x", overrides=[override])


class ProcessTest(parameterized.TestCase):
    """Runs the command in its own process, also to measure its memory."""

    def run_python(self, *arguments, timeout=300):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def test_wrong_input_exits_with_2(self):
        target = pathlib.Path(self.create_tempdir().full_path) / "run"
        paths = (f"--source={GOLDEN}", f"--target={target}")
        done = forked.run("convert", *paths, "--dtype=fp8")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("got --dtype=fp8", done.stderr)
        self.assertFalse(target.exists())

    def test_the_next_conversion_removes_the_files_that_kill_9_left(self):
        folder = pathlib.Path(self.create_tempdir().full_path)
        script = (
            "import shutil, sys, time\n"
            "from glm5_jax.weights import conversion\n"
            "def held(*args): print('here', flush=True), time.sleep(600)\n"
            "shutil.copyfile = held  # when the weights are written\n"
            "conversion.convert(*sys.argv[1:])\n"
        )
        command = [sys.executable, "-c", script, str(GOLDEN), str(folder / "run")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
            try:
                self.assertEqual(child.stdout.readline(), b"here\n")
                with self.assertRaisesRegex(config_lib.InputError, "another process"):
                    conversion.convert(GOLDEN, folder / "run")
            finally:
                child.kill()
        (left,) = folder.iterdir()
        self.assertStartsWith(left.name, "run.partial-")
        self.assertTrue((left / "checkpoints" / "0").exists())
        conversion.convert(GOLDEN, folder / "run")
        self.assertEqual([path.name for path in folder.iterdir()], ["run"])
        loading.load_model(folder / "run")

    def stream(self, layers, *flags):
        """Runs the benchmark with GLM-5's names; returns its rows by action."""
        flags = (
            f"--folder={self.create_tempdir().full_path}",
            f"--layers={layers}",
            *flags,
        )
        done = self.run_python(STREAM, *flags, timeout=3600)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.rows_of(done.stdout)

    def rows_of(self, output):
        """Returns the benchmark's rows by action; checks what each took."""
        sys.stderr.write(f"\n{output}")
        rows = {}
        for row in map(json.loads, output.splitlines()):
            if "peak_bytes" in row:
                self.assertLess(row["peak_bytes"], row["allowed_bytes"], row)
                rows.setdefault(row["step"], []).append(row)
        return rows

    def test_synthetic_checkpoint_there_and_back(self):
        """Converts three dense layers, a sparse one and MTP, with 16 experts."""
        flags = "--layers=4", "--experts=16"
        flags += (f"--folder={self.create_tempdir().full_path}",)

        def fork(command, **_):  # with the imports done
            done = forked.run_script(*command[1:])
            self.assertEqual(done.returncode, 0, done.stderr)
            return done

        with (
            mock.patch.object(sys, "argv", [STREAM, *flags]),
            mock.patch.object(subprocess, "run", fork),
            contextlib.redirect_stdout(io.StringIO()) as output,
        ):
            runpy.run_path(STREAM, run_name="__main__")
        rows = self.rows_of(output.getvalue())
        self.assertEqual([*rows], ["import", "export"])
        self.assertEqual(rows["import"][0]["tensors"], 192)

    @pytest.mark.slow
    def test_memory_and_time_a_tensor_do_not_grow_with_the_model(self):
        """Compares 78 + 1 layers, 3.6 times the allowed memory, with 20 + 1."""
        for few, many in self.stream("20,78").values():
            self.assertEqual((few["tensors"], many["tensors"]), (14_224, 59_870))
            self.assertGreater(many["total_bytes"], 3.5 * many["allowed_bytes"])
            name = "cpu_microseconds_per_tensor"
            self.assertLess(many[name], FLAT * few[name])

    @pytest.mark.slow
    def test_a_step_that_training_saved_is_exported_in_little_memory(self):
        """Experts of one kind take 0.9 GB; two such arrays exceed the limit."""
        rows = self.stream(39, "--trained=1,8")
        for count in (1, 8):
            (row,) = rows[f"export of training on {count}"]
            self.assertGreater(row["total_bytes"], 1.7 * row["allowed_bytes"])


if __name__ == "__main__":
    environment.main()
