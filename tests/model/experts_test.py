"""Experts on several devices, reached in both ways, against one device."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax import lax
from jax.sharding import PartitionSpec

from glm5_jax import collectives, sharding
from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.model import (
    expert_exchange,
    expert_rounds,
    expert_rows,
    experts,
    layers,
    moe,
)
from tests import environment, tpus
from tests.model import tiny

CONFIG = tiny.model()
B, T, K, E = 8, 6, CONFIG.num_experts_per_tok, CONFIG.n_routed_experts
ATOL = 1e-5  # float32 sums in another order, of values of order 1


def make_inputs(load):
    """Parameters, hidden states, choices and gates; of some loads most are uneven."""
    rng = np.random.default_rng(0)
    params = tiny.params(CONFIG)["mtp"]["block"]["mlp"]["experts"]
    x = rng.normal(size=(B, T, CONFIG.hidden_size))
    gates = rng.uniform(0.1, 1, (B, T, K))
    chosen = {
        "random": np.argsort(rng.random((B, T, E)))[..., :K],
        "all_to_one_device": np.broadcast_to(np.arange(K), (B, T, K)),
    }[load]
    return params, jnp.float32(x), jnp.asarray(chosen % E), jnp.float32(gates)


def loss(run, params, x, chosen, gates):
    y = run(params, x, chosen, gates)
    return jnp.sum(jnp.sin(y)), y


@functools.cache
def gradients(config):
    """The gradient of the loss, on the mesh in use; compiled once for all loads."""

    def run(params, x, chosen, gates):
        return experts.run(params, config, x, chosen, gates)

    rows, stacks = sharding.spec(("B", "T")), PartitionSpec("expert")
    local = collectives.on_shards(run, (stacks, rows, rows, rows), rows)
    both = functools.partial(loss, local)
    return jax.jit(jax.grad(both, argnums=(0, 1, 3), has_aux=True))


class Chunked(parameterized.TestCase):
    """Tests whose texts of a few tokens are cut as long ones are."""

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(experts, "_FEW_NEW", 1))


class ChunksTest(Chunked):
    def test_texts_of_any_length_are_read(self):
        """5 tokens have no 4 parts, 6 have two: the same numbers as in one."""
        params, x, chosen, gates = make_inputs("random")
        chunked = dataclasses.replace(CONFIG, expert_chunks=4)
        for length in (5, 6):
            inputs = (y[:1, :length] for y in (x, chosen, gates))
            x_, chosen_, gates_ = inputs
            run = jax.jit(experts.run, static_argnums=1)
            want = run(params, CONFIG, x_, chosen_, gates_)
            got = run(params, chunked, x_, chosen_, gates_)
            np.testing.assert_allclose(got, want, rtol=ATOL, atol=ATOL)

    def test_single_tokens_are_never_cut_into_parts(self):
        """They are few: parts would read the experts' weights several times."""
        params, x, chosen, gates = make_inputs("random")
        chunked = dataclasses.replace(CONFIG, expert_chunks=4, batch_invariant=True)
        for length, is_cut in ((1, False), (2, True)):
            inputs = (y[:, :length] for y in (x, chosen, gates))
            wrapped = mock.patch.object(experts, "_in_chunks", wraps=experts._in_chunks)
            with wrapped as in_chunks:
                jax.eval_shape(functools.partial(experts.run, params, chunked), *inputs)
            self.assertEqual(in_chunks.called, is_cut)


