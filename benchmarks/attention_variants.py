"""Prints the table of docs/variants.md: what each attention costs at GLM-5's size.

    python benchmarks/attention_variants.py

All layers of a row have the same type, but for the interleaved one. Everything is
counted from shapes, nothing is timed. A decoding step counts what one sequence adds to
a batch: the cached rows that it reads and the products with them. Weights are read once
for the whole batch, whatever the attention; their products are in the training FLOPs.
"""

import dataclasses
from collections.abc import Iterator

from glm5_jax import config as config_lib
from glm5_jax import depth, presets
from glm5_jax.config import attention as config_attention
from glm5_jax.model import attention
from glm5_jax.training.reporting import accounting
from pallas_kernels import chips

SHORT, LONG = 4096, 131072  # tokens
CHIP = chips.CHIPS["h200"]
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Cost:
    """The attention of all layers of a model."""

    parameters: int  # indexers included
    training: tuple[float, float]  # FLOPs of a token, at lengths SHORT and LONG
    cache: float  # bytes of a sequence of LONG tokens
    step_flops: float  # of a token after LONG others, without products with weights
    step_bytes: float  # cached, read and written by it

    @property
    def step_seconds(self) -> float:
        """The least time of the step on CHIP, at the rates that large copies reach."""
        memory = self.step_bytes / (CHIP.reachable_tbps * 1e12)
        return max(self.step_flops / (CHIP.reachable_tflops * 1e12), memory)


def models() -> Iterator[tuple[str, config_lib.ModelConfig]]:
    """Yields the rows of the table: a name, and a model without MTP."""
    glm5 = dataclasses.replace(presets.GLM5, num_nextn_predict_layers=0)
    mla192 = dataclasses.replace(presets.GLM5_MLA192, num_nextn_predict_layers=0)
    count = glm5.num_hidden_layers
    yield "`latent`, sparse: GLM-5", glm5
    yield "`latent`, dense", dataclasses.replace(glm5, attention="dense")
    yield "`latent`, dense, MLA-192", dataclasses.replace(mla192, attention="dense")
    mixed = ("latent", "latent_sliding") * (count // 2)
    dense = dataclasses.replace(glm5, attention="dense")
    yield (
        "`latent_sliding`, every second layer",
        dataclasses.replace(dense, layer_types=mixed),
    )
    for name in config_attention.LAYER_TYPES:
        if name != "latent":
            yield f"`{name}`", dataclasses.replace(glm5, layer_types=(name,) * count)


def cost(model: config_lib.ModelConfig) -> Cost:
    """Counts the attention of a model; an indexer that nothing reads is left out."""
    counts = accounting.count_parameters(model)
    parameters = counts["attention"]
    if model.has_indexer:
        parameters += counts["indexer"]
    kinds = depth.layer_kinds(model)
    scores = [
        sum(attention.make(model, kind).flops(length) for kind in kinds)
        for length in (SHORT, LONG)
    ]
    steps = [_step(model, kind) for kind in kinds]
    entries = [
        entry.size * entry.dtype.itemsize
        for kind in kinds
        for name, entry in attention.make(model, kind).cache_entries(LONG).items()
        if model.has_indexer or name != "k_index"
    ]
    return Cost(
        parameters,
        (6.0 * parameters + 3 * scores[0], 6.0 * parameters + 3 * scores[1]),
        sum(entries),
        sum(flops for flops, _ in steps),
        sum(size for _, size in steps),
    )


def table() -> str:
    """Returns the table in Markdown."""
    lines = [
        "| attention | parameters | training, 4K | training, 128K | cache, 128K "
        "| step reads | step computes | step, at least |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, model in models():
        found = cost(model)
        short, long = (flops / 1e9 for flops in found.training)
        cells = (
            f"{found.parameters / 1e9:.2f} B",
            f"{short:.0f} GFLOP",
            f"{long:.0f} GFLOP",
            f"{found.cache / GIB:.2f} GiB",
            f"{found.step_bytes / GIB:.2f} GiB",
            f"{found.step_flops / 1e9:.1f} GFLOP",
            f"{found.step_seconds * 1e3:.2f} ms",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _step(model: config_lib.ModelConfig, kind: depth.Kind) -> tuple[float, float]:
    """Returns FLOPs and bytes of the cache for a token after LONG others."""
    entries = attention.make(model, kind).cache_entries(LONG)
    heads, sizes = model.num_attention_heads, model.variants
    keys = LONG
    if "sliding" in kind.attention:
        keys = sizes.sliding_window
    elif kind.index != "none" and model.attention == "sparse":
        keys = model.index_topk
    rows = {"kv": keys, "k": keys, "v": keys, "k_index": LONG * model.has_indexer}
    flops, size = 0.0, 0.0
    for name, entry in entries.items():
        item = entry.dtype.itemsize
        if name in rows:
            size += entry.size // LONG * rows[name] * item
        else:  # a state is read and written
            size += 2 * entry.size * item
    if "state" in entries:
        flops += 2 * heads * 3 * model.qk_head_dim * model.v_head_dim
    elif "k" in entries:
        flops += 2 * heads * 2 * sizes.head_dim * keys
    else:
        width = 2 * model.kv_lora_rank + model.qk_rope_head_dim
        flops += 2 * heads * width * keys
        index = model.index_n_heads * model.index_head_dim
        flops += 2 * index * rows["k_index"] * ("k_index" in entries)
    return flops, size


if __name__ == "__main__":
    print(table())
