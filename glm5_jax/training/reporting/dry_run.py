"""The report of --dry_run: the resolved config, and the needs of the run."""

import json

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.training.reporting import accounting


def dry_run(config: config_lib.TrainConfig) -> str:
    """Returns config, parameters and memory by part, and FLOPs; allocates nothing."""
    model, data = config.model, config.data
    counts = accounting.count_parameters(model)
    memory = accounting.state_bytes(config)
    flops = accounting.flops_per_token(model, data.sequence_length)
    tokens = config.num_rows * data.sequence_length
    width = max(map(len, counts))
    lines = [
        json.dumps(command_line.to_json_dict(config), indent=2),
        "",
        "Parameters",
        *(f"  {part:<{width}}  {n:>19,}" for part, n in counts.items()),
        "  (active: used by one token; with the head, without embedding and MTP)",
        "",
        "Memory of the state, in all devices together",
        *(f"  {part:<{width}}  {_size(n)}" for part, n in memory.items()),
        "  (activations come on top; they depend on remat_policy and the chip)",
        "",
        f"Cache when decoding: {accounting.cache_bytes_per_token(model):,} B a token",
        f"Training: {flops:.3g} FLOPs a token, {flops * tokens:.3g} a step of "
        f"{tokens:,} tokens, {flops * tokens * config.num_steps:.3g} in all",
    ]
    return "\n".join(lines)


def _size(num_bytes: float | int) -> str:
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:>15,.1f} {unit}"