class DecodingTest(parameterized.TestCase):
    @parameterized.parameters((8, False), (9, True))
    def test_up_to_eight_drafts_are_not_cut_into_parts(self, length, is_cut):
        params, x, chosen, gates = make_inputs("random")
        longer = (
            jnp.concatenate([y, y], axis=1)[:, :length] for y in (x, chosen, gates)
        )
        chunked = dataclasses.replace(CONFIG, expert_chunks=2)
        wrapped = mock.patch.object(experts, "_in_chunks", wraps=experts._in_chunks)
        with wrapped as in_chunks:
            jax.eval_shape(functools.partial(experts.run, params, chunked), *longer)
        self.assertEqual(in_chunks.called, is_cut)

    @parameterized.named_parameters(
        ("one_token_of_each", 32, 1, None, True),
        ("too_many_tokens", 33, 1, None, False),
        ("two_tokens_of_each", 8, 2, None, False),
        ("batch_invariant", 32, 1, True, False),
    )
    def test_few_tokens_run_expert_by_expert(self, batch, length, invariant, is_so):
        """They sum in another order, which batch_invariant forbids."""
        config = dataclasses.replace(CONFIG, batch_invariant=invariant)
        params, *_ = make_inputs("random")
        x = jnp.zeros((batch, length, CONFIG.hidden_size))
        chosen = jnp.zeros((batch, length, K), jnp.int32)
        with mock.patch.object(experts, "in_turn", wraps=experts.in_turn) as in_turn:
            run = functools.partial(experts.run, params, config)
            jax.eval_shape(run, x, chosen, chosen.astype(jnp.float32))
        self.assertEqual(in_turn.called, is_so)

    @parameterized.parameters("random", "absent")
    def test_equals_a_loop(self, load):
        """A token without an expert, as padding, gets nothing of it."""
        params, x, chosen, gates = make_inputs("random")
        rows, chosen = x.reshape(-1, x.shape[-1]), np.array(chosen.reshape(-1, K))
        gates = gates.reshape(-1, K)
        if load == "absent":
            chosen[::2] = E
        want = np.zeros(rows.shape)
        stacks = {k: np.float64(v) for k, v in params.items()}
        for t, of_token in enumerate(chosen):
            for k, e in enumerate(of_token):
                if e < E:
                    gate = np.float64(rows[t]) @ stacks["gate_proj"][e]
                    up = np.float64(rows[t]) @ stacks["up_proj"][e]
                    hidden = gate / (1 + np.exp(-gate)) * up
                    want[t] += float(gates[t, k]) * (hidden @ stacks["down_proj"][e])
        got = jax.jit(experts.in_turn)(params, rows, jnp.asarray(chosen), gates)
        np.testing.assert_allclose(got, want, rtol=ATOL, atol=ATOL)


