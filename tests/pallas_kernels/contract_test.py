"""Wrong shapes raise, and wrong bounds are clamped, whatever implementation runs."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import pallas_kernels as pk
from pallas_kernels import contract, selection
from tests import environment, typecheck
from tests.pallas_kernels import sparse_mla_gpu_test

B, T, S, N, C, R, I, J, K = 1, 4, 50, 8, 128, 64, 8, 128, 16
SHAPES = {
    "q": (B, T, N, C + R),
    "kv": (B, S, C + R),
    "q_heads": (B, T, N, 128),
    "k_heads": (B, S, N, 128),
    "q_index": (B, T, I, J),
    "k_index": (B, S, J),
    "w": (B, T, I),
    "lse": (B, N, T),
    "weight": (B, T),
    "pages": (3, 16, C + R),
    "key_pages": (3, 16, J),
    "x": (20, 16),
    "matrices": (3, 16, 32),
}


def inputs(**changed):
    """Arrays by name, some of another shape."""
    rng = np.random.default_rng(0)
    made = {
        name: jnp.asarray(rng.standard_normal(changed.pop(name, shape)), jnp.float32)
        for name, shape in SHAPES.items()
    }
    rows = [np.sort(rng.choice(S, K, replace=False)) for _ in range(T)]
    made |= {
        "indices": jnp.asarray(np.stack(rows)[None], jnp.int32),
        "lo": jnp.zeros((B, T), jnp.int32),
        "hi": jnp.full((B, T), S, jnp.int32),
        "bits": None,
        "table": jnp.arange(3, dtype=jnp.int32)[None],
        "sizes": jnp.asarray([3, 0, 17], jnp.int32),
        "value_dim": C,
        "topk": K,
    }
    return {**made, **changed}


def sparse_mla(x, **options):
    args = (x["q"], x["kv"], x["indices"])
    return pk.sparse_mla(*args, scale=0.1, value_dim=x["value_dim"], **options)


def dense_attention(x, **options):
    args = [x[n] for n in ("q_heads", "k_heads", "k_heads", "lo", "hi", "bits")]
    return pk.dense_attention(*args, scale=0.1, **options)


def indexer_topk(x, **options):
    args = [x[n] for n in ("q_index", "k_index", "w", "lo", "hi")]
    return pk.indexer_topk(*args, topk=x["topk"], **options)


def indexer_scores_at(x, **options):
    args = [x[n] for n in ("q_index", "k_index", "w", "indices")]
    return pk.indexer_scores_at(*args, **options)


def indexer_kl_loss(x, **options):
    main = (x["q_heads"], x["k_heads"], x["lse"])
    index = (x["q_index"], x["k_index"], x["w"])
    rest = [x[n] for n in ("lo", "hi", "bits", "weight")]
    return pk.indexer_kl_loss(main, index, *rest, scale=0.1, **options)


def sparse_indexer_kl_loss(x, **options):
    main = (x["q"], x["kv"], x["lse"])
    index = (x["q_index"], x["k_index"], x["w"])
    rest = (x["indices"], x["weight"])
    return pk.sparse_indexer_kl_loss(main, index, *rest, scale=0.1, **options)


def decode_indexer_topk(x, **options):
    args = [x[n] for n in ("q_index", "key_pages", "w", "lo", "hi", "table")]
    return pk.decode_indexer_topk(*args, topk=x["topk"], **options)


def decode_sparse_mla(x, **options):
    args = (x["q"], x["pages"], x["indices"], x["table"])
    return pk.decode_sparse_mla(*args, scale=0.1, value_dim=x["value_dim"], **options)


def grouped_matmul(x, **options):
    return pk.grouped_matmul(x["x"], x["matrices"], x["sizes"], **options)


WRONG = {
    "rows_wider_than_queries": (
        sparse_mla,
        {"kv": (B, S, 256)},
        "kv must be .*row = 192",
    ),
    "lists_of_fewer_queries": (
        sparse_mla,
        {"indices": jnp.zeros((B, 3, K), jnp.int32)},
        "indices must be .*T = 4",
    ),
    "lists_of_floats": (
        sparse_mla,
        {"indices": jnp.zeros((B, T, K))},
        "indices must be signed integers",
    ),
    "no_values": (sparse_mla, {"value_dim": 193}, "value_dim must be in 1 .. 192"),
    "empty_lists": (
        indexer_scores_at,
        {"indices": jnp.zeros((B, T, 0), jnp.int32)},
        "indices must have K >= 1",
    ),
    "keys_of_other_heads": (
        dense_attention,
        {"k_heads": (B, S, 4, 128)},
        "k must be .*N = 8",
    ),
    "mask_queries_first": (
        dense_attention,
        {"bits": jnp.ones((B, T, S), bool)},
        "keys first",
    ),
    "more_queries_than_keys": (
        dense_attention,
        {"k_heads": (B, 3, N, 128)},
        "up to 3, got 4",
    ),
    "keys_of_another_dim": (indexer_topk, {"k_index": (B, S, 256)}, "k must be .*J"),
    "weights_of_other_heads": (indexer_topk, {"w": (B, T, 4)}, "w must be .*I = 8"),
    "no_topk": (indexer_topk, {"topk": 0}, "topk must be at least 1"),
    "bounds_of_other_queries": (
        indexer_topk,
        {"hi": jnp.zeros((B, 3), jnp.int32)},
        "hi must be .*T = 4",
    ),
    "log_sum_exp_turned": (
        indexer_kl_loss,
        {"lse": (B, T, N)},
        "main's log-sum-exp must be .*N = 8",
    ),
    "weight_of_other_queries": (
        sparse_indexer_kl_loss,
        {"weight": (B, 3)},
        "weight must be",
    ),
    "pages_of_other_sequences": (
        decode_indexer_topk,
        {"table": jnp.zeros((2, 3), jnp.int32)},
        "page_table must be .*B = 1",
    ),
    "mask_of_the_loss_queries_first": (
        indexer_kl_loss,
        {"bits": jnp.ones((B, T, S), bool)},
        "keys first",
    ),
    "no_topk_in_decoding": (
        decode_indexer_topk,
        {"topk": 0},
        "topk must be at least 1",
    ),
    "no_values_in_decoding": (
        decode_sparse_mla,
        {"value_dim": 0},
        "value_dim must be in 1 .. 192",
    ),
    "no_pages": (
        decode_indexer_topk,
        {"table": jnp.zeros((B, 0), jnp.int32)},
        "n must be at least 1",
    ),
    "pages_of_other_width": (decode_sparse_mla, {"pages": (3, 16, 128)}, "kv must be"),
    "groups_of_other_matrices": (
        grouped_matmul,
        {"sizes": jnp.zeros(2, jnp.int32)},
        "group_sizes must be .*E = 3",
    ),
}


def compiled(op, x, **options):
    """Returns the op of these inputs, computed by one program."""
    arrays = {name: y for name, y in x.items() if isinstance(y, jax.Array)}
    return jax.jit(lambda arrays: op(x | arrays, **options))(arrays)


class StaticTest(parameterized.TestCase):
    @parameterized.named_parameters((name, *case) for name, case in WRONG.items())
    def test_wrong_arguments_are_named(self, op, changed, message):
        x = inputs(**changed)
        with typecheck.off():  # they would speak first
            for name in (None, "reference", "gpu_interpret"):
                with self.assertRaisesRegex(ValueError, f"^{op.__name__}: .*{message}"):
                    jax.eval_shape(lambda: op(x, implementation=name))  # noqa: B023

    def test_lists_are_checked_where_their_values_are_known(self):
        good = jnp.asarray([[[0, 3, 7, -1], [-1, -1, -1, -1]]])
        selection.check_lists(good, 8)
        for row, fault in (
            ([0, 3, 3, -1], "twice or falls"),
            ([0, -1, 3, -1], "-1 before its end"),
            ([0, 3, 8, -1], "beyond the 8 keys"),
            ([-2, -2, -2, -2], "below -1"),
        ):
            with self.assertRaisesRegex(ValueError, rf"\(0, 1\) .*{fault}"):
                selection.check_lists(good.at[0, 1].set(jnp.asarray(row)), 8)


class BoundsTest(parameterized.TestCase):
    def test_a_query_sees_no_key_after_its_own(self):
        """The queries are the last of the tokens: query t is token t + S - T."""
        x = inputs(lo=jnp.asarray([[-3, 0, 7, 49]]), hi=jnp.asarray([[90, 48, 20, 90]]))
        floats = {"q": (x["q_heads"], "B T N H"), "k": (x["k_heads"], "B S N H")}
        known, lo, hi = contract.bounded("op", floats, x["lo"], x["hi"])
        self.assertEqual((known["T"], known["S"]), (T, S))
        np.testing.assert_array_equal(lo, [[0, 0, 7, 49]])
        np.testing.assert_array_equal(hi, [[47, 48, 20, 50]])

    def test_a_list_names_keys_that_there_are(self):
        rows = jnp.asarray([[[0, S - 1, S, S + 10]] * T])
        floats = {"kv": (inputs()["kv"], "B S row")}
        _, got = contract.listed("op", floats, rows, is_sorted=True)
        np.testing.assert_array_equal(got, [[[0, S - 1, -1, -1]] * T])
        self.assertEqual(got.dtype, jnp.int32)

    def test_counts_and_values_at_their_limits(self):
        contract.positive("op", topk=1)
        for size in (1, 7):
            contract.value_dim("op", size, 7)
        for size in (0, 8):
            with self.assertRaisesRegex(ValueError, r"in 1 \.\. 7, got"):
                contract.value_dim("op", size, 7)

    def test_groups_end_with_the_rows(self):
        sizes = contract.groups(jnp.asarray([3, -2, 0, 9, 4]), 10)
        np.testing.assert_array_equal(sizes, [3, 0, 0, 7, 0])


def beyond(x):
    """Bounds and lists that name keys that there are not."""
    rows = x["indices"]
    cut = {"lo": x["lo"] - 3, "hi": x["hi"] + 90, "sizes": x["sizes"] + 1}
    return x | cut | {"indices": rows.at[:, :, -1].set(S + 10)}


def cut(x):
    """The same as the contract reads it."""
    ends = S - T + 1 + np.arange(T)[None]
    sizes = {"sizes": jnp.asarray([4, 1, 15])}
    lists = x["indices"].at[:, :, -1].set(-1)
    return x | sizes | {"hi": jnp.asarray(ends, jnp.int32), "indices": lists}


def tangled(rng, rows, num_keys):
    """Returns lists of the same sets of keys in a form that no kernel can read.

    Half of each list's keys come again, and entries of no key stand between them.
    """
    again = [rng.choice(row[row >= 0], (row >= 0).sum() // 2) for row in rows]
    none = rng.choice([-1, -7, num_keys, num_keys + 9], (len(rows), 6))
    lists = [np.concatenate(parts) for parts in zip(rows, again, none, strict=True)]
    return np.stack([rng.permutation(row) for row in lists])


class ListsTest(parameterized.TestCase):
    """Ops put lists in order for their kernels, unless the caller says they are."""

    @parameterized.parameters((1, 1), (5, 40), (64, 40), (40, 40))
    def test_lists_are_put_in_order(self, num_entries, num_keys):
        rng = np.random.default_rng(0)
        given = rng.integers(-5, num_keys + 5, (2, 3, num_entries))
        got = jax.jit(selection.as_sorted, static_argnums=1)(given, num_keys)
        selection.check_lists(got, num_keys)
        for g, x in zip(got.reshape(6, -1), given.reshape(6, -1), strict=True):
            keys = sorted({*x.tolist()} & {*range(num_keys)})
            want = keys + [-1] * (num_entries - len(keys))
            np.testing.assert_array_equal(g, want)

    @parameterized.parameters("tiled", "reference", "gpu_interpret")
    def test_a_list_is_a_set(self, name):
        if name == "gpu_interpret" and not sparse_mla_gpu_test.CAN_INTERPRET:
            self.skipTest("needs triton, torch and TRITON_INTERPRET=1")
        rng, x = np.random.default_rng(0), inputs()
        rows = np.array(x["indices"][0])
        rows = tangled(rng, rows, S)[None]
        ordered = {"indices": selection.as_sorted(jnp.asarray(rows), S)}
        self.assertEqual(int((ordered["indices"] >= 0).sum()), T * K)

        def results(x, **options):
            how = {"implementation": name, **options}

            def attended(q, kv):
                out, lse = sparse_mla(x | {"q": q, "kv": kv}, **how)
                return jnp.sum(jnp.sin(out)) + jnp.sum(lse), (out, lse)

            def divergence(q, k):
                return sparse_indexer_kl_loss(x | {"q_index": q, "k_index": k}, **how)

            found = [
                jax.value_and_grad(attended, (0, 1), has_aux=True)(x["q"], x["kv"]),
                jax.value_and_grad(divergence, (0, 1))(x["q_index"], x["k_index"]),
            ]
            if name != "tiled":
                found.append(decode_sparse_mla(x, **how))
            return found

        got = compiled(results, x | {"indices": jnp.asarray(rows)})
        want = compiled(results, x | ordered, indices_are_sorted=True)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            self.assertGreater(np.abs(w).max(), 0)
            np.testing.assert_array_equal(g, w)

    @parameterized.parameters("tiled", "reference", "gpu_interpret")
    def test_scores_of_lists_follow_their_entries(self, name):
        """In any order, keys that come again included; entries of no key score 0."""
        if name == "gpu_interpret" and not sparse_mla_gpu_test.CAN_INTERPRET:
            self.skipTest("needs triton, torch and TRITON_INTERPRET=1")
        x = inputs()
        rows = tangled(np.random.default_rng(0), np.array(x["indices"][0]), S)
        q, k, w = (np.float64(x[n][0]) for n in ("q_index", "k_index", "w"))
        all_scores = np.einsum("ti,tsi->ts", w, np.maximum(q @ k.T, 0).swapaxes(1, 2))
        is_key = (rows >= 0) & (rows < S)
        want = np.take_along_axis(all_scores, np.where(is_key, rows, 0), 1) * is_key
        # The gradient of a sum of squares in the keys, from the scores by hand.
        slopes = np.zeros_like(all_scores)
        np.add.at(slopes, (np.arange(T)[:, None], np.where(is_key, rows, 0)), 2 * want)
        active = w[:, :, None] * (q @ k.T > 0)
        d_keys = np.einsum("ts,tis,tij->sj", slopes, active, q)

        def squares(k, x):
            got = indexer_scores_at(x | {"k_index": k}, implementation=name)
            return jnp.sum(got**2), got

        lists = x | {"indices": jnp.asarray(rows)[None]}
        run = jax.value_and_grad(squares, has_aux=True)
        (_, got), d_k = compiled(lambda x: run(x["k_index"], x), lists)
        np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(d_k[0], d_keys, rtol=1e-3, atol=1e-2)


class EmptyTest(parameterized.TestCase):
    @parameterized.parameters(None, "tiled")
    def test_no_queries_give_nothing_with_gradients(self, name):
        none = {"indices": jnp.zeros((B, 0, K), jnp.int32)}
        none |= {n: jnp.zeros((B, 0), jnp.int32) for n in ("lo", "hi")}
        for shape in ("q", "q_heads", "q_index", "w", "weight"):
            none[shape] = (B, 0, *SHAPES[shape][2:])
        x = inputs(lse=(B, N, 0), **none)
        run = functools.partial(compiled, implementation=name)
        out, lse = run(sparse_mla, x)
        self.assertEqual((out.shape, lse.shape), ((B, 0, N, C), (B, N, 0)))
        self.assertEqual(run(dense_attention, x)[0].shape, (B, 0, N, 128))
        self.assertEqual(run(indexer_topk, x).shape, (B, 0, K))
        self.assertEqual(run(indexer_scores_at, x).shape, (B, 0, K))

        def loss(q, k):
            y = x | {"q_index": q, "k_index": k}
            losses = indexer_kl_loss, sparse_indexer_kl_loss
            return sum(op(y, implementation=name) for op in losses)

        gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))
        value, (dq, dk) = gradients(x["q_index"], x["k_index"])
        self.assertEqual((float(value), dq.shape), (0, (B, 0, I, J)))
        np.testing.assert_array_equal(dk, 0)
        if name is None:
            decoded = (
                compiled(decode_sparse_mla, x)[0],
                compiled(decode_indexer_topk, x),
            )
            self.assertEqual([len(y[0]) for y in decoded], [0, 0])
            empty = x | {"x": jnp.zeros((0, 16)), "sizes": jnp.zeros(3, jnp.int32)}
            self.assertEqual(compiled(grouped_matmul, empty).shape, (0, 32))


class ValueDimTest(parameterized.TestCase):
    @parameterized.parameters((1, True), (192, True), (0, False), (193, False))
    def test_values_are_some_or_all_of_a_row(self, size, is_right):
        wrong = self.assertRaisesRegex(ValueError, f"in 1 .. 192, got {size}")
        with contextlib.nullcontext() if is_right else wrong:
            contract.value_dim("op", size, 192)


class ClampTest(parameterized.TestCase):
    @parameterized.parameters(
        (None, (sparse_mla, dense_attention, indexer_topk, grouped_matmul)),
        (
            "gpu_interpret",
            (
                sparse_mla,
                dense_attention,
                indexer_topk,
                decode_sparse_mla,
                grouped_matmul,
            ),
        ),
    )
    def test_indices_of_no_key_count_as_nothing(self, name, ops):
        if name == "gpu_interpret" and not sparse_mla_gpu_test.CAN_INTERPRET:
            self.skipTest("needs triton, torch and TRITON_INTERPRET=1")
        x = inputs()
        for op in ops:
            got = compiled(op, beyond(x), implementation=name)
            want = compiled(op, cut(x), implementation="reference")
            for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    environment.main()
