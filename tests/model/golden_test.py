"""The model against transformers' GlmMoeDsa (tests/golden/make_golden.py).

Its greedy continuations are compared in tests/inference/engine_test.py.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from glm5_jax.model import mtp, transformer
from glm5_jax.weights import huggingface
from tests import environment
from tests.model import tiny

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
FOLDERS = (("glm5", "glm5"), ("glm5_2", "glm5_2"))
# Five times the float32 noise of the references themselves; logits are of size one.
ATOL = 2e-5


@functools.cache
def load(name):
    """Config, float32 parameters and reference arrays of a folder."""
    config = dataclasses.replace(
        huggingface.read_config(GOLDEN / name), dtype="float32"
    )
    assert config.latent_norm_eps == 1e-6
    abstract = transformer.abstract_params(config)
    params = huggingface.load_params(GOLDEN / name, config, abstract, dtype="float32")
    with np.load(GOLDEN / name / "reference.npz") as arrays:
        return config, params, dict(arrays)


@functools.partial(jax.jit, static_argnums=1)
def run(params, config, tokens, segment_ids, positions):
    """Everything that the references record of a forward pass."""
    out = transformer.forward(
        params, config, tokens, segment_ids, positions, with_traces=True
    )
    states, _ = mtp.steps(
        params["mtp"],
        config,
        params["embed_tokens"],
        out.hidden,
        mtp.ahead(tokens, config.mtp_num_steps),
        out.context,
    )
    logits = transformer.logits(params, config, out.hidden)
    return out, logits, transformer.logits(params, config, states)


@functools.cache
def outputs(name):
    """`run` on the reference's rows; the packed row is the third of the batch."""
    config, params, reference = load(name)
    tokens = reference["input_ids"].astype(np.int32)
    tokens = np.concatenate([tokens, tokens[:1]])
    segments, positions = np.ones_like(tokens), np.empty_like(tokens)
    positions[:2], positions[2:] = np.arange(40), reference["packed_positions"]
    segments[2:] = np.cumsum(positions[2:] == 0, axis=1)
    return run(params, config, *map(jnp.asarray, (tokens, segments, positions)))


class ForwardTest(parameterized.TestCase):
    @parameterized.named_parameters(*FOLDERS)
    def test_logits(self, name):
        _, _, reference = load(name)
        _, logits, _ = outputs(name)
        np.testing.assert_allclose(logits[:2], reference["logits"], rtol=0, atol=ATOL)

    @parameterized.named_parameters(*FOLDERS)
    def test_logits_of_packed_documents(self, name):
        _, _, reference = load(name)
        _, logits, _ = outputs(name)
        want = reference["packed_logits"]
        np.testing.assert_allclose(logits[2:], want, rtol=0, atol=ATOL)

    @parameterized.named_parameters(*FOLDERS)
    def test_hidden_states_of_every_layer(self, name):
        config, _, reference = load(name)
        traces = tiny.by_layer(config, outputs(name)[0].traces)
        self.assertLen(reference["hidden_states"], len(traces))
        for layer, (trace, want) in enumerate(
            zip(traces, reference["hidden_states"], strict=True)
        ):
            scale = np.abs(want).max()
            np.testing.assert_allclose(
                trace.x[:2], want, rtol=0, atol=ATOL * scale, err_msg=f"layer {layer}"
            )

    @parameterized.named_parameters(*FOLDERS)
    def test_every_full_layer_selects_the_same_keys(self, name):
        config, _, reference = load(name)
        traces = tiny.by_layer(config, outputs(name)[0].traces)
        full = [
            trace.attended.index.selection.keep[:2]
            for trace, is_full in zip(traces, config.is_full_index_layer, strict=True)
            if is_full
        ]
        for mask, indices in zip(full, reference["topk_indices"], strict=True):
            want = np.zeros((2, 40, 41), bool)
            np.put_along_axis(want, indices.astype(int), True, axis=-1)  # -1: column 40
            np.testing.assert_array_equal(np.swapaxes(mask, 1, 2), want[..., :40])

    @parameterized.named_parameters(*FOLDERS)
    def test_every_router_chooses_the_same_experts(self, name):
        config, _, reference = load(name)
        blocks = tiny.by_layer(config, outputs(name)[0].aux)
        chosen = [np.sort(b.routing.experts[:2]) for b in blocks if b.routing]
        np.testing.assert_array_equal(chosen, reference["router_indices"])

    @parameterized.named_parameters(*FOLDERS)
    def test_mtp_logits_of_every_step(self, name):
        _, _, reference = load(name)
        _, _, logits = outputs(name)
        steps = [k for k in (1, 2, 3) if f"mtp_logits_{k}" in reference]
        self.assertLen(steps, {"glm5": 3, "glm5_2": 1}[name])
        for k in steps:
            np.testing.assert_allclose(
                logits[k - 1, :2, :-k],
                reference[f"mtp_logits_{k}"],
                rtol=0,
                atol=ATOL,
                err_msg=f"step {k}",
            )


if __name__ == "__main__":
    environment.main()
