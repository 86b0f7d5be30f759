"""Checks that the engine draws the same on meshes of 8 devices as on one device."""

import dataclasses
import functools
import re
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.inference import engine, placement, scheduler, steps
from glm5_jax.inference.limits import Limits
from glm5_jax.model import cached, transformer
from tests import environment
from tests.inference import fewer_programs
from tests.model import tiny

LOGPROB_ATOL = 1e-5  # float32 sums in another order
# Sparse attention in decoding and in chunks: a cache of 64 against 6 selected keys.
TINY = tiny.model(
    vocab_size=96,
    num_hidden_layers=2,
    kv_lora_rank=16,
    num_nextn_predict_layers=0,
    max_position_embeddings=128,
)
# With an indexer and experts; dense layers on a mesh are in commands_mesh_test.py.
ONE_LAYER = dataclasses.replace(TINY, num_hidden_layers=1, first_k_dense_replace=0)
EXCHANGE = dataclasses.replace(TINY, expert_transport="exchange")
ROUNDS = dataclasses.replace(TINY, expert_transport="rounds")
SHARED = tiny.index_share(vocab_size=96, kv_lora_rank=16, num_nextn_predict_layers=0)
DRAFTING = dataclasses.replace(
    SHARED, num_nextn_predict_layers=1, index_share_for_mtp_iteration=True
)
ATTENTION = tiny.variants(vocab_size=96, kv_lora_rank=16, num_nextn_predict_layers=0)
COMPILES = re.compile(r"Compiling jit\((prefill|decode)\)")
OPTIONS = {"capacity": 64, "chunk": 16, "num_steps": 5, "seed": 3}


def make_mesh(**axes):
    return mesh_lib.make_mesh(config_lib.MeshConfig(**({"data": 1} | axes)))