class TransportTest(Chunked):
    @parameterized.product(
        transport=("gather", "rounds", "exchange"),
        load=("random", "all_to_one_device"),
    )
    def test_equals_one_device(self, transport, load):
        policy = "experts" if transport == "exchange" else "none"  # side by side
        config = dataclasses.replace(
            CONFIG,
            expert_transport=transport,
            expert_chunks=2,
            remat_policy=policy,
        )
        inputs = make_inputs(load)
        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, expert=4))
        want = gradients(CONFIG)(*inputs)
        with jax.set_mesh(mesh):
            got = gradients(config)(*inputs)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=ATOL, atol=ATOL),
            got,
            want,
        )

    @parameterized.parameters(
        ("gather", 1, None),
        ("gather", 2, None),
        ("gather", 4, None),
        ("rounds", 1, None),
        ("rounds", 2, 24),
        ("rounds", 4, 32),
        ("exchange", 4, 32),
    )
    def test_all_but_gather_have_a_bounded_buffer(self, transport, num_devices, size):
        """12 rows a device, and four times their root: 25.9, in tiles of 8."""
        config = dataclasses.replace(CONFIG, expert_transport=transport)
        inputs = make_inputs("random")
        mesh = mesh_lib.make_mesh(
            config_lib.MeshConfig(data=8 // num_devices, expert=num_devices)
        )
        wrapped = mock.patch.object(expert_rounds, "summed", wraps=expert_rounds.summed)
        with jax.set_mesh(mesh), wrapped as summed:
            jax.eval_shape(lambda *x: gradients.__wrapped__(config)(*x), *inputs)
        found = {call.args[0].args[0] for call in summed.call_args_list}
        self.assertEqual(found, {size} - {None})


def ragged(rows, empty, starts, sent, landing, got, *, axis_name):
    """Does what lax.ragged_all_to_all does, which XLA on CPU lacks."""
    everyone = functools.partial(lax.all_gather, axis_name=axis_name)
    rows, starts, sent, landing = map(everyone, (rows, starts, sent, landing))
    me, out = lax.axis_index(axis_name), empty
    place = jnp.arange(rows.shape[1])
    for device in range(len(rows)):
        size = sent[device, me]
        source = jnp.minimum(starts[device, me] + place, rows.shape[1] - 1)
        target = jnp.where(place < size, landing[device, me] + place, len(empty))
        out = out.at[target].set(rows[device][source], mode="drop")
    return jnp.where(jnp.sum(got) == jnp.sum(sent[:, me]), out, jnp.nan)


class ExchangeTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("all_fit", 9, 0), ("first_round", 3, 0), ("second_round", 3, 1)
    )
    def test_a_round_takes_the_next_rows_of_each_receiver(self, room, number):
        """By both ways: that of TPUs and GPUs, with its offsets, and that of CPUs.

        counts[i, e]: rows of device i for expert e, of which a device has two.
        """
        counts = np.random.default_rng(3).integers(0, 3, (4, 8))
        sizes = counts.reshape(4, 4, 2).sum(2)
        rows = np.arange(4 * 17 * 3.0).reshape(4, 17, 3)
        pieces = [np.split(rows[i], np.cumsum(sizes[i])) for i in range(4)]
        own = PartitionSpec("expert")

        def local(rows, counts):
            moves = expert_exchange._moves(counts, number * room, room)
            there = expert_exchange._exchange(rows, moves, room)
            back = expert_exchange._exchange(there, moves.reversed(), len(rows))
            return there, back

        mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, expert=4))
        args = jnp.float32(rows.reshape(-1, 3)), jnp.asarray(counts)
        with jax.set_mesh(mesh):
            specs = (own, PartitionSpec()), (own, own)
            found = [jax.jit(collectives.on_shards(local, *specs))(*args)]
            with (
                mock.patch.object(
                    expert_exchange.dispatch, "platform", return_value="tpu"
                ),
                mock.patch.object(lax, "ragged_all_to_all", ragged),
            ):
                run = collectives.on_shards(lambda *x: local(*x), *specs)
                found.append(jax.jit(run)(*args))
        taken = np.zeros_like(rows)
        for there, back in found:
            there = np.asarray(there).reshape(4, room, 3)
            for j in range(4):
                lined_up = np.concatenate([pieces[i][j] for i in range(4)])
                want = lined_up[number * room :][:room]
                np.testing.assert_array_equal(there[j, : len(want)], want)
                self.assertTrue((there[j, len(want) :] == 0).all())
            taken = np.asarray(back).reshape(rows.shape)
            is_back = (taken == rows).all(-1) & (rows != 0).any(-1)
            self.assertEqual(is_back.sum(), (there != 0).any(-1).sum())
            self.assertTrue((taken[~is_back] == 0).all())


class WholeTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"data": 8}, True),
        ({"expert": 4, "tensor": 2}, True),  # each has experts, or widths, of its own
        ({"fsdp": 2, "data": 4}, False),
    )
    def test_matrices_of_experts_are_whole_unless_they_are_gathered(self, axes, wanted):
        found = []
        with jax.set_mesh(mesh_lib.make_mesh(config_lib.MeshConfig(**axes))):
            run = collectives.on_shards(
                lambda: found.append(experts.are_whole()), (), None
            )
            jax.eval_shape(run)
        self.assertEqual(found, [wanted])


