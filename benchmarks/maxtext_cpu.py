"""MaxText's DeepSeek-V3.2, the peer next to GLM-5, training the bench shape on a CPU.

    python3.12 -m venv /tmp/maxtext
    /tmp/maxtext/bin/pip install "maxtext[tpu]==0.2.5"
    taskset -c 0 /tmp/maxtext/bin/python benchmarks/maxtext_cpu.py
    taskset -c 0 /tmp/maxtext/bin/python benchmarks/maxtext_cpu.py sparse_matmul=True

Further arguments are MaxText's own overrides. The step is next-token loss, gradients
and AdamW in float32, sparse attention, no indexer loss, no MTP, nothing rematerialized.
Prints one JSON line; rates are medians over the timed steps.
"""

import argparse
import importlib.metadata
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

OPTIONS = {
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "attention": "dot_product",
    "vocab_size": 1024,
    "base_emb_dim": 256,
    "base_mlp_dim": 512,
    "base_moe_mlp_dim": 128,
    "base_num_decoder_layers": 4,
    "first_num_dense_layers": 1,
    "base_num_query_heads": 8,
    "base_num_kv_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "use_indexer": True,
    "indexer_n_heads": 4,
    "indexer_head_dim": 32,
    "indexer_topk": 64,
    # Without it MaxText is in the indexer's warm-up: no next-token loss, all dead code.
    "indexer_sparse_training": True,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "routed_score_func": "sigmoid",
    "routed_bias": True,
    "megablox": False,  # a Pallas kernel, interpreted on a CPU: minutes a step
    "sparse_matmul": False,  # faster than True, which is lax.ragged_dot
    "rope_max_timescale": 10000,
    "max_target_length": 512,
    "per_device_batch_size": 8,
    "dtype": "float32",
    "weight_dtype": "float32",
    "remat_policy": "none",
    "hardware": "cpu",
    "dataset_type": "synthetic",
    "packing": False,
    "enable_checkpointing": False,
    "enable_tensorboard": False,
    "skip_jax_distributed_system": True,
    "learning_rate": 1e-3,
    "run_name": "bench",
}
TOKENS = OPTIONS["per_device_batch_size"] * OPTIONS["max_target_length"]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        user, system = file.read().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Runs MaxText in a child process and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    args, overrides = parser.parse_known_args()
    options = OPTIONS | {"steps": args.warmup + args.steps}
    options |= dict(override.split("=", 1) for override in overrides)
    with tempfile.TemporaryDirectory() as folder:
        options["base_output_directory"] = folder
        flags = [f"{name}={value}" for name, value in options.items()]
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "maxtext.trainers.pre_train.train", *flags],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        log, wall, cpu, losses = [], [], [], []
        for line in process.stdout:
            log.append(line)
            # Its own "seconds" are times between dispatches, not between results.
            if found := re.search(r"completed step: .*? loss: ([\d.]+)", line):
                losses.append(float(found[1]))
                wall.append(time.perf_counter())
                cpu.append(cpu_seconds(process.pid))
    if process.wait() or len(losses) < args.warmup + args.steps:
        sys.exit("".join(log[-40:]))
    assert min(losses) > 1, f"random tokens cannot be predicted, yet loss {losses}"
    seconds, cpu_time = (
        statistics.median(np.diff(times)[args.warmup - 1 :]) for times in (wall, cpu)
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    result = {
        "maxtext": importlib.metadata.version("maxtext"),
        "jax": importlib.metadata.version("jax"),
        "overrides": overrides,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "tokens_per_second": round(TOKENS / seconds, 1),
        "tokens_per_cpu_second": round(TOKENS / cpu_time, 1),
        "peak_rss_gib": round(peak / 2**20, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
