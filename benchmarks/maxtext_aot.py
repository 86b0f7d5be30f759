"""Compiles MaxText's DeepSeek-V3.2 with the same compiler: memory and traffic.

    python3.12 -m venv /tmp/maxtext
    /tmp/maxtext/bin/pip install "maxtext[tpu]==0.2.5"
    PYTHONPATH=. /tmp/maxtext/bin/python benchmarks/maxtext_aot.py

Its own train_compile, whose program is counted as glm5_jax.aot counts ours: 671B
parameters, 61 layers and sparse attention, for 512 v5p chips as fsdp 64 x expert 8, one
row of 4096 tokens a device, Adam. Further arguments are MaxText's own overrides. Prints
one JSON line. Five minutes of a core, 4 GiB.
"""

import importlib.metadata
import json
import os
import resource
import sys
import tempfile
import time
from typing import Any

OPTIONS = {
    "model_name": "deepseek3.2-671b",
    "compile_topology": "v5p-1024",  # cores: 512 chips
    "compile_topology_num_slices": 1,
    "ici_fsdp_parallelism": 64,
    "ici_expert_parallelism": 8,
    "per_device_batch_size": 1,
    "max_target_length": 4096,
    "remat_policy": "full",
    "attention": "flash",
    "use_tokamax_splash": True,
    "indexer_sparse_training": True,
    "indexer_loss_scaling_factor": 0.001,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "run_name": "aot",
}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def main() -> None:
    """Compiles, counts, prints."""
    os.environ.update(ENVIRONMENT)
    # Imports of what runs in MaxText's environment alone, after the variables.
    from maxtext.trainers.pre_train import train_compile

    from glm5_jax.scale.hlo import communication
    from glm5_jax.scale.hlo import parser as hlo

    found: dict[str, Any] = {}
    compile_step = train_compile.jit_and_compile

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found["compiled"] = compile_step(*args, **kwargs)
        found["seconds"] = time.perf_counter() - began
        found["mesh"] = dict(args[3].shape)
        return found["compiled"]

    train_compile.jit_and_compile = timed
    with tempfile.TemporaryDirectory() as folder:
        options = OPTIONS | {"base_output_directory": folder, "jax_cache_dir": folder}
        options |= dict(override.split("=", 1) for override in sys.argv[1:])
        flags = [f"{name}={value}" for name, value in options.items()]
        train_compile.main(["train_compile", *flags])
    stats, mesh = found["compiled"].memory_analysis(), found["mesh"]
    module = hlo.parse(found["compiled"].as_text())
    traffic = communication.find(module, mesh)
    gib = lambda size: round(size / 2**30, 2)
    by_kind = {kind: gib(wire) for (kind,), (_, wire) in traffic.total("kind").items()}
    result = {
        **{name: importlib.metadata.version(name) for name in ("maxtext", "jax")},
        "libtpu": importlib.metadata.version("libtpu"),
        "overrides": sys.argv[1:],
        "mesh": {axis: n for axis, n in mesh.items() if n > 1},
        "hbm_args_gib": gib(stats.argument_size_in_bytes),
        "hbm_temp_gib": gib(stats.temp_size_in_bytes),
        "collective_gib": gib(sum(c.wire_bytes for c in traffic.collectives)),
        "collective_gib_by_kind": by_kind,
        "uncounted_loops": len(traffic.uncounted_loops),
        "trace_and_compile_s": round(found["seconds"], 1),
        "host_peak_gib": gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
