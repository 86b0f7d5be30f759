"""What each policy of rematerialisation computes again, in GLM-5's widths."""

import dataclasses

import jax
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.scale import programs, slice_devices
from glm5_jax.scale.compiled import flops
from tests import environment

T, D, F, K = 4096, 6144, 2048, 8  # tokens of a device, GLM-5's widths
PRODUCT = 2 * T * K * D * F  # of the rows of a device with one matrix each
OUTPUT = 2 * T * 64 * 256 * D  # of attention's output projection
INDEX = 2 * T * (2048 * 32 * 128 + D * 32)  # of the indexer's queries and head weights
CONFIG = config_lib.TrainConfig(
    model=dataclasses.replace(
        presets.GLM5,
        num_hidden_layers=1,
        first_k_dense_replace=0,
        expert_transport="rounds",
    ),
    data=config_lib.DataConfig(sequence_length=T, batch_size=8),
    loss=config_lib.LossConfig(mtp_weight=0.0),
    optim=config_lib.OptimConfig(name="adamw"),
    mesh=config_lib.MeshConfig(expert=8),
)


def count(policy, **changes):
    """Returns the FLOPs of a device by kind, traced for absent chips."""
    model = dataclasses.replace(CONFIG.model, remat_policy=policy, **changes)
    config = dataclasses.replace(CONFIG, model=model)
    mesh = slice_devices.abstract_mesh(config.mesh, "v5p:2x2x2")
    job = programs.make(config, mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = job.step.trace(*job.arguments)
    return flops.of_traced(traced, mesh.size).at_even_load(job.spare).by_kind


class PoliciesTest(absltest.TestCase):
    def test_what_is_not_kept_is_computed_again(self):
        """Of the experts three products, and six for gradients; two again or none."""
        full, kernels = map(count, ("full", "kernels"))
        experts = count("experts", expert_transport="exchange", expert_chunks=2)
        for found, times in ((full, 11), (kernels, 11), (experts, 9)):
            self.assertAlmostEqual(found[flops.GROUPED] / PRODUCT, times)
        for name in ("dense_attention", "indexer_bits", "indexer_kl_loss"):
            self.assertEqual(full[f"kernel {name}"], 2 * kernels[f"kernel {name}"])
        dense = full["dense products"] - kernels["dense products"]
        self.assertAlmostEqual(dense / (OUTPUT + INDEX), 1)
        for name in set(experts) - {flops.GROUPED}:
            self.assertEqual(experts[name], kernels[name], name)


if __name__ == "__main__":
    environment.main()
