"""Times quantized weights on a CPU: single products, and cached decoding.

    taskset -c 0 python benchmarks/quantized_cpu.py
    taskset -c 0 python benchmarks/quantized_cpu.py --decode --batch=8

Products are [rows, 1024] x [1024, 4096], in milliseconds, the median of --runs. With
--decode it decodes the shape of benchmarks/decode_cpu.py instead, with random weights:
new tokens a second without the prefill, and the bytes of the weights. A CPU multiplies
int8 by int8 fast; the other schemes multiply their codes out first, and gain bytes
alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.inference import engine
from glm5_jax.model import layers, transformer
from glm5_jax.quantization import leaf, schemes

INPUTS, OUTPUTS = 1024, 4096
DECODED = presets.BENCH
PROMPT, NEW_TOKENS = 256, 64


def median_seconds(call: Callable[[], object], runs: int) -> float:
    """Returns the median time of a call, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matrices() -> dict[str, tuple[jnp.dtype, object]]:
    """Returns a weight for each column of the table, and the dtype of its rows."""
    weights = jax.random.normal(jax.random.key(0), (INPUTS, OUTPUTS))
    found = {
        "float32": (jnp.dtype("float32"), weights),
        "bfloat16": (jnp.dtype("bfloat16"), weights.astype("bfloat16")),
    }
    path = ("layers_0", "block_0", "mlp", "experts", "gate_proj")  # int4 in w4a8
    for name, scheme in schemes.SCHEMES.items():
        layout = schemes.layout_of(scheme, path, weights.shape)
        assert layout is not None
        made = leaf.quantize(weights, layout)
        found[name] = jnp.dtype("float32"), made
    return found


def products(rows: list[int], runs: int) -> None:
    """Prints a table of the times of single products."""
    linear = jax.jit(layers.linear)
    found = matrices()
    print("| rows | " + " | ".join(found) + " |")
    print("|---|" + "---|" * len(found))
    for number in rows:
        x = jax.random.normal(jax.random.key(1), (number, INPUTS))
        cells = []
        for dtype, weights in found.values():
            own = x.astype(dtype)
            seconds = median_seconds(lambda x=own, w=weights: linear(x, w), runs)
            cells.append(f"{1e3 * seconds:.2f}")
        print(f"| {number} | " + " | ".join(cells) + " |", flush=True)


def decoding(batch: int, runs: int) -> None:
    """Prints a table of the rates of decoding."""
    init = jax.jit(transformer.init_params, static_argnums=0)
    params = init(DECODED, jax.random.key(0))
    dims = transformer.param_dims(DECODED)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, DECODED.vocab_size, (batch, PROMPT)).tolist()
    print("| weights | tokens a second | MB |\n|---|---|---|")
    for name in ("float32", *config_lib.QUANTIZATION_SCHEMES):
        own = params
        if name != "float32":
            scheme = schemes.SCHEMES[name]
            make = jax.jit(lambda p, s=scheme: schemes.quantized(p, dims, s))
            own = make(params)

        def seconds(new_tokens: int, own: dict = own) -> float:
            def call() -> object:
                return engine.generate(
                    own, DECODED, prompts, max_new_tokens=new_tokens, temperature=0.0
                )

            return median_seconds(call, runs)

        rate = batch * (NEW_TOKENS - 1) / (seconds(NEW_TOKENS) - seconds(1))
        size = sum(x.nbytes for x in jax.tree.leaves(own))
        print(f"| {name} | {rate:.1f} | {size / 1e6:.1f} |", flush=True)


def main() -> None:
    """Parses flags and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--decode", action="store_true", help="time decoding")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    args = parser.parse_args()
    if args.decode:
        decoding(args.batch, args.runs)
    else:
        products(args.rows, args.runs)


if __name__ == "__main__":
    main()
