"""The planner: which meshes there are, what is left of them, in which order."""

import dataclasses
import functools
import json
import math
import pathlib
import re
from unittest import mock

from absl.testing import parameterized

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import slice_devices
from glm5_jax.scale.compiled import arrays, report
from glm5_jax.scale.estimate import memory, search, setting, torus
from glm5_jax.scale.plan import planner, table
from tests import environment, tpus

SMALL = config_lib.TrainConfig(
    model=dataclasses.replace(presets.GLM5_1M, remat_policy="full"),
    data=config_lib.DataConfig(sequence_length=128, batch_size=16),
)
LARGE = config_lib.TrainConfig(
    model=dataclasses.replace(presets.GLM5, remat_policy="full"),
    data=config_lib.DataConfig(sequence_length=4096, batch_size=128),
)
ROOT = pathlib.Path(__file__).parents[3]


# The tests of a ranking ask about the same meshes.
KNOWN = mock.patch.object(planner, "_best", functools.cache(planner._best))


def with_data(config, **changes):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))


class SearchTest(parameterized.TestCase):
    def test_every_mesh_makes_up_the_devices_and_shares_whole_rows(self):
        found = search.candidates(SMALL, "v5p:2x2x4", 1)
        seen = set()
        for config in found:
            sizes = mesh_lib.axis_sizes(config.mesh, 16)
            self.assertEqual(math.prod(sizes.values()), 16)
            self.assertEqual(16 % (16 // (sizes["tensor"] * sizes["context"])), 0)
            seen.add(tuple(sizes.values()))
        self.assertLen(seen, len(found))
        self.assertIn((1, 4, 4, 1, 1), seen)
        self.assertIn((1, 4, 2, 1, 2), seen)

    def test_only_data_goes_across_slices(self):
        for config in search.candidates(SMALL, "v5p:2x2x2", 2):
            self.assertEqual(config.mesh.data % 2, 0)

    def test_knobs_that_round_come_last(self):
        config = search.candidates(SMALL, "v5p:2x2x2", 1)[0]
        found = list(search.variants(config))
        dtypes = [variant.optim.moment_dtype for variant in found]
        self.assertEqual(dtypes, sorted(dtypes, reverse=True))  # float32 first
        self.assertEqual(found[0].model.expert_chunks, 1)
        for variant in found:
            self.assertEqual(128 % variant.model.expert_chunks, 0)

    def test_an_expert_is_not_cut_narrower_than_a_matrix_unit(self):
        self.assertFalse(search.is_too_narrow(presets.GLM5, 16))  # 2048 / 16 = 128
        self.assertTrue(search.is_too_narrow(presets.GLM5, 32))

    @parameterized.named_parameters(
        ("chip", SMALL, "v9:2x2x2", "chip of v5e, v5p, v6e, tpu7x"),
        ("shape", SMALL, "v5p:4x4", r"each of 3 axes, e\.g\. v5p:2x2x2"),
        (
            "rows",
            with_data(LARGE, batch_size=7, sequence_length=5000),
            "v5p:8x8x8",
            r"data\.batch_size=7 rows.*2 \* context.*batch_size to 8 or 16",
        ),
        (
            "policy",
            dataclasses.replace(SMALL, model=presets.GLM5_1M),
            "v5p:2x2x2",
            r"remat_policy must be full, kernels or experts, got 'dots'",
        ),
        (
            "stage",
            dataclasses.replace(
                SMALL,
                stage="dsa_warmup",
                model=dataclasses.replace(
                    SMALL.model, attention="dense_with_indexer_loss"
                ),
            ),
            "v5p:2x2x2",
            "stage must be one of pretrain, dsa_sparse, sft, rl, async_rl",
        ),
        (
            "episodes",
            dataclasses.replace(
                with_data(SMALL, sequence_length=100),
                stage="rl",
                rl=config_lib.RLConfig(
                    prompts_per_step=1, group_size=3, max_new_tokens=8
                ),
            ),
            "v5p:4x4x4",
            r"rl\.group_size=3 rows.*Set rl\.prompts_per_step to a multiple",
        ),
    )
    def test_a_refused_setting_names_possible_ones(self, config, topology, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            search.candidates(config, topology, 1)

    def test_updates_of_a_step_share_its_rows(self):
        rl = config_lib.RLConfig(
            prompts_per_step=8, group_size=2, updates_per_rollout=2, max_new_tokens=8
        )
        config = dataclasses.replace(SMALL, stage="rl", rl=rl)
        for found in search.candidates(config, "v5p:2x2x2", 1):
            mesh = found.mesh
            shares = mesh.data * mesh.fsdp * mesh.expert
            self.assertEqual(8 % shares, 0)
            for variant in search.variants(found):
                parts = variant.optim.accumulation_steps
                self.assertEqual(16 % (2 * parts * shares), 0)


class TorusTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("cube", "v5p:2x2x4", 1),
        ("two_cores_a_chip", "tpu7x:2x2x2", 1),
        ("square", "v6e:4x4", 1),
        ("slices", "v5p:2x2x2", 2),
    )
    def test_devices_lie_as_those_of_libtpu(self, topology, num_slices):
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")
        names = ("coords", "core_on_chip", "slice_index", "device_kind", "platform")
        value = lambda device, name: getattr(device, name, 0)  # of one slice: no index
        read = lambda device: [
            tuple(x) if isinstance(x := value(device, name), list) else x
            for name in names
        ]
        real = mesh_lib.topology(topology, num_slices)
        self.assertCountEqual(
            map(read, torus.devices(topology, num_slices)), map(read, real)
        )
        # In whatever order they come, a mesh lays them alike.
        half = len(real) // num_slices // 2
        config = config_lib.MeshConfig(slices=num_slices, fsdp=half, expert=2)
        grids = torus.mesh(config, topology), mesh_lib.make_mesh(config, real)
        places = [[read(device) for device in grid.devices.flat] for grid in grids]
        self.assertEqual(*places)

    def test_an_axis_of_the_mesh_lies_on_one_of_the_torus(self):
        mesh = torus.mesh(config_lib.MeshConfig(fsdp=16, expert=4), "v5p:4x4x4")
        self.assertLen(slice_devices.route(mesh, ("expert",)).torus, 1)
        self.assertLen(slice_devices.route(mesh, ("fsdp",)).torus, 2)


class RankingTest(parameterized.TestCase):
    @KNOWN
    def test_order_is_by_time_and_each_mesh_comes_once(self):
        ranking = planner.make(SMALL, "name", "v5p:2x2x2", num_shown=100)
        self.assertEmpty(ranking.refusal)
        scores = [plan.score for plan in ranking.plans]
        self.assertEqual(scores, sorted(scores))
        meshes = {tuple(plan.setting.sizes.values()) for plan in ranking.plans}
        self.assertLen(meshes, len(ranking.plans))
        self.assertLen(ranking.plans, ranking.num_fitting)

    def test_the_quick_plan_is_near_the_best(self):
        ranking = planner.make(SMALL, "name", "v5p:2x2x1", num_shown=1)
        quick, refusal = planner.best(SMALL, "name", "v5p:2x2x1")
        self.assertEmpty(refusal)
        self.assertLessEqual(quick.score, 1.05 * ranking.plans[0].score)
        least = search.least(quick.config)
        *_, last = search.variants(quick.config)
        self.assertEqual(least, last)

    def test_a_model_that_fits_nowhere_is_refused_with_the_least_need(self):
        config = with_data(LARGE, batch_size=8)
        ranking = planner.make(config, "name", "v5p:2x2x2")
        self.assertEqual(ranking.num_fitting, 0)
        self.assertRegex(
            ranking.refusal, r"fits no mesh of v5p:2x2x2.*has 95\.74 GiB, the least is"
        )
        needed = [plan.needed_gib for plan in ranking.plans]
        self.assertEqual(needed, sorted(needed))
        self.assertIn("none", table.text(ranking))

    def test_chunks_are_the_fastest_that_fit(self):
        """GLM-5 on 512 v5p, fsdp 64 x expert 8: two, not the one that fits first."""
        mesh = config_lib.MeshConfig(fsdp=64, expert=8)
        config = dataclasses.replace(with_data(LARGE, batch_size=512), mesh=mesh)
        plans = [
            planner.estimate(variant, "v5p:8x8x8")
            for variant in search.variants(config)
            if variant.optim == config.optim
        ]
        self.assertTrue(all(plan.fits for plan in plans))
        best = planner._best(config, "v5p:8x8x8")
        self.assertEqual(best.setting.chunks, 2)
        self.assertEqual(best.score, min(plan.score for plan in plans))
        # Products wait while tokens go to their experts and back.
        of = best.roofline.seconds
        self.assertAlmostEqual(best.seconds, max(of["FLOPs"], of["HBM"]) + best.waiting)
        sent = 2 * (4096 * 8 * 6144 * 7 / 8) * ((75 + 3) * 2 + 2 * 75 + 9 + 75 + 6)
        ways = 2 * best.setting.device.link  # expert lies on a ring of 8
        self.assertAlmostEqual(best.waiting, sent / ways, delta=0.01)

    def test_more_chunks_are_taken_where_memory_needs_them(self):
        mesh = config_lib.MeshConfig(fsdp=16, expert=8)
        config = dataclasses.replace(LARGE, mesh=mesh)
        plan = planner._best(config, "v5p:4x4x8")
        limit = slice_devices.Device(plan.setting.device.chip, plan.needed_gib - 1, 4)
        with mock.patch.object(slice_devices, "named", return_value=limit):
            best = planner._best(config, "v5p:4x4x8")
        self.assertGreater(best.setting.chunks, plan.setting.chunks)
        self.assertTrue(best.fits)

    def test_what_all_layers_keep_is_standing(self):
        mesh = config_lib.MeshConfig(fsdp=64, expert=8)
        model = dataclasses.replace(LARGE.model, remat_policy="kernels")
        large = with_data(LARGE, batch_size=512)
        config = dataclasses.replace(large, mesh=mesh, model=model)
        plan = planner.estimate(config, "v5p:8x8x8")
        made = planner.row(plan)["temporaries_gib"]
        self.assertGreater(made["kept results"], 10)
        one = {"fetched weights", "experts", "attention", "hidden states"}
        one |= {"vocabulary", "states of MTP"}
        working = sum(size for name, size in made.items() if name in one)
        ranking = planner.Ranking("name", "v5p:8x8x8", [plan], 1, 1, "")
        head, _, row = re.findall(r"^\|.*$", table.page(ranking, ""), re.MULTILINE)
        shown = dict(zip(head.split(" | "), row.split(" | "), strict=True))
        self.assertAlmostEqual(float(shown["working"]), working, delta=0.06)
        self.assertAlmostEqual(
            float(shown["standing"]), sum(made.values()) - working, delta=0.06
        )

    @KNOWN
    def test_the_first_few_are_compiled_and_the_page_says_so(self):
        line = {"hbm_args_gib": 1.0, "hbm_temp_gib": 2.0, "hbm_total_gib": 3.5}
        line |= {"collective_gib": 7.25, "fits": True}
        made = mock.Mock(line=line)
        with mock.patch.object(report, "make", return_value=made) as compiled:
            ranking = planner.make(SMALL, "name", "v5p:2x2x2", num_verified=2)
            several = {"num_shown": 1, "num_verified": 3}  # what is compiled is shown
            shown = planner.make(SMALL, "name", "v5p:2x2x2", **several).plans
        self.assertEqual(compiled.call_count, 2 + 3)
        self.assertLen([plan for plan in shown if plan.compiled], 3)
        stem = pathlib.Path(self.create_tempdir().full_path) / "plan"
        command = "python -m glm5_jax.plan"
        ranking.write(str(stem), table.page(ranking, command), command)
        page = stem.with_suffix(".md").read_text()
        self.assertEqual(page.count("3.5, sends 7.25"), 2)
        plans = json.loads(stem.with_suffix(".json").read_text())["plans"]
        self.assertEqual(plans[0]["compiled"], line)
        self.assertIsNone(plans[2]["compiled"])


class FullSizeTest(parameterized.TestCase):
    @parameterized.parameters(
        ("glm5_pretrain", "v5p:8x8x8"),
        ("glm5_pretrain_paper", "v5p:8x8x8"),
        ("glm5_mid", "v5p:8x8x8"),
        ("glm5_adapt", "v5p:8x8x8"),
        ("glm5_sft", "v5p:8x8x8"),
        ("glm5_rl_reasoning", "v5p:8x8x8"),
        ("glm5_rl_agentic", "v5p:4x8x8"),
    )
    def test_a_config_fits_the_chips_of_its_own_mesh(self, name, topology):
        arguments = command_line.Arguments(config=str(ROOT / f"configs/{name}.py"))
        plan = planner.estimate(arguments.train_config(), topology)
        self.assertTrue(plan.fits, f"{plan.needed_gib:.1f} GiB")


class MemoryTest(parameterized.TestCase):
    def test_arguments_are_those_of_the_listing(self):
        mesh = config_lib.MeshConfig(data=1, fsdp=4, expert=2, context=2)
        config = dataclasses.replace(SMALL, mesh=mesh)
        listed = arrays.of_program(
            config, slice_devices.abstract_mesh(mesh, "v5p:2x2x4")
        )
        given = [a for a in listed if a.kind not in arrays.MADE_BY_THE_STEP]
        given = [a for a in given if not a.kind.startswith("gradients")]
        sizes = mesh_lib.axis_sizes(mesh, 16)
        s = setting.Setting(config, sizes, slice_devices.named("v5p:2x2x4"))
        self.assertEqual(
            sum(memory.arguments(s).values()), sum(a.device_bytes for a in given)
        )


if __name__ == "__main__":
    environment.main()
