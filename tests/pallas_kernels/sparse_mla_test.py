"""Sparse attention in latent form: definition against a loop, others against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from pallas_kernels import cases, sparse_mla
from tests import environment
from tests.pallas_kernels import program

FLOAT32_RTOL = 2e-5  # two orders of summation in float32; outputs half of it
BFLOAT16_NORM = 1e-2  # of gradients, relative; outputs 4e-3 (spec: 8 bits of mantissa)
BFLOAT16_MOST = 1e-2  # of one output, of the largest


def run(case, implementation, deterministic=False):
    """Outputs, and gradients for q and kv through both outputs."""
    q, kv, indices = cases.make(case, "q_latent", "kv", "indices")
    attend = functools.partial(
        sparse_mla,
        scale=case.scale,
        value_dim=case.latent,
        deterministic=deterministic,
        implementation=implementation,
    )

    def loss(q, kv, indices):
        out, lse = attend(q, kv, indices)
        out32 = out.astype(jnp.float32)
        return jnp.sum(jnp.sin(out32)) + jnp.sum(jnp.cos(lse)), (out, lse)

    grads, (out, lse) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(q, kv, indices)
    return {"out": out, "lse": lse, "dq": grads[0], "dkv": grads[1]}


@functools.cache
def definition(case):
    """Returns what the reference computes, once a process."""
    return run(case, "reference")


@functools.cache
def tiled(case):
    """Returns what plain XLA in tiles computes, once a process."""
    return run(case, "tiled")


def assert_close(got, want, dtype):
    """Element by element in float32, by norm in bfloat16."""
    for name, wanted in want.items():
        g, w = (np.asarray(x, np.float64) for x in (got[name], wanted))
        assert g.shape == w.shape, name
        if dtype == "float32":
            rtol = FLOAT32_RTOL / 2 if name in ("out", "lse") else FLOAT32_RTOL
            np.testing.assert_allclose(g, w, rtol, rtol, err_msg=name)
            continue
        if name == "lse":
            np.testing.assert_allclose(g, w, 1e-5, 1e-5)
            continue
        if name == "out":
            np.testing.assert_allclose(g, w, 0, BFLOAT16_MOST * np.abs(w).max())
        limit = 4e-3 if name == "out" else BFLOAT16_NORM
        error = np.linalg.norm(g - w) / max(np.linalg.norm(w), 1e-9)
        assert error < limit, f"{name}: {error}"


class SparseMlaTest(parameterized.TestCase):
    def test_definition_is_a_loop(self):
        case = cases.SMALL["float32"]
        q, kv, indices = cases.make(case, "q_latent", "kv", "indices")
        args = (q, kv, indices)
        options = {"scale": case.scale, "value_dim": case.latent}
        out, lse = map(
            np.asarray,
            program.call(sparse_mla, *args, implementation="reference", **options),
        )
        indices = np.asarray(indices)
        q, kv = (np.asarray(x, np.float64) for x in (q, kv))
        for b, t, n in np.ndindex(q.shape[:3]):
            rows = kv[b, [i for i in indices[b, t] if i >= 0]]
            scores = case.scale * rows @ q[b, t, n]
            weights = np.exp(scores)
            want = weights @ rows[:, : case.latent] / weights.sum()
            np.testing.assert_allclose(out[b, t, n], want, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(lse[b, n, t], np.log(weights.sum()), rtol=1e-5)

    @parameterized.named_parameters((case.name, case) for case in cases.SMALL.values())
    def test_tiled_equals_definition_with_gradients(self, case):
        assert_close(tiled(case), definition(case), case.dtype)

    def test_a_row_without_keys_is_zero(self):
        case = cases.SMALL["documents"]
        for got in (tiled(case), definition(case)):
            np.testing.assert_array_equal(got["out"][0, -1], 0)
            np.testing.assert_array_equal(got["lse"][0, :, -1], 0)
            np.testing.assert_array_equal(got["dq"][0, -1], 0)


if __name__ == "__main__":
    environment.main()