class OrderTest(parameterized.TestCase):
    @parameterized.parameters((2**24, 127, True), (2**24, 128, False))
    def test_keys_are_packed_where_they_fit_31_bits(self, size, num_experts, is_packed):
        chosen = jax.ShapeDtypeStruct((size,), jnp.int32)
        program = jax.make_jaxpr(lambda x: expert_rows._argsort(x, num_experts))(chosen)
        self.assertEqual(" mul " in str(program), is_packed)


class PaddingTest(parameterized.TestCase):
    wanted = None  # on one device; the first test computes it

    @parameterized.parameters("gather", "rounds", "exchange")
    def test_it_takes_no_room_from_tokens(self, transport):
        """4 of 5 positions are padding, replayed as expert 0; a device has one."""
        config = dataclasses.replace(CONFIG, expert_transport=transport)
        layer = tiny.params(CONFIG)["mtp"]["block"]["mlp"]
        _, x, chosen, _ = make_inputs("random")
        is_token = np.random.default_rng(1).random((B, T)) < 0.2
        chosen = jnp.where(is_token[..., None], chosen, 0)

        def run(config, params, x, is_token, chosen):
            y, routing = moe.moe(params, config, x, is_token, chosen)
            return y, routing.load

        def loss(local, params, x):
            y, load = local(params, x, jnp.asarray(is_token), chosen)
            return jnp.sum(jnp.sin(y) * is_token[..., None]), (y, load)

        rows, whole = sharding.spec(("B", "T")), PartitionSpec()
        places = jax.tree.map(lambda _: whole, layer)
        places["experts"] = PartitionSpec("expert")
        specs = (places, rows, rows, rows), (rows, whole)

        def result(config):
            local = collectives.on_shards(functools.partial(run, config), *specs)
            gradient = jax.grad(functools.partial(loss, local), (0, 1), has_aux=True)
            return jax.device_get(jax.jit(gradient)(layer, x))

        want = self.__class__.wanted = self.wanted or result(CONFIG)
        with jax.set_mesh(mesh_lib.make_mesh(config_lib.MeshConfig(expert=8))):
            got = result(config)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=ATOL, atol=ATOL),
            got,
            want,
        )
        (_, (y, load)) = want
        self.assertEqual(load.sum(), K * is_token.sum())
        shared = jax.jit(layers.swiglu)(layer["shared_experts"], x)
        np.testing.assert_allclose(y[~is_token], shared[~is_token], atol=ATOL)


@pytest.mark.aot
class TpuTest(parameterized.TestCase):
    def test_rows_travel_by_ragged_exchanges(self):
        """There and back, and both again for the gradient."""
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")
        config = dataclasses.replace(
            CONFIG, expert_transport="exchange", hidden_size=256, dtype="bfloat16"
        )
        mesh = mesh_lib.make_mesh(
            config_lib.MeshConfig(data=1, expert=4), mesh_lib.topology("v5p:2x2x1")
        )
        rows, stacks = sharding.spec(("B", "T")), PartitionSpec("expert")

        def shape(*sizes, dtype=jnp.bfloat16, spec=rows):
            where = jax.NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

        d, f = config.hidden_size, 128
        names = ("gate_proj", "up_proj", "down_proj")
        params = {n: shape(E, d, f, spec=stacks) for n in names[:2]}
        params["down_proj"] = shape(E, f, d, spec=stacks)
        args = params, shape(B, 16, d), shape(B, 16, K, dtype=jnp.int32)
        args = *args, shape(B, 16, K)

        with jax.set_mesh(mesh), environment.optimized():
            lowered = gradients(config).lower(*args)
            compiled = lowered.compile()
        self.assertEqual(lowered.as_text().count("ragged_all_to_all"), 4)
        try:
            text = compiled.as_text()
        except jax.errors.JaxRuntimeError:
            self.skipTest("this libtpu cannot print programs of this jax")
        self.assertIn("ragged-all-to-all", text)


if __name__ == "__main__":
    environment.main()