def make_requests():
    """Makes more requests than slots; every third is greedy, two have a filter."""
    rng = np.random.default_rng(0)
    lengths = (5, 33, 2, 11, 19, 7, 1, 40, 16, 3, 23)
    options = [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_p": 0.9}]
    return [
        engine.Request(
            id=i,
            prompt=rng.integers(1, TINY.vocab_size, n).tolist(),
            max_new_tokens=4 + i,
            **options[i % 3],
        )
        for i, n in enumerate(lengths)
    ]


def run_all(machine, requests):
    for request in requests:
        machine.submit(request)
    done = {}
    while machine.num_pending:
        done |= machine.step()
    return done


@functools.cache
def on_one_device(config):
    """One request after another, as a slot has fewer programs than four have."""
    machine = engine.Engine(
        tiny.params(config), config, num_slots=1, with_experts=True, **OPTIONS
    )
    return run_all(machine, make_requests())


class MeshCase(parameterized.TestCase):
    def check(self, config, num_slots=8, limits=Limits(), **axes):  # noqa: B008
        wanted = on_one_device(config)
        mesh = make_mesh(**axes)
        params = jax.device_get(tiny.params(config))  # numpy cuts without programs
        params = jax.device_put(params, placement.params(params, config, mesh))
        with jax.set_mesh(mesh), fewer_programs.of_all_rows():
            machine = engine.Engine(
                params,
                config,
                num_slots=num_slots,
                with_experts=True,
                limits=limits,
                **OPTIONS,
            )
        with jax.log_compiles(), self.assertLogs("jax", "WARNING") as logs:
            found = run_all(machine, make_requests())  # the engine knows its mesh
        programs = [r for r in logs.output if COMPILES.search(r)]
        self.assertBetween(len(programs), 3, machine.max_programs)
        self.assertEqual(found.keys(), wanted.keys())
        for i, completion in wanted.items():
            self.assertEqual(found[i].tokens, completion.tokens, i)
            np.testing.assert_allclose(
                found[i].logprobs, completion.logprobs, atol=LOGPROB_ATOL, rtol=0
            )
            np.testing.assert_array_equal(
                np.sort(found[i].experts), np.sort(completion.experts)
            )


class MeshTest(MeshCase):
    def test_fsdp_expert_tensor(self):
        self.check(ONE_LAYER, fsdp=2, expert=2, tensor=2)


@pytest.mark.slow
class OtherMeshesTest(MeshCase):
    @parameterized.parameters(
        {"data": 8},
        {"expert": 8},
        {"tensor": 4, "fsdp": 2},
        {"context": 4, "expert": 2},
    )
    def test_all(self, **axes):
        self.check(TINY, **axes)

    def test_pages(self):
        """Each device has pages of its own, for one longest sequence at most."""
        limits = Limits(num_pages=32, page_size=8)
        self.check(TINY, limits=limits, data=2, fsdp=2, tensor=2)

    def test_few_slots_of_each_device(self):
        self.check(TINY, num_slots=32, data=2, expert=2, tensor=2)

    @parameterized.parameters(0, 32)
    def test_drafts(self, num_pages):
        limits = Limits(
            num_drafts=3, adapts_drafts=False, num_pages=num_pages, page_size=8
        )
        self.check(DRAFTING, limits=limits, fsdp=2, expert=2, tensor=2)

    @parameterized.named_parameters(
        ("exchange", EXCHANGE, {"expert": 4, "fsdp": 2}),
        ("rounds", ROUNDS, {"expert": 8}),
        ("shared_index", SHARED, {"expert": 2, "tensor": 4}),
        ("attention", ATTENTION, {"fsdp": 2, "expert": 2, "tensor": 2}),
    )
    def test_variants(self, config, axes):
        self.check(config, **axes)


class PlacementTest(parameterized.TestCase):
    def test_devices_of_the_tensor_axis_share_cached_heads(self):
        """Latents, which all heads read, are on each of them."""
        mesh = make_mesh(fsdp=4, tensor=2)
        empty = functools.partial(steps.empty, ATTENTION, 8, 64, 1)
        leaves, _ = placement.shapes(empty, mesh)
        specs = {
            name: tuple(leaves[f"cache.entries.{name}"].sharding.spec)
            for name in ("kv", "k", "state")
        }
        self.assertEqual(specs["kv"][:2], (None, "fsdp"))
        self.assertEqual(specs["k"], (None, "fsdp", None, "tensor"))
        self.assertEqual(specs["state"], (None, "fsdp", "tensor"))

    def test_slots_must_be_divisible(self):
        wanted = "got 6 on 4; set it to 4 or 8, or give devices to mesh.tensor"
        with (
            jax.set_mesh(make_mesh(expert=4, tensor=2)),
            self.assertRaisesRegex(config_lib.InputError, wanted),
        ):
            engine.Engine({}, TINY, num_slots=6, capacity=64)

    @parameterized.parameters("expert", "fsdp")
    def test_a_context_axis_holds_slots_and_weights_stay(self, axis):
        mesh = make_mesh(context=2, tensor=2, **{axis: 2})
        other = placement.engine_mesh(mesh)
        self.assertEqual(placement.num_shares(other), 4)
        shapes = transformer.abstract_params(TINY)
        trained = placement.params(shapes, TINY, mesh)
        served = placement.params(shapes, TINY, other)

        def same(array, a, b):
            a, b = (x.devices_indices_map(array.shape) for x in (a, b))
            self.assertEqual(a, b)

        jax.tree.map(same, shapes, trained, served)

    def test_requests_spread_over_devices(self):
        machine = scheduler.Scheduler(8, 16, num_devices=4, prefill_tokens=16)
        for request in make_requests()[:5]:
            machine.submit(request)
        devices = [part.slot.device for part in machine.plan(0).parts]
        self.assertEqual(sorted(devices), [0, 0, 1, 2, 3])

    def test_only_the_arrays_of_slots_are_cut(self):
        mesh = make_mesh(fsdp=4, tensor=2)
        shapes, _ = placement.shapes(lambda: steps.empty(TINY, 8, 64, 4), mesh)
        for name, x in shapes.items():
            rows = 1 if name.startswith("cache.entries.") else 0
            local = list(x.shape)
            local[rows] //= 4
            self.assertEqual(x.sharding.shard_shape(x.shape), tuple(local), name)

    def test_slots_are_a_power_of_two_on_each_device(self):
        numbers = [placement.least_slots(n) for n in range(1, 10)]
        self.assertEqual(numbers, [1, 2, 4, 4, 8, 8, 8, 8, 16])
        with jax.set_mesh(make_mesh(fsdp=2, expert=2, tensor=2)):
            numbers = [placement.least_slots(n) for n in (1, 4, 5, 9)]
        self.assertEqual(numbers, [4, 4, 8, 16])

    @parameterized.parameters(1, 2)
    def test_a_mesh_of_one_device_shards_nothing(self, count):
        sizes, seen = config_lib.MeshConfig(data=1, tensor=count), []
        mesh = mesh_lib.make_mesh(sizes, jax.devices()[:count])
        state = steps.empty(TINY, 2, 64, 1)
        params = transformer.abstract_params(TINY)
        if count == 1:  # as an engine decodes with them
            params = jax.eval_shape(lambda p: cached.unstacked(p, TINY), params)

        def local(params, state):
            seen.append(params["lm_head"].shape)
            return state, state.tokens

        with jax.set_mesh(mesh):
            self.assertEqual(placement.in_use() is None, count == 1)
            run = placement.on_shards(local, TINY, placement.ROWS)
            jax.eval_shape(lambda params: run(params, state)[1], params)
        self.assertEqual(np.prod(seen[0]) * count, np.prod(params["lm_head"].shape))

    def test_arrays_of_several_processes_hold_the_same(self):
        """Where a process has some of the devices only, no array is put whole."""
        mesh = make_mesh(fsdp=8)
        tree = {
            "numbers": np.arange(16).reshape(8, 2),
            "keys": jax.random.split(jax.random.key(3), 8),
        }
        wanted = placement.rows(tree, mesh)
        partly = mock.PropertyMock(return_value=False)
        kind = jax.sharding.NamedSharding
        with mock.patch.object(kind, "is_fully_addressable", partly):
            placed = placement.rows(tree, mesh)
            numbers = placement.fetched({"numbers": placed["numbers"]})
        np.testing.assert_array_equal(numbers["numbers"], tree["numbers"])
        for name, want in wanted.items():
            self.assertEqual(placed[name].sharding, want.sharding)
        draws = [jax.random.uniform(x["keys"][5]) for x in (placed, tree)]
        self.assertEqual(*draws)


if __name__ == "__main__":
    environment.main()
