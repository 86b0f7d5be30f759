"""A compiled training step of GLM-5 never sends or copies all experts."""

import dataclasses

import jax
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import presets
from glm5_jax.scale import inputs, programs
from glm5_jax.scale.hlo import communication
from glm5_jax.scale.hlo import parser as hlo
from tests import environment, tpus
from tests.model import tiny

# Experts are most of its bytes, as they are of GLM-5's.
SMALL = config_lib.TrainConfig(
    model=tiny.model(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=32,
        num_experts_per_tok=4,
        index_head_dim=128,
        index_topk=64,
        vocab_size=512,
        mtp_num_steps=1,
        dtype="bfloat16",
        remat_policy="full",
    ),
    data=config_lib.DataConfig(sequence_length=128, batch_size=8),
    mesh=config_lib.MeshConfig(fsdp=4, expert=2),
)
DEPTH = 5  # of GLM-5, for a look at its own sizes: 3 dense layers and 2 with experts
GIB = 2**30


def layer_of_experts(config):
    """Bytes of one layer's experts of one shard of the expert axis, as they are sent.

    What FSDP has to bring to every device, one layer after the other; all experts of
    that layer are `mesh.expert` times as many.
    """
    model, item = config.model, 2  # bfloat16
    num_experts = model.n_routed_experts // config.mesh.expert
    return item * num_experts * 3 * model.hidden_size * model.moe_intermediate_size


@pytest.mark.aot
# Small shapes are not those of the kernels: plain XLA stands in for them.
@pytest.mark.filterwarnings("ignore:.* runs as .* instead of tpu")
class ExpertsStayTest(parameterized.TestCase):
    def check(self, config, topology, most_copied):
        if not tpus.has_libtpu():
            self.skipTest("no libtpu: pip install -e '.[aot]'")
        mesh = mesh_lib.make_mesh(config.mesh, mesh_lib.topology(topology))
        job = programs.make(config, mesh)
        with jax.set_mesh(mesh), environment.optimized():
            compiled = job.step.lower(*job.arguments).compile()
        arguments = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            job.arguments,
            compiled.input_shardings[0],
        )
        arrays = inputs.arguments(arguments, job.names)
        self.assertEmpty(inputs.replicated(arrays, least_bytes=most_copied))
        try:
            text = compiled.as_text()
        except jax.errors.JaxRuntimeError:
            self.skipTest("this libtpu cannot print programs of this jax")
        traffic = communication.find(hlo.parse(text), dict(mesh.shape))
        found = {c.kind for c in traffic.collectives}
        self.assertContainsSubset({"all-gather", "reduce-scatter"}, found)
        limit = layer_of_experts(config)
        for c in traffic.collectives:
            self.assertLessEqual(c.wire_bytes / c.count, limit, c)
        return compiled

    def test_small(self):
        self.check(SMALL, "v5p:2x2x2", most_copied=2**18)  # 1% of a layer

    @pytest.mark.slow
    def test_of_full_width(self):
        """Nothing above 1 GiB is the same on two devices."""
        config = config_lib.TrainConfig(
            model=dataclasses.replace(
                presets.GLM5, num_hidden_layers=DEPTH, remat_policy="full"
            ),
            data=config_lib.DataConfig(sequence_length=4096, batch_size=64),
            mesh=config_lib.MeshConfig(fsdp=8, expert=8),
        )
        self.check(config, "v5p:4x4x4", most_copied=GIB)


if __name__ == "__main__":
    environment.main()
