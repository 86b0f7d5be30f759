"""Finds models by path, and runs the commands that read and rewrite them."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl.testing import absltest, parameterized

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.checkpoint import manager
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.chat import templates
from glm5_jax.inference import commands, engine
from glm5_jax.model import transformer
from glm5_jax.weights import (
    conversion,
    generation_config,
    huggingface_export,
    loading,
    quantized_loading,
)
from tests import environment, forked, small_configs
from tests.model import tiny

ROOT = pathlib.Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "glm5"
CHAT_MODEL = GOLDEN.parent / "chat_model"  # compiles faster
DENSE = [("model.attention", "dense")]  # compiles fastest
IN_FLOAT32 = (("model.dtype", "float32"),)
LOGITS_ATOL = 2e-5  # float32 against transformers' float32, as in tests/checkpoint
BYTES = tokenizer_lib.byte_tokenizer()
SAMPLING = {"ignore_eos", "max_new_tokens", "temperature", "top_p", "seed"}

TINY = tiny.model(
    vocab_size=260,
    num_hidden_layers=2,
    num_nextn_predict_layers=0,
    max_position_embeddings=64,
    eos_token_id=(256,),
    pad_token_id=256,
)
RUN = config_lib.TrainConfig(
    model=TINY, data=config_lib.DataConfig(sequence_length=24, tokenizer="byte")
)


class FolderTest(parameterized.TestCase):
    """Makes run folders: copies of those that a class has made."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        kept = cls.enterClassContext(tempfile.TemporaryDirectory())
        cls.kept = pathlib.Path(kept)
        cls.params = jax.device_get(tiny.params(TINY))

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir().full_path)

    def make_run(self, name="run", steps=(3,), tokenizer=BYTES):
        kept = self.kept / f"{steps} {tokenizer is not None}"
        if not kept.exists():
            self.write_run(kept, steps, tokenizer)
        run = self.folder / name
        shutil.copytree(kept, run)
        return run

    def write_run(self, run, steps, tokenizer):
        run.mkdir()
        settings = command_line.to_json_dict(RUN)
        (run / "config.json").write_text(json.dumps(settings))
        if tokenizer:
            tokenizer.save(run / "tokenizer.json")
        if steps:
            checkpoints = manager.CheckpointManager(run, keep=9)
            metadata = {"tokenizer": tokenizer.digest} if tokenizer else {}
            for step in steps:
                params = jax.tree.map(
                    lambda x, step=step: jnp.asarray(x + step), self.params
                )
                checkpoints.save(step, {"params": params, "opt_state": {}}, metadata)
            checkpoints.close()

    def save_ids(self, ids, name="ids.npy"):
        path = self.folder / name
        np.save(path, ids)
        return str(path)

    def assert_trees_equal(self, a, b):
        jax.tree.map(np.testing.assert_array_equal, a, b)


