"""Engines and pushes: against compiled programs, published sizes, and by hand."""

import dataclasses
import functools
import json
import pathlib
import tempfile

import ml_dtypes
import numpy as np
from absl.testing import parameterized

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib
from glm5_jax.rl import jobs
from glm5_jax.rl.weight_store import coding
from glm5_jax.scale import slice_devices
from glm5_jax.scale.estimate import decoding, serving
from glm5_jax.scale.rl import engines, pushes, splits, tasks
from glm5_jax.training.reporting import accounting
from tests import environment

ROOT = pathlib.Path(__file__).parents[3]
POINTS = json.loads((ROOT / "docs" / "serving_roofline.json").read_text())
PLAIN = [
    (f"{p['sequence_length']}_{p['tokens']}", p)
    for p in POINTS
    if p.get("quantize", "stored") == "stored" and not p.get("num_drafts")
]
HBM, LINKS, ROOM = 0.1, 0.25, 0.02  # of the compiler's figures
# Bytes of the released tensors of GLM-5 (config.json and safetensors of zai-org/GLM-5
# and GLM-5-FP8); norms and routers are in float32 here.
RELEASED = {"bfloat16": 1_507_728_316_928, "FP8": 756_162_687_872}
RELEASED_RTOL = 1e-3


def serve_config(report):
    spec = str(ROOT / report["config"])
    return command_line.Arguments(config=spec).train_config()


def mixture(made, kind="coding", **sizes):
    kinds = {kind: dataclasses.replace(tasks.KINDS[kind], **sizes)}
    limits = tasks.Limits(turns=9, turn_tokens=999, row_tokens=30_000)
    return tasks.Mixture(kinds=kinds, shares=[(kind, 1.0)], limits=limits)


def stored(x, weights):
    """Returns the bytes of a matrix: bfloat16, or FP8 codes by blocks of 128 x 128."""
    x = x.astype(ml_dtypes.bfloat16)
    if weights == "FP8":
        blocks = x.astype(np.float32).reshape(len(x) // 128, 128, -1, 128)
        scales = np.abs(blocks).max((1, 3), keepdims=True) / 448
        x = (blocks / scales).astype(ml_dtypes.float8_e4m3fn)
    return x.view(np.uint8).reshape(-1)


class LimitsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("glm5_rl_reasoning", "reasoning"),
        ("glm5_rl_agentic", "coding"),
        ("glm5_rl_agentic", "search"),
        ("glm5_rl_agentic", "terminal"),
    )
    def test_a_run_at_full_size_waits_for_its_longest_answers(self, name, kind):
        """As many episodes may wait for a slot as have one, as long as an answer."""
        spec = str(ROOT / "configs" / f"{name}.py")
        config = command_line.Arguments(config=spec).train_config()
        rl, kinds = config.rl, {kind: tasks.KINDS[kind]}
        limits = tasks.Limits.of(config)
        drawn = tasks.Mixture(kinds=kinds, shares=[(kind, 1.0)], limits=limits)
        staleness = rl.max_staleness if config.stage == "async_rl" else 0
        admitted = (staleness + 1) * rl.prompts_per_step * rl.group_size
        self.assertGreaterEqual(jobs.settings(rl).num_concurrent, admitted)
        engine = engines.make(config, drawn, "v5p")
        token = engine.step_seconds(engine.slots)
        self.assertGreater(rl.answer_timeout_seconds, 2 * token * rl.max_new_tokens)
        calls = [
            [turn.seconds for turn in drawn.turns(group, 0)] for group in range(256)
        ]
        self.assertGreater(rl.step_timeout_seconds, max(map(max, calls)))
        tools = max(map(sum, calls))
        self.assertGreater(rl.episode_timeout_seconds, tools)
        if rl.max_turns > 1:  # a program's limit covers its answers
            whole = 2 * token * config.data.sequence_length + tools
            self.assertGreater(rl.episode_timeout_seconds, whole)


class DecodingTest(parameterized.TestCase):
    @parameterized.named_parameters(PLAIN)
    def test_a_step_from_shapes_is_near_the_compilers(self, report):
        """The constants of bytes besides weights and cache were fitted to these."""
        want, made = serving.Compiled.of_report(report), serve_config(report)
        got = decoding.compiled(made, report["topology"], report["mesh"]["tensor"])
        self.assertEqual((got.caches, got.devices), (want.caches, want.devices))
        self.assertAlmostEqual(got.experts / want.experts, 1, delta=1e-3)
        self.assertAlmostEqual(got.matrices / want.matrices, 1, delta=0.05)
        step = serving.step(
            made.model, got, serving.FORMATS[0], sequences=int(want.sequences)
        )
        hbm = step.hbm * got.hbm_rate / want.hbm_bytes
        self.assertAlmostEqual(hbm, 1, delta=HBM)
        self.assertAlmostEqual(step.links / want.link_seconds, 1, delta=LINKS)
        room = serving.step(made.model, want, serving.FORMATS[0]).cache_tokens
        self.assertAlmostEqual(step.cache_tokens / room, 1, delta=ROOM)

    def test_reading_costs_the_products_of_a_forward_pass(self):
        """A third of a training step's, as a run's MFU counts them."""
        model = dataclasses.replace(
            presets.GLM5, attention="dense", num_nextn_predict_layers=0
        )
        made = config_lib.TrainConfig(
            model=model, data=config_lib.DataConfig(sequence_length=65_536)
        )
        seconds = decoding.read_seconds(made, "v5p:2x2x1", 65_536)
        flops = seconds * 4 * slice_devices.named("v5p:2x2x1").flops
        want = accounting.flops_per_token(model, 65_536) / 3
        self.assertAlmostEqual(flops / want, 1, delta=0.02)


class EngineTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.made = serve_config(PLAIN[0][1])
        cls.engine = engines.make(cls.made, mixture(cls.made), "v5p")

    def test_the_default_engine_is_the_one_that_was_compiled(self):
        self.assertEqual(self.engine.topology, "v5p:4x4x4")
        self.assertEqual(self.engine.compiled.caches, 32)
        fp8 = engines.make(self.made, mixture(self.made), "v5p", weights="FP8")
        self.assertEqual(fp8.topology, "v5p:2x4x4")

    def test_a_step_waits_for_the_fullest_device(self):
        engine = dataclasses.replace(self.engine, read_seconds=0.0)
        step = engine.step_seconds
        self.assertEqual(step(1), step(32))
        self.assertLess(step(32), step(33))
        self.assertEqual(step(33), step(64))

    def test_what_is_read_comes_on_top(self):
        engine = self.engine
        plain = dataclasses.replace(engine, read_seconds=0.0)
        more = engine.step_seconds(40) - plain.step_seconds(40)
        self.assertAlmostEqual(more, 40 * engine.read_seconds)
        summary = mixture(self.made).summary
        each = decoding.read_seconds(self.made, "v5p:4x4x4", summary.context)
        self.assertAlmostEqual(engine.read_seconds, each * summary.read)

    def test_slots_are_whole_sequences_of_a_device(self):
        room = serving.step(
            self.made.model, self.engine.compiled, serving.FORMATS[0]
        ).cache_tokens
        self.assertEqual(self.engine.slots, room // 32 // 32_768 * 32)
        paged = dataclasses.replace(
            self.made, rl=dataclasses.replace(self.made.rl, num_pages=64)
        )
        found = engines.make(paged, mixture(paged), "v5p")
        self.assertGreater(found.slots, self.engine.slots)
        half = self.engine.with_memory(self.engine.compiled.limit / 3)
        self.assertLess(half.slots, self.engine.slots)
        self.assertEqual(self.engine.with_memory(1e12).slots, 0)

    def test_a_report_gives_the_engine_as_compiled(self):
        _, point = PLAIN[0]
        given = {**point, "program": "decode", "num_hidden_layers": 78, "num_drafts": 0}
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "report.json"
            path.write_text(json.dumps(given))
            made = engines.make(self.made, mixture(self.made), "v5p", report=str(path))
            self.assertEqual(made.compiled, serving.Compiled.of_report(point))
            path.write_text(json.dumps({**given, "num_hidden_layers": 4}))
            with self.assertRaisesRegex(config_lib.InputError, "of all 78 layers"):
                engines.make(self.made, mixture(self.made), "v5p", report=str(path))
            path.write_text("{}")
            with self.assertRaisesRegex(config_lib.InputError, "--program=decode"):
                engines.make(self.made, mixture(self.made), "v5p", report=str(path))

    def test_devices_that_share_slots_divide_the_engine_or_are_refused(self):
        of = functools.partial(engines.make, self.made, mixture(self.made), "v5p")
        with self.assertRaisesRegex(
            config_lib.InputError, "--engine_tensor must divide the 64 devices.*got 3"
        ):
            of(topology="v5p:4x4x4", tensor=3)
        self.assertEqual(of(topology="v5p:4x4x4", tensor=4).compiled.caches, 16)

    def test_a_mesh_that_does_not_divide_the_model_is_refused(self):
        with self.assertRaisesRegex(config_lib.InputError, "expert"):
            engines.make(
                self.made, mixture(self.made), "v5p", topology="v5p:4x4x12", tensor=1
            )


class PushTest(parameterized.TestCase):
    @parameterized.parameters(*RELEASED)
    def test_a_whole_version_has_the_released_bytes(self, weights):
        push = pushes.of(presets.GLM5, weights, "full")
        ratio = push.num_bytes / RELEASED[weights]
        self.assertAlmostEqual(ratio, 1, delta=RELEASED_RTOL)
        delta = pushes.of(presets.GLM5, weights, "delta")
        self.assertAlmostEqual(
            delta.num_bytes, pushes.DELTA_SHARES[weights] * push.num_bytes
        )

    @parameterized.parameters(*pushes.DELTA_SHARES)
    def test_differences_take_their_share(self, weights):
        """Of values N(0, 0.02) that move by 1e-6, as the weight store codes them."""
        rng = np.random.default_rng(0)
        before = (0.02 * rng.standard_normal((512, 1024))).astype(np.float32)
        after = before - np.float32(1e-6) * rng.choice([-1, 1], before.shape)
        old, new = (stored(x.astype(np.float32), weights) for x in (before, after))
        _, found = coding.encode(new, old)
        share = len(found) / len(new)
        self.assertAlmostEqual(share / pushes.DELTA_SHARES[weights], 1, delta=0.1)

    def test_seconds_by_hand(self):
        """1.6e12 bytes at 6.25e9 of a chip: 4 s into 64 chips; 4 copies out of 256."""
        device = slice_devices.named("v5p:4x4x4")
        push = pushes.Push("bfloat16", "full", 1.6e12)
        split = splits.Split("v5p:4x8x8", 1, 256, 4, 64, 0)
        self.assertAlmostEqual(push.seconds(split, device), 4.0)
        busy = dataclasses.replace(split, training=64)  # 16 s out of 64
        self.assertAlmostEqual(push.seconds(busy, device), 16.0)


if __name__ == "__main__":
    environment.main()
