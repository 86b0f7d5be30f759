"""Attention to cached rows of bytes, against loops over the numbers that they hold."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import parameterized

from pallas_kernels import block_sizes, cases, decode_sparse_mla, latent_rows
from pallas_kernels.decode import tpu_bytes, tpu_listed
from tests import environment, typecheck
from tests.pallas_kernels import program

KINDS = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "int8": np.int8}
# Two tiles of scales, the second of 8 codes.
CASE = cases.Case(
    "rows", queries=3, keys=96, batch=2, topk=16, heads=4, latent=136, rope=16
)
PAGE = 8
FLOAT32_NORM = 1e-5  # float32 sums in another order
BFLOAT16_NORM = 4e-3  # 8 bits of mantissa


@functools.cache
def make(codes, case=CASE, padding=0):
    """Makes rows of bytes, and the numbers that a loop over their tiles reads."""
    rng = np.random.default_rng(0)
    dtype = jnp.dtype(case.dtype)
    rows, numbers = [], []
    for _ in range(case.batch * case.keys):
        code = (rng.integers(-100, 101, case.latent) / 8).astype(KINDS[codes])
        scales = (10.0 ** rng.uniform(-2, 0, -(-case.latent // 128))).astype("float32")
        kept = rng.normal(size=case.rope).astype(dtype)
        beyond = rng.integers(0, 256, padding, np.uint8)
        parts = code, scales, kept, beyond
        rows.append(np.concatenate([part.view(np.uint8) for part in parts]))
        tiles = [
            (code[128 * i : 128 * (i + 1)].astype("float32") * scale).astype(dtype)
            for i, scale in enumerate(scales)
        ]
        numbers.append(np.concatenate([*tiles, kept]))
    shape = case.batch, case.keys, -1
    return tuple(np.stack(x).reshape(shape) for x in (rows, numbers))


def paged(rows, page=PAGE):
    """Shuffles pages with three of nobody, all NaN in float8; and their table."""
    count = rows.shape[0] * rows.shape[1] // page
    order = np.random.default_rng(0).permutation(count + 3)[:count]
    pages = np.full((count + 3, page, rows.shape[2]), 127, rows.dtype)
    pages[order] = rows.reshape(count, page, -1)
    return jnp.asarray(pages), jnp.asarray(order.reshape(len(rows), -1), jnp.int32)


def make_lists(case=CASE):
    """Makes lists: one with few keys and an entry that names none, one without any."""
    (indices,) = cases.make(case, "indices")
    indices = indices.at[0, 1, 5:].set(-1).at[1, 2].set(-1)
    return indices.at[0, 1, 5].set(case.keys + 7)


def by_hand(case, q, numbers, indices):
    """Loops in float64; output and log-sum-exp."""
    q, numbers = (np.asarray(x, np.float64) for x in (q, numbers))
    out, lse = np.zeros((*q.shape[:3], case.latent)), np.zeros(q.shape[:3])
    for b, t, n in np.ndindex(q.shape[:3]):
        kept = [s for s in np.asarray(indices[b, t]) if 0 <= s < case.keys]
        if kept:
            scores = case.scale * numbers[b, kept] @ q[b, t, n]
            lse[b, t, n] = np.log(np.exp(scores).sum())
            probs = np.exp(scores - lse[b, t, n])
            out[b, t, n] = probs @ numbers[b, kept, : case.latent]
    return out, lse.swapaxes(1, 2)


def check(case, codes, implementation=None, page=None, padding=0):
    """Compares an implementation with the loop."""
    rows, numbers = make(codes, case, padding)
    (q,) = cases.make(case, "q_latent")
    indices = make_lists(case)
    want = by_hand(case, q, numbers, indices)
    rows, table = paged(rows, page) if page else (jnp.asarray(rows), None)
    call = functools.partial(
        decode_sparse_mla,
        scale=case.scale,
        value_dim=case.latent,
        kv_codes=codes,
        implementation=implementation,
    )
    is_interpreted = implementation == "gpu_interpret"
    run = call if is_interpreted else functools.partial(program.call, call)
    for name, g, w in zip(
        ("out", "lse"), run(q, rows, indices, table), want, strict=True
    ):
        assert g.shape == w.shape
        assert g.dtype == (q.dtype if name == "out" else jnp.float32)
        is_rounded = case.dtype == "bfloat16" and name == "out"
        limit = BFLOAT16_NORM if is_rounded else FLOAT32_NORM
        error = np.linalg.norm(np.asarray(g, np.float64) - w)
        assert error <= limit * np.linalg.norm(w), f"{name}: {error}"


class FormTest(parameterized.TestCase):
    @parameterized.product(
        codes=(*KINDS,), dtype=("bfloat16", "float32"), padding=(0, 12)
    )
    def test_numbers_are_those_of_the_loop(self, codes, dtype, padding):
        case = dataclasses.replace(CASE, dtype=dtype)
        rows, numbers = make(codes, case, padding)
        form = case.row_form(codes)
        self.assertEqual(form.width + padding, rows.shape[-1])
        got = form.restored(jnp.asarray(rows))
        self.assertEqual(got.dtype, dtype)
        np.testing.assert_array_equal(got, numbers)

    @parameterized.parameters(*KINDS)
    def test_rows_are_joined_of_their_parts(self, codes):
        rows, _ = make(codes)
        first, scales = rows[..., :136].view(KINDS[codes]), rows[..., 136:144]
        kept = np.ascontiguousarray(rows[..., 144:]).view(ml_dtypes.bfloat16)
        scales = np.ascontiguousarray(scales).view(np.float32)
        got = CASE.row_form(codes).joined(*map(jnp.asarray, (first, scales, kept)))
        np.testing.assert_array_equal(got, rows)

    def test_a_row_of_glm5(self):
        self.assertEqual(cases.full(1).row_form("int8").width, 656)

    def test_nothing_is_kept(self):
        form = latent_rows.Form(3, 0, "int8", "bfloat16")
        row = np.append(np.array([1, 2, 255], np.uint8), np.float32([2]).view(np.uint8))
        np.testing.assert_array_equal(form.restored(jnp.asarray(row)), [2, 4, -2])


class AttentionTest(parameterized.TestCase):
    @parameterized.product(
        codes=(*KINDS,), dtype=("bfloat16", "float32"), page=(None, PAGE)
    )
    def test_outputs_are_those_of_the_loop(self, codes, dtype, page):
        check(dataclasses.replace(CASE, dtype=dtype), codes, page=page, padding=8)

    def test_listed_rows_alone_are_restored(self):
        rows, _ = make("int8")
        pages, table = paged(rows)
        (q,) = cases.make(CASE, "q_latent")
        restored = latent_rows.Form.restored
        with mock.patch.object(
            latent_rows.Form, "restored", autospec=True, side_effect=restored
        ) as plain:
            how = {"scale": 1.0, "value_dim": 136, "kv_codes": "int8"}
            decode_sparse_mla(q, pages, make_lists(), table, **how)
        plain.assert_called_once()
        self.assertEqual(plain.call_args.args[1].shape, (2, 3, 16, rows.shape[-1]))

    @parameterized.parameters(1, 2)
    def test_a_kernel_of_tpus_fetches_each_row_once(self, parts):
        is_key = jnp.arange(200)[None, None] < jnp.array([[150], [0], [200]])[:, None]
        rows = jnp.arange(3 * 200 * 144.0).reshape(3, 1, 200, 144)
        got, groups, is_row = tpu_listed._side_by_side(rows, is_key, parts)
        self.assertEqual((got.shape, got.dtype), ((3 * 256 // 8, 8, 256), rows.dtype))
        got = got.reshape(3, 256, 256)
        np.testing.assert_array_equal(got[:, :200, :144], rows[:, 0])
        chunk = 256 // parts // 8
        self.assertEqual(groups.shape, (3 * parts, 1, chunk))
        np.testing.assert_array_equal(groups.ravel(), range(3 * 256 // 8))
        marks = is_row.reshape(3, 256)
        np.testing.assert_array_equal(marks[:, :200], is_key[:, 0])
        self.assertFalse(np.any(marks[:, 200:]))

    def test_a_kernel_of_tpus_stops_after_the_chunk_of_the_last_key(self):
        is_key = (
            jnp.arange(2048)[None, None] < jnp.array([[1024], [1025], [0]])[:, None]
        )
        rows = jnp.zeros((3, 1, 2048, 128))
        _, groups, _ = tpu_listed._side_by_side(rows, is_key, 1)
        np.testing.assert_array_equal(jnp.sum(groups[:, 0] >= 0, 1), [128, 256, 128])

    @parameterized.parameters(("float8_e4m3fn", "bfloat16", 1), ("int8", "float32", 2))
    def test_a_kernel_of_tpus(self, codes, dtype, cores):
        """Two scales a row; for two cores, three queries in two parts each."""
        case = dataclasses.replace(CASE, latent=256, dtype=dtype)
        if cores == 2:
            case = dataclasses.replace(case, batch=1, queries=3)
        with block_sizes.tried(block_sizes.Tpu(cores=cores)):
            check(case, codes, "tpu_interpret", page=PAGE, padding=8)

    @parameterized.parameters(*KINDS)
    def test_numbers_in_vmem_are_those_of_the_loop(self, codes):
        """All bytes are codes, scales are any float32 and the last lane is filled."""
        rng = np.random.default_rng(0)
        form = latent_rows.Form(256, 126, codes, "bfloat16")
        rows = jnp.asarray(rng.integers(0, 256, (32, 640), np.uint8))
        want = form.restored(rows)
        places = jnp.asarray(tpu_bytes.places(form, 640))
        got = jnp.concatenate(tpu_bytes.restored(rows, places, form), axis=-1)
        as_bits = lambda x: np.where(np.isnan(x), 0, x).view(np.uint16)
        np.testing.assert_array_equal(as_bits(got[:, : 256 + 126]), as_bits(want))
        self.assertFalse(np.any(got[:, 256 + 126 :]))

    def test_tpus_restore_rows_with_too_many_other_numbers_outside_the_kernel(self):
        case = dataclasses.replace(CASE, latent=128, rope=128)
        with self.assertRaisesRegex(NotImplementedError, "128 at most, got 1 and 128"):
            check(case, "int8", "tpu_interpret")

    @parameterized.parameters((0, 3), (2, 0))
    def test_no_queries(self, batch, num_queries):
        rows = jnp.asarray(make("int8")[0])[:batch]
        q = jnp.zeros((batch, num_queries, 4, 152), jnp.bfloat16)
        lists = jnp.zeros((batch, num_queries, 5), jnp.int32)
        how = {"scale": 1.0, "value_dim": 136, "kv_codes": "int8"}
        out, lse = decode_sparse_mla(q, rows, lists, **how)
        self.assertEqual(out.shape, (batch, num_queries, 4, 136))
        self.assertEqual(lse.shape, (batch, 4, num_queries))

    def test_vmap(self):
        rows, _ = map(jnp.asarray, make("int8"))
        (q,) = cases.make(CASE, "q_latent")
        how = {"scale": 0.1, "value_dim": 136, "kv_codes": "int8"}
        run = lambda kv: decode_sparse_mla(q, kv, make_lists(), **how)[0]
        got = jax.vmap(run)(jnp.stack([rows, rows[::-1]]))
        np.testing.assert_array_equal(got[0], run(rows))
        np.testing.assert_array_equal(got[1], run(rows[::-1]))


class ArgumentsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"kv_codes": None}, "kv of uint8 needs kv_codes, .* float8_e4m3fn or int8"),
        ({"kv_codes": "int4"}, "kv_codes must be float8_e4m3fn or int8, got 'int4'"),
        ({"kv": "bfloat16"}, "kv must be uint8, .* got bfloat16; leave kv_codes out"),
        (
            {"width": 175},
            "kv's last axis must have 176 bytes or more, 136 codes, 2 float32 scales "
            "and 16 numbers of q's bfloat16, got 175",
        ),
        ({"q": "float32"}, "kv's .* 208 bytes .* 16 numbers of q's float32, got 176"),
        ({"q": "int32"}, "q must be floats, got int32"),
        ({"value_dim": 153}, "value_dim must be in 1 .. 152"),
        ({"batch": 1}, r"kv must be \[B, s, width\] with B = 2, got \[1, 96, 176\]"),
    )
    def test_what_does_not_fit_is_named(self, change, message):
        rows, _ = map(jnp.asarray, make("int8"))
        (q,) = cases.make(CASE, "q_latent")
        kv = rows[: change.get("batch", 2), :, : change.get("width")]
        how = {"value_dim": 136, "kv_codes": "int8"}
        how |= {name: change[name] for name in how if name in change}
        arrays = {"q": q, "kv": kv}
        arrays |= {n: arrays[n].astype(change[n]) for n in arrays if n in change}
        words = f"decode_sparse_mla: {message}"
        with typecheck.off(), self.assertRaisesRegex(ValueError, words):
            decode_sparse_mla(*arrays.values(), make_lists(), scale=1.0, **how)

    def test_pages_of_bytes_have_a_table_of_their_sequences(self):
        pages, table = paged(make("int8")[0])
        (q,) = cases.make(CASE, "q_latent")
        how = {"scale": 1.0, "value_dim": 136, "kv_codes": "int8"}
        with typecheck.off(), self.assertRaisesRegex(ValueError, "page_table must be"):
            decode_sparse_mla(q, pages, make_lists(), table[:1], **how)


if __name__ == "__main__":
    environment.main()
