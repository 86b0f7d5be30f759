"""Compiles GLM-5's optimizer alone for absent TPUs: memory and communication.

    python benchmarks/muon_aot.py --topology=v5p:8x8x8 --fsdp=64 --expert=8

Gradients are float32 arguments. Prints the plan of Newton-Schulz and one JSON line.
Needs libtpu; the figures of docs/design/0006 are of jax 0.12.0.1 and libtpu 0.0.51.
"""

import argparse
import json
import resource
import time
from typing import Any

import jax

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import presets, sharding
from glm5_jax.model import transformer
from glm5_jax.optim import matrix_groups
from glm5_jax.optim import optimizer as optimizer_lib
from glm5_jax.scale import programs
from glm5_jax.scale.compiled import compile as compile_lib

GIBI = 2**30


def job(config: config_lib.OptimConfig, mesh: jax.sharding.Mesh) -> programs.Job:
    """Compiles one update of GLM-5."""
    model = presets.GLM5
    dims = transformer.param_dims(model)
    optimizer = optimizer_lib.make_optimizer(config, model, dims, 100)

    def place(shapes: Any, places: Any) -> Any:
        return jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
            shapes,
            places,
        )

    places = sharding.shardings(dims, mesh)
    params = place(transformer.abstract_params(model), places)
    state = jax.eval_shape(optimizer.init, params)
    kept = sharding.shardings(optimizer.state_dims(state, params), mesh)
    kept = optimizer.kept(state, kept)
    step = jax.jit(
        lambda p, s, g: optimizer_lib.update_if_finite(optimizer, g, s, p),
        donate_argnums=(0, 1),
        out_shardings=(places, kept, None),
    )
    arguments = (params, place(state, kept), params)
    return programs.Job("optimizer", mesh, step, arguments, ("p", "s", "g"), 0)


def main() -> None:
    """Plans, compiles, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5p:8x8x8")
    for axis, size in {"data": 1, "fsdp": 64, "expert": 8, "tensor": 1}.items():
        parser.add_argument(f"--{axis}", type=int, default=size)
    parser.add_argument("--moment_dtype", default="float32")
    parser.add_argument("--offload_moments", action="store_true")
    flags = vars(parser.parse_args())
    devices = mesh_lib.topology(flags.pop("topology"))
    names = ("moment_dtype", "offload_moments")
    config = config_lib.OptimConfig(**{name: flags.pop(name) for name in names})
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(**flags), devices)
    dims = transformer.param_dims(presets.GLM5)
    shapes = transformer.abstract_params(presets.GLM5)
    leaves = optimizer_lib.muon_leaves(config, presets.GLM5, dims, shapes)
    groups = matrix_groups.plan(leaves, mesh.shape)
    print(matrix_groups.markdown(groups), flush=True)
    began = time.process_time()
    compiled = compile_lib.compile(job(config, mesh))
    assert isinstance(compiled, compile_lib.Compiled)
    wires = compiled.traffic.total("kind")
    result = {
        "arguments_gib": compiled.sizes.arguments / GIBI,
        "temporaries_gib": compiled.sizes.temporaries / GIBI,
        "sent_gib": {" ".join(k): (n, b / GIBI) for k, (n, b) in wires.items()},
        "cpu_seconds": time.process_time() - began,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