class LoadTest(FolderTest):
    def test_run_folder_is_its_newest_step_and_a_step_folder_itself(self):
        run = self.make_run(steps=(3, 5))
        config, params, tokenizer = loading.load_model(run)
        self.assertEqual(config, TINY)
        self.assertEqual(tokenizer.digest, BYTES.digest)
        self.assert_trees_equal(params, jax.tree.map(lambda x: x + 5, self.params))
        config, params, tokenizer = loading.load_model(f"{run}/checkpoints/3/")
        self.assertEqual(config, TINY)
        self.assertIsNotNone(tokenizer)
        self.assert_trees_equal(params, jax.tree.map(lambda x: x + 3, self.params))

    def test_any_folder_may_be_called_checkpoints(self):
        (self.folder / "checkpoints").mkdir()
        run = self.make_run("checkpoints/run")
        for path, is_step in ((run, False), (run / "checkpoints" / "3", True)):
            found = loading.find(path)
            self.assertEqual((found.folder, found.is_step), (run, is_step))
            self.assertEqual(found.weights, run / "checkpoints" / "3")
        other = self.folder / "checkpoints" / "huggingface"
        other.symlink_to(GOLDEN)
        self.assertEqual(loading.find(other).weights, other)

    def test_huggingface_folder(self):
        config, params, tokenizer = loading.load_model(GOLDEN)
        self.assertEqual((config.dtype, config.param_dtype), ("bfloat16", "bfloat16"))
        self.assertEqual(params["embed_tokens"].dtype, "bfloat16")
        self.assertIsNone(tokenizer)

    def test_overrides_reach_the_config(self):
        run = self.make_run()
        overrides = [("model.index_topk", "4"), ("model.attention", "dense")]
        config, _, _ = loading.load_model(run, overrides)
        self.assertEqual((config.index_topk, config.attention), (4, "dense"))

    def test_overrides_convert_layers(self):
        run = self.make_run(steps=(0,))
        types = [("model.layer_types", "('latent', 'latent_sliding')")]
        config, windows, _ = loading.load_model(run, types)
        self.assertEqual(config.layer_types, ("latent", "latent_sliding"))
        shared = [("model.index_topk_pattern", "FS")]
        config, one_indexer, _ = loading.load_model(run, shared)
        self.assertEqual(config.index_topk_pattern, "FS")
        wanted = jax.device_get(self.params)
        del wanted["layers_1"]["block_0"]["indexer"]
        self.assert_trees_equal(windows, wanted)
        self.assert_trees_equal(one_indexer, wanted)
        (run / "config.json").write_text(
            json.dumps({"model": command_line.to_json_dict(config)})
        )
        with self.assertRaisesRegex(config_lib.InputError, r"F at layers \[1\]"):
            loading.load_model(run, [("model.index_topk_pattern", "FF")])

    @parameterized.named_parameters(
        ("other_section", "seed", "1", "--config.seed has no effect here"),
        ("typo", "model.index_topl", "4", "Did you mean model.index_topk"),
        ("rule", "model.index_topk", "0", "index_topk must be at least 1"),
        ("shape", "model.hidden_size", "64", r"embed_tokens: \(260, 32\) there"),
        ("depth", "model.num_hidden_layers", "3", "absent|there"),
    )
    def test_bad_override(self, path, value, message):
        run = self.make_run()
        with self.assertRaisesRegex(config_lib.InputError, message):
            loading.load_model(run, [(path, value)])

    def test_shape_of_huggingface_tensors(self):
        with self.assertRaisesRegex(config_lib.InputError, "embed_tokens.weight .* in"):
            loading.load_model(GOLDEN, [("model.vocab_size", "96")])

    def test_shapes_are_checked_without_reading(self):
        run, other = self.make_run(), dataclasses.replace(TINY, hidden_size=64)
        for folder in (run, run / "checkpoints" / "3"):
            loading.require_params(folder, TINY)
            message = r"embed_tokens: \(260, 32\) there, \(260, 64\) here"
            with self.assertRaisesRegex(config_lib.InputError, message):
                loading.require_params(folder, other)
        shared = dataclasses.replace(TINY, index_topk_pattern="FS")
        message = r"indexer.*: \(.*\) there, absent here"
        with self.assertRaisesRegex(config_lib.InputError, message):
            loading.require_params(run, shared)
        config = loading.read_config(loading.find(GOLDEN))
        loading.require_params(GOLDEN, config)
        with self.assertRaisesRegex(config_lib.InputError, "embed_tokens.weight .* in"):
            loading.require_params(GOLDEN, dataclasses.replace(config, vocab_size=96))

    def train_config(self, init_from, changes=(), **model):
        return dataclasses.replace(
            RUN,
            model=dataclasses.replace(TINY, **model),
            init_from=str(init_from),
            init_from_changes=changes,
        )

    def test_init_from_converts_attention_that_it_names(self):
        run, types = self.make_run(), ("latent", "latent_sliding")
        config = self.train_config(run, ("layer_types",), layer_types=types)
        loading.require_same_mathematics(config)
        loading.require_params(run, config.model)
        with self.assertLogs("absl", "INFO") as logs:
            found = loading.load_params(
                run, config.model, transformer.abstract_params(config.model)
            )
        self.assertIn("new parameters: none", "".join(logs.output))
        want = jax.tree.map(lambda x: x + 3, self.params)
        for layer in want["layers_1"].values():  # a scan of its own for each layer
            del layer["indexer"]
        self.assert_trees_equal(found, want)

    def test_init_from_draws_no_indexer_for_a_layer_that_shared_one(self):
        run = self.make_run(steps=())
        shared = dataclasses.replace(TINY, index_topk_pattern="FS")
        settings = {"model": command_line.to_json_dict(shared)}
        (run / "config.json").write_text(json.dumps(settings))
        params = jax.tree.map(jnp.asarray, self.params)
        del params["layers_1"]["block_0"]["indexer"]
        with contextlib.closing(manager.CheckpointManager(run, keep=9)) as checkpoints:
            checkpoints.save(0, {"params": params, "opt_state": {}}, {})
        types = {"layer_types": ("latent_sliding", "latent")}
        wanted = dataclasses.replace(TINY, index_topk_pattern="-F", **types)
        abstract = transformer.abstract_params(wanted)
        message = r"F at layers \[1\]"
        with self.assertRaisesRegex(config_lib.InputError, message):
            loading.require_params(run, wanted)
        with self.assertRaisesRegex(config_lib.InputError, message):
            loading.load_params(run, wanted, abstract)

    def test_attention_that_cannot_be_converted_is_refused_without_reading(self):
        variants = tiny.SIZES_OF_VARIANTS  # heads narrower than those of TINY
        types = ("latent", "grouped")
        wanted = dataclasses.replace(TINY, layer_types=types, variants=variants)
        run, message = self.make_run(), "head_dim must be at least"
        with self.assertRaisesRegex(config_lib.InputError, message):
            loading.require_params(run, wanted)
        fields = dataclasses.asdict(variants).items()
        overrides = [(f"model.variants.{k}", str(v)) for k, v in fields]
        overrides.append(("model.layer_types", str(types)))
        with self.assertRaisesRegex(config_lib.InputError, message):
            loading.load_model(run, overrides)

    def test_init_from_refuses_another_mathematics(self):
        run = self.make_run()
        loading.require_same_mathematics(self.train_config(run))
        loading.require_same_mathematics(
            self.train_config(run, index_topk=5, index_dtype="fp8", attention="dense")
        )
        with self.assertRaisesRegex(config_lib.InputError, "index_dtype: auto in init"):
            loading.require_same_mathematics(self.train_config(run, index_dtype="fp8"))
        others = {"rope_theta": 5e4, "num_experts_per_tok": 1}
        for changes in ((), ("rope_theta",)):
            config = self.train_config(run, changes, **others)
            with self.assertRaises(config_lib.InputError) as caught:
                loading.require_same_mathematics(config)
            message = str(caught.exception)
            self.assertIn("num_experts_per_tok: 2 in init_from, 1 in this run", message)
            self.assertEqual("rope_theta: 10000.0" in message, not changes, message)
        loading.require_same_mathematics(
            self.train_config(run, tuple(others), **others)
        )
        sliding = {"layer_types": ("latent", "latent_sliding")}
        message = r"layer_types: \(\) in init_from, \('latent', 'latent_sliding'\)"
        with self.assertRaisesRegex(config_lib.InputError, message):
            loading.require_same_mathematics(self.train_config(run, **sliding))
        config = self.train_config("/nonexistent")
        with self.assertRaisesRegex(config_lib.InputError, "no folder /nonexistent"):
            loading.require_same_mathematics(config)
        with self.assertRaisesRegex(config_lib.InputError, "rope_thetta"):
            self.train_config(run, ("rope_thetta",))

    def test_sizes_of_variants_are_compared_if_both_models_have_variants(self):
        run, types = self.make_run(), ("latent", "latent_sliding")
        sizes = config_lib.AttentionVariants(sliding_window=8)
        wider = dataclasses.replace(sizes, sliding_window=16)
        loading.require_same_mathematics(self.train_config(run, variants=wider))
        model = dataclasses.replace(TINY, layer_types=types, variants=sizes)
        tree = {"model": command_line.to_json_dict(model)}
        (run / "config.json").write_text(json.dumps(tree))
        same = {"layer_types": types, "variants": sizes}
        loading.require_same_mathematics(self.train_config(run, **same))
        with self.assertRaisesRegex(config_lib.InputError, "variants: .*window=8.* in"):
            loading.require_same_mathematics(
                self.train_config(run, layer_types=types, variants=wider)
            )
        plain = self.train_config(run, ("layer_types",), variants=wider)
        loading.require_same_mathematics(plain)

    def test_codes_are_not_made_of_layers_that_have_to_be_converted(self):
        """An indexer that is left out of a Hugging Face folder is not read."""
        changes = [("model.index_topk_pattern", "FS")]
        with self.assertRaisesRegex(config_lib.InputError, "convert the model first"):
            quantized_loading.load_model(self.make_run(), changes, scheme="int8")
        types = [("model.layer_types", "('latent', 'latent_sliding')")]
        folder = self.folder / "exported"
        huggingface_export.save_params(self.params, TINY, folder)
        with self.assertNoLogs("absl", "WARNING"):  # nobody misses an MTP layer
            loading.read_config(loading.find(folder))
        with self.assertRaisesRegex(config_lib.InputError, "convert the model first"):
            quantized_loading.load_model(folder, types, scheme="int8")
        config, params, _ = quantized_loading.load_model(folder, changes, scheme="int8")
        self.assertEqual(config.index_topk_pattern, "FS")
        self.assertNotIn("indexer", params["layers_1"]["block_0"])
        places = [x.devices() for x in jax.tree.leaves(params)]
        self.assertEqual(places, [{jax.local_devices()[0]}] * len(places))

    def test_a_mesh_must_divide_the_model(self):
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=1, tensor=8))
        run = self.make_run()
        for load in (
            lambda: loading.load_model(run, mesh=mesh),
            lambda: quantized_loading.load_model(run, mesh=mesh, scheme="int8"),
        ):
            with self.assertRaisesRegex(config_lib.InputError, "num_attention_heads"):
                load()

    def test_init_from_refuses_indexers_that_are_not_ready(self):
        run = self.make_run()
        order = "dense", "dense_with_indexer_loss", "sparse"
        messages = {
            ("dsa_sparse", 0): "has dense attention: its indexers were never trained",
            ("sft", 0): "Run stage dsa_warmup from it, then dsa_sparse; or set model",
            ("sft", 1): "warmed-up indexers, .* Run stage dsa_sparse from it before",
            ("dsa_warmup", 2): "attends to selected keys already; stage 'dsa_warmup'",
            ("dsa_warmup", 0): "",
            ("dsa_sparse", 1): "",
            ("dsa_sparse", 2): "",
            ("sft", 2): "",
        }
        for (stage, theirs), message in messages.items():
            model = dataclasses.replace(TINY, attention=order[theirs])
            tree = {"model": command_line.to_json_dict(model)}
            (run / "config.json").write_text(json.dumps(tree))
            config = small_configs.of_stage(self.train_config(run), stage)
            if message:
                with self.assertRaisesRegex(config_lib.InputError, f"(?s){message}"):
                    loading.require_same_mathematics(config)
                config = dataclasses.replace(config, init_from_changes=("attention",))
            loading.require_same_mathematics(config)

    def test_every_field_of_a_model_is_compared_where_it_matters(self):
        """All other fields change shapes, which are compared, or change no logits."""
        neutral = {
            *("attention", "dtype", "param_dtype", "remat_policy", "batch_invariant"),
            *("expert_transport", "expert_chunks", "eos_token_id", "pad_token_id"),
            *("mtp_num_steps", "index_share_for_mtp_iteration", "initializer_range"),
            *("max_position_embeddings", "kv_cache_dtype"),
        }
        changes = {"index_topk_pattern": "FS", "index_topk_freq": 2} | {
            "index_skip_topk_offset": 2
        }
        model = tiny.model(num_hidden_layers=2, index_skip_topk_offset=1)
        for field in dataclasses.fields(model):
            if field.name in neutral or field.name in loading.MATHEMATICS:
                continue
            base = model
            if field.name == "index_skip_topk_offset":
                base = dataclasses.replace(model, index_topk_freq=2)
            value = getattr(base, field.name)
            value = changes.get(field.name, 0 if value == 1 else value)
            if value == getattr(base, field.name):
                value += 2
            other = dataclasses.replace(base, **{field.name: value})
            shapes = [
                jax.tree.map(lambda x: x.shape, transformer.abstract_params(c))
                for c in (base, other)
            ]
            self.assertNotEqual(*shapes, field.name)

    def test_weights_with_nan_are_refused(self):
        folder = self.folder / "nan"
        shutil.copytree(GOLDEN, folder)
        stored = safetensors.numpy.load_file(folder / "model.safetensors")
        stored["lm_head.weight"][7, 3] = np.nan
        safetensors.numpy.save_file(stored, folder / "model.safetensors")
        config = loading.read_config(loading.find(folder))
        with self.assertRaisesRegex(config_lib.InputError, "nan: lm_head holds a NaN"):
            loading.load_model(folder)
        with self.assertRaisesRegex(config_lib.InputError, "nan: lm_head holds a NaN"):
            loading.load_params(folder, config, transformer.abstract_params(config))
        message = r"{} has .*NaN|{} holds a NaN"
        for stored_name, name in (
            ("model.embed_tokens.weight", "embed_tokens"),
            ("model.layers.0.mlp.down_proj.weight", "layers_0.block_0.mlp.down_proj"),
        ):
            stored = safetensors.numpy.load_file(GOLDEN / "model.safetensors")
            stored[stored_name][2, 3] = np.nan
            safetensors.numpy.save_file(stored, folder / "model.safetensors")
            with self.assertRaisesRegex(
                config_lib.InputError, message.format(name, name)
            ):
                quantized_loading.load_model(folder, scheme="int8")

    def test_sampling_defaults_come_from_the_model(self):
        folder = self.folder / "model"
        shutil.copytree(GOLDEN, folder)
        file = folder / "generation_config.json"
        for text, want in {
            '{"do_sample": true, "temperature": 0.7, "top_p": 0.95}': (0.7, 0.95),
            '{"do_sample": false, "temperature": 0.7}': (0.0, 1.0),
            '{"eos_token_id": 1}': (1.0, 1.0),
        }.items():
            file.write_text(text)
            self.assertEqual(generation_config.sampling_defaults(folder), want)
        more = {"top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
        file.write_text(json.dumps({**more, "do_sample": True, "pad_token_id": 0}))
        self.assertEqual(generation_config.sampling_settings(folder), more)
        for text in ("[", "[]", '{"top_p": "x"}', '{"temperature": [1]}'):
            file.write_text(text)
            with self.assertRaisesRegex(config_lib.InputError, "cannot be used"):
                generation_config.sampling_defaults(folder)

    def test_names_the_missing_parts(self):
        empty = self.folder / "empty"
        empty.mkdir()
        for path, message in {
            self.folder / "nowhere": "There is no folder",
            empty: "holds no model: .*config.json cannot be read",
            self.make_run("young", steps=()): "no checkpoint",
            self.make_run("whole") / "checkpoints": "holds no model",
            self.folder / "whole" / "checkpoints" / "9": "There is no folder",
        }.items():
            with self.assertRaisesRegex(config_lib.InputError, message):
                loading.load_model(path)
        (empty / "config.json").write_text("[1]")
        with self.assertRaisesRegex(config_lib.InputError, "describes no model"):
            loading.load_model(empty)

    def test_tokenizer_with_more_ids_than_the_model(self):
        run = self.make_run()
        for load in (
            lambda few: loading.load_model(run, few),
            lambda few: quantized_loading.load_model(run, few, scheme="int8"),
        ):
            message = "the tokenizer's 257 ids"
            with self.assertRaisesRegex(config_lib.InputError, message):
                load([("model.vocab_size", "200")])

    def test_a_flipped_bit_of_the_tokenizer_is_refused_by_every_command(self):
        """One bit made two letters the same id: 8.21 for 7.57 bits a byte, exit 0."""
        run = self.make_run()
        path, ids = run / "tokenizer.json", self.save_ids([1, 2])
        whole = path.read_bytes()
        place = whole.index(b'"z":122') + len('"z":12')
        self.assertEqual(loading.tokenizer_of(loading.find(run)).digest, BYTES.digest)
        evaluate = functools.partial(commands.evaluate, overrides=(), logits_out=None)
        sampling = commands.Sampling(max_new_tokens=1)
        prompt = commands.Prompt(text="z")
        generate = functools.partial(commands.generate, prompt=prompt, overrides=())
        asked = (
            lambda at: evaluate(at, tokens=None, text=str(path)),
            lambda at: evaluate(at, tokens=ids, text=None),
            lambda at: evaluate(at, tokens=ids, text=None, scheme="int8"),
            lambda at: generate(at, sampling=sampling),
            lambda at: generate(
                at, sampling=dataclasses.replace(sampling, scheme="int8")
            ),
        )
        for where in (0, place, len(whole) - 1):
            flipped = bytearray(whole)
            flipped[where] ^= 1
            path.write_bytes(flipped)
            for command in asked:
                for at in (str(run), f"{run}/checkpoints/3"):
                    with self.assertRaisesRegex(config_lib.DamagedError, "trained wi"):
                        command(at)

    def test_a_config_file_is_refused(self):
        arguments = command_line.Arguments(config="configs/quickstart.py")
        with self.assertRaisesRegex(config_lib.InputError, "not used here"):
            loading.overrides_of(arguments)

    def test_overrides_are_those_of_the_mesh_and_others(self):
        depth = ("model.index_topk", "3")
        given = (("mesh.fsdp", "4"), depth, ("mesh.data", "2"))
        mesh, others = loading.mesh_of(given)
        self.assertEqual((mesh.shape["data"], mesh.shape["fsdp"]), (2, 4))
        self.assertEqual(others, [depth])
        self.assertEqual(loading.mesh_of([depth]), (None, [depth]))
        arguments = command_line.Arguments(overrides=given)
        self.assertEqual(loading.overrides_of(arguments), given)
        several = {
            "JAX_COORDINATOR_ADDRESS": "10.0.0.1:8476",
            "JAX_NUM_PROCESSES": "4",
            "JAX_PROCESS_ID": "1",
        }
        with mock.patch.dict(os.environ, several):
            self.assertEqual(loading.overrides_of(arguments, alone=False), given)
            with self.assertRaisesRegex(config_lib.InputError, "several processes"):
                loading.overrides_of(arguments)

    def test_tokens_that_are_read_at_once(self):
        """As many as in training; no more than the model has positions for."""
        longer = dataclasses.replace(TINY, max_position_embeddings=5000)
        self.assertEqual(loading.context_length(self.make_run(), longer), 24)
        self.assertEqual(loading.context_length(GOLDEN, longer), 4096)
        self.assertEqual(loading.context_length(GOLDEN, TINY), 64)

    def test_parameters_for_a_config_that_is_known(self):
        run = self.make_run()
        abstract = transformer.abstract_params(TINY)
        params = loading.load_params(run, TINY, abstract)
        self.assert_trees_equal(params, jax.tree.map(lambda x: x + 3, self.params))

    @parameterized.parameters("float32", "bfloat16")
    def test_parameters_have_the_dtype_that_is_asked_for(self, dtype):
        config, stored, _ = loading.load_model(GOLDEN)
        config = dataclasses.replace(config, param_dtype=dtype)
        abstract = transformer.abstract_params(config)
        params = loading.load_params(GOLDEN, config, abstract)
        jax.tree.map(lambda x, a: self.assertEqual(x.dtype, a.dtype), params, abstract)
        wanted = jax.tree.map(lambda x, a: x.astype(a.dtype), stored, abstract)
        self.assert_trees_equal(params, wanted)
        bias = params["layers_1"]["block_0"]["mlp"]["e_score_correction_bias"]
        self.assertEqual(bias.dtype, "float32")  # it decides between close experts
        self.assertGreater(np.abs(bias - bias.astype("bfloat16")).max(), 0)


class EvaluateTest(FolderTest):
    def test_logits_equal_transformers(self):
        with np.load(GOLDEN / "reference.npz") as reference:
            ids, expected = reference["input_ids"], reference["logits"]
        out = str(self.folder / "logits")  # exactly this name, without .npy
        scores = commands.evaluate(
            str(GOLDEN),
            IN_FLOAT32,
            tokens=self.save_ids(ids),
            text=None,
            logits_out=out,
        )
        logits = np.load(out)
        self.assertEqual(logits.dtype, np.float32)
        np.testing.assert_allclose(logits, expected, atol=LOGITS_ATOL)
        logprobs = np.asarray(jax.nn.log_softmax(expected[:, :-1]))
        targets = ids[:, 1:, None].astype(np.int64)
        nll = -np.take_along_axis(logprobs, targets, axis=-1)
        self.assertEqual(scores["num_tokens"], nll.size)
        self.assertAlmostEqual(scores["nll"], nll.mean(), places=5)
        self.assertNotIn("bits_per_byte", scores)

    def test_text_is_scored_in_rows_as_in_training(self):
        run = self.make_run()
        text = "def f(x):\n    return 'ä' * x\n" * 2
        path = self.folder / "text.py"
        path.write_text(text, encoding="utf-8")
        scores = commands.evaluate(
            str(run), DENSE, tokens=None, text=str(path), logits_out=None
        )
        data = text.encode()
        self.assertEqual(scores["num_tokens"], len(data))  # <|endoftext|>, not byte 0
        self.assertEqual(scores["num_bytes"], len(data) - 1)
        config, params, _ = loading.load_model(run, DENSE)
        rows = np.zeros((-(-len(data) // 24), 24), np.int32)
        rows.flat[: len(data)] = list(data)  # padding is not compared
        logits = np.asarray(tiny.logits(params, config, rows), np.float64)
        logits = logits.reshape(rows.size, -1)
        logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        targets = np.array([*data[1:], BYTES.eos_id])
        total = -logprobs[np.arange(len(data)), targets].sum()
        expected = total / np.log(2) / (len(data) - 1)
        self.assertAlmostEqual(scores["bits_per_byte"], expected, places=4)

    @parameterized.named_parameters(
        ("floats", np.ones((2, 3)), "must hold integers"),
        ("cube", np.ones((2, 3, 4), int), r"int64\[2, 3, 4\]"),
        ("unknown", np.array([[1, 300]]), r"Ids must lie in 0\.\.259"),
        ("wrapped", np.array([[1, 99 + 2**32]]), "0..259 .* got 1..4294967395"),
        ("negative", np.array([[1, 99 - 2**32]]), "got -4294967197..1"),
        ("long", np.ones((1, 65), int), "Rows have 65 tokens"),
        ("single", np.ones((3, 1), int), "at least two tokens"),
    )
    def test_bad_ids(self, ids, message):
        run, path = str(self.make_run()), self.save_ids(ids)
        with self.assertRaisesRegex(config_lib.InputError, message):
            commands.evaluate(run, (), tokens=path, text=None, logits_out=None)

    def test_files_without_ids_are_refused(self):
        run, path = str(self.make_run()), self.folder / "ids.npy"
        np.save(path, np.arange(4))
        header = path.read_bytes()[:128]
        short = b"(%d,)" % 10**13
        huge = header.replace(b"(4,)", short).replace(b" " * (len(short) - 4), b"", 1)
        for content in (b"", header, huge, b"\x93NUMPY", b"text"):
            path.write_bytes(content)
            with self.assertRaisesRegex(config_lib.InputError, "cannot be read from"):
                commands.evaluate(run, (), tokens=str(path), text=None, logits_out=None)
        with self.assertRaisesRegex(config_lib.InputError, "is a folder"):
            commands.evaluate(run, (), tokens=None, text="x", logits_out=str(run))


class GenerateTest(FolderTest):
    def generate(self, checkpoint, overrides=(), **options):
        tokens_out = options.pop("tokens_out", None)
        settings = {"max_new_tokens": 16, "temperature": 0.0, "top_p": 1.0}
        settings |= {k: options.pop(k) for k in SAMPLING & options.keys()}
        prompt, sampling = commands.Prompt(**options), commands.Sampling(**settings)
        return commands.generate(
            str(checkpoint), overrides, prompt, sampling, tokens_out
        )

    def test_ids_continue_as_in_transformers(self):
        with np.load(GOLDEN / "reference.npz") as reference:
            ids, expected = reference["input_ids"], reference["greedy_ids"]
        out = str(self.folder / "out.npy")
        tokens = self.save_ids(ids)
        texts = self.generate(
            GOLDEN, IN_FLOAT32, tokens=tokens, tokens_out=out, ignore_eos=True
        )
        whole = np.concatenate([ids, expected], axis=1)
        np.testing.assert_array_equal(np.load(out), whole)
        self.assertEqual(texts, [" ".join(map(str, row)) for row in whole])

    def test_text_continues(self):
        run = self.make_run()
        out = str(self.folder / "out.npy")
        # Every id ends the text, unless that is ignored.
        stops = [*DENSE, ("model.eos_token_id", str(tuple(range(260))))]
        options = {"text": "def ", "tokens_out": out}
        (text,) = self.generate(run, stops, ignore_eos=True, **options)
        self.assertStartsWith(text, "def ")
        ids = np.load(out)
        self.assertEqual(ids.shape, (4 + 16,))
        self.assertEqual(BYTES.decode(ids), text)
        self.generate(run, stops, **options)
        self.assertEqual(np.load(out).shape, (5,))

    def test_a_prompt_may_be_the_message_of_a_user(self):
        used = tokenizer_lib.named("byte_chat")
        prompt = commands.Prompt(text="Is <|user|> 2?", chat="glm5.2")
        ids = commands.read_prompt(prompt, used)
        template = templates.Template(used, "glm5.2")
        said = [{"role": "user", "content": "Is <|user|> 2?"}]
        rendered = template.render(said, add_generation_prompt=True)
        self.assertEqual(ids, rendered.tokens)
        self.assertEqual(ids.count(used.special_ids["<|user|>"]), 1)
        config = config_lib.ModelConfig(eos_token_id=(5,))
        ends = commands.stop_ids(config, used, "glm5.2")
        self.assertEqual(ends, {5, used.eos_id, *template.stop_ids})
        self.assertEqual(commands.stop_ids(config, used), {5, used.eos_id})
        self.assertEqual(commands.stop_ids(config, None), {5})
        small = config_lib.ModelConfig(eos_token_id=(5,), vocab_size=used.eos_id)
        self.assertEqual(commands.stop_ids(small, used), {5})
        with self.assertRaisesRegex(config_lib.InputError, r"lacks: .*<\|user\|>"):
            commands.read_prompt(prompt, BYTES)

    @parameterized.named_parameters(("ended", True), ("cut_off", False))
    def test_an_answer_is_shown_without_the_token_that_ends_it(self, has_ended):
        used = tokenizer_lib.named("byte_chat")
        model = config_lib.ModelConfig(vocab_size=2**18, eos_token_id=(used.eos_id,))
        drawn = [*used.encode("two"), used.special_ids["<think>"], 5]
        drawn[-1] = used.eos_id if has_ended else used.encode("!")[0]
        completion = engine.Completion(drawn, [0.0] * len(drawn), "stop")
        shown = {}
        with (
            mock.patch.object(
                quantized_loading, "load_model", return_value=(model, {}, used)
            ),
            mock.patch.object(
                generation_config, "sampling_defaults", return_value=(1.0, 1.0)
            ),
            mock.patch.object(engine, "generate", return_value=[completion]),
        ):
            for name, options in (
                ("chat", {"chat": "glm5.2"}),
                ("special", {"special_tokens": True}),
                ("plain", {}),
            ):
                (shown[name],) = self.generate("RUN", [], text="2?", **options)
        end = used.spell(drawn[-1:])
        self.assertEqual(shown["chat"], "two<think>" + end * (not has_ended))
        self.assertEqual(shown["special"], "2?two<think>" + end)
        self.assertEqual(shown["plain"], used.decode([*used.encode("2?"), *drawn]))

    def test_a_prompt_may_spell_special_tokens(self):
        used = tokenizer_lib.named("byte_chat")
        text = "[gMASK]<sop><|user|>2 < 3|><|assistant|>"
        for special, count in ((False, 0), (True, 4)):
            prompt = commands.Prompt(text=text, special_tokens=special)
            ids = commands.read_prompt(prompt, used)
            self.assertLen(set(used.special_ids.values()) & set(ids), count)
            self.assertEqual(used.spell(ids), text)

    def test_forms_of_a_prompt_exclude_each_other(self):
        for options, message in (
            ({"tokens": "x.npy", "chat": "glm5"}, "need --prompt"),
            ({"text": "a", "chat": "glm5", "special_tokens": True}, "leave --special"),
        ):
            with self.assertRaisesRegex(config_lib.InputError, message):
                commands.Prompt(**options)

    def test_names_the_missing_parts(self):
        run = self.make_run(tokenizer=None)
        cases = {
            "has no tokenizer.json": {"text": "a"},
            "either --prompt or --tokens, got neither": {},
            "got --prompt and --tokens": {"text": "a", "tokens": "b"},
            "cannot be read from nowhere.npy": {"tokens": "nowhere.npy"},
            "folder of no/x.npy does not exist": {
                "text": "a",
                "tokens_out": "no/x.npy",
            },
        }
        for message, options in cases.items():
            with self.assertRaisesRegex(config_lib.InputError, message):
                self.generate(run, **options)


class ConvertTest(FolderTest):
    def test_huggingface_to_run_and_back_is_the_same_bytes(self):
        source = self.folder / "source"
        shutil.copytree(GOLDEN, source)
        (source / "chat_template.jinja").write_text("{{ x }}")
        run, back = self.folder / "run", self.folder / "back"
        self.assertEqual(conversion.convert(source, run), "orbax")
        self.assertEqual(conversion.convert(run, back), "hf")
        tensors = [
            safetensors.numpy.load_file(folder / "model.safetensors")
            for folder in (GOLDEN, back)
        ]
        self.assertEqual(*[set(x) for x in tensors])
        for name, value in tensors[0].items():
            self.assertEqual(value.dtype, tensors[1][name].dtype, name)
            np.testing.assert_array_equal(value, tensors[1][name], name)
        self.assertEqual((back / "chat_template.jinja").read_text(), "{{ x }}")
        configs = [loading.load_model(path)[0] for path in (GOLDEN, run, back)]
        self.assertEqual(configs[0], configs[1])
        self.assertEqual(configs[0], configs[2])

    def test_a_step_of_a_run(self):
        run, target = self.make_run(steps=(3, 5)), self.folder / "new"
        conversion.convert(run / "checkpoints" / "3", target, "orbax")
        self.assertTrue((target / "checkpoints" / "3").is_dir())
        config, params, tokenizer = loading.load_model(target)
        self.assertEqual(config, TINY)
        self.assertIsNotNone(tokenizer)
        self.assert_trees_equal(params, jax.tree.map(lambda x: x + 3, self.params))

    def test_nothing_is_overwritten(self):
        target = self.folder / "there"
        target.mkdir()
        with self.assertRaisesRegex(config_lib.InputError, "exists; choose another"):
            conversion.convert(GOLDEN, target)


class EntryPointTest(absltest.TestCase):
    def test_evaluate_prints_one_json_line(self):
        folder = self.create_tempdir().full_path
        ids = os.path.join(folder, "ids.npy")
        np.save(ids, np.arange(1, 41))
        flags = f"--checkpoint={CHAT_MODEL}", f"--tokens={ids}"
        done = forked.run("evaluate", *flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["num_tokens"], 39)

    def test_wrong_input_exits_with_2(self):
        done = forked.run("generate", "--checkpoint=nowhere", "--prompt=a")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertStartsWith(done.stderr, "error: There is no folder")
        self.assertEqual(done.stdout, "")


if __name__ == "__main__":
    environment.main()
