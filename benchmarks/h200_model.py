"""Times whole training steps and decoding of GLM-5's layers on one H200.

    python benchmarks/h200_model.py train --optimizer=muon --remat=kernels
    python benchmarks/h200_model.py train --length=32768 --remat=kernels
    python benchmarks/h200_model.py train --like_transformers
    python benchmarks/h200_model.py train --kernels=off --remat=full
    python benchmarks/h200_model.py decode --layers=8 --experts=64
    JAX_PLATFORMS=cpu python benchmarks/h200_model.py train --compile_only
    JAX_PLATFORMS=cpu python benchmarks/h200_model.py train --small --length=64

Layers are those of GLM-5, fewer of them and with fewer experts, so that parameters,
optimizer state and activations fill the card; tokens and weights are random. Each
measurement is a line of JSON, printed at once. `--compile_only` compiles the training
step for an H200 on a machine without one, and prints the bytes that it needs.
h200_model_torch.py is transformers' model of the same shape.
"""

import argparse
import dataclasses
import gc
import os
import pathlib
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.96")

import h200_model_shape as shape_lib  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, Mesh  # noqa: E402

from glm5_jax import config as config_lib  # noqa: E402
from glm5_jax import mesh as mesh_lib  # noqa: E402
from glm5_jax.inference import engine, limits  # noqa: E402
from glm5_jax.model import transformer  # noqa: E402
from glm5_jax.training import program as program_lib  # noqa: E402
from glm5_jax.training.reporting import accounting  # noqa: E402
from pallas_kernels import aot, chips  # noqa: E402

POLICIES = ("none", "full", "kernels", "experts", "dots", "offload")
ATTENTION = ("sparse", "dense", "dense_with_indexer_loss")
PREFILL_TOKENS = 16384  # that a dispatch of the engine reads


def main() -> None:
    """Parses flags and measures."""
    parser, command = shape_lib.parser(__doc__)
    add = command("train").add_argument
    shape_lib.add_training(add)
    add("--optimizer", choices=("muon", "adamw"), default="muon")
    add("--moments", choices=("float32", "bfloat16"), default="float32")
    add("--remat", choices=POLICIES, default="kernels")
    add("--attention", choices=ATTENTION, default="sparse")
    add("--mtp", choices=("on", "off"), default="off")
    add("--indexer_weight", type=float, default=1e-3, help="0: it is not trained")
    add("--like_transformers", action="store_true", help="the next token's loss alone")
    add("--kernels", choices=("on", "off"), default="on", help="off: plain XLA")
    add("--compile_only", action="store_true", help="for an H200, without one")
    add = command("decode").add_argument
    shape_lib.add_decoding(add)
    add("--kernels", choices=("on", "off"), default="on", help="off: plain XLA")
    args = parser.parse_args()
    if args.kernels == "off":
        sys.modules["jax_triton"] = None  # pallas_kernels then finds no Triton
    device = jax.devices()[0]
    about = {"jax": jax.__version__, "device": device.device_kind}
    lines = shape_lib.Lines(args, framework="glm5_jax", **about)
    with lines.failing(args.what):
        (train if args.what == "train" else decode)(args, lines)


def model_config(args: argparse.Namespace, **more: Any) -> config_lib.ModelConfig:
    """Returns the model of the flags."""
    sizes = {"eos_token_id": (0,), "pad_token_id": 0}
    return config_lib.ModelConfig(**shape_lib.shape(args), **sizes, **more)


def train_config(args: argparse.Namespace) -> config_lib.TrainConfig:
    """Returns the run of the flags."""
    alone = args.like_transformers
    if alone:
        args.optimizer, args.mtp, args.indexer_weight = "adamw", "off", 0.0
    model = model_config(
        args,
        attention=args.attention,
        remat_policy=args.remat,
        num_nextn_predict_layers=int(args.mtp == "on"),
    )
    trains_indexer = args.attention != "dense" and args.length > model.index_topk
    loss = {"indexer_weight": args.indexer_weight if trains_indexer else 0.0}
    if alone:
        loss["balance_weight"] = 0.0
    return config_lib.TrainConfig(
        num_steps=100,
        model=model,
        data=config_lib.DataConfig(
            bpe_vocab_size=args.vocab, sequence_length=args.length, batch_size=args.rows
        ),
        loss=config_lib.LossConfig(**loss),
        optim=config_lib.OptimConfig(name=args.optimizer, moment_dtype=args.moments),
    )


def train(args: argparse.Namespace, lines: shape_lib.Lines) -> None:
    """Compiles the step, then times it."""
    config = train_config(args)
    sizes = accounting.count_parameters(config.model)
    state = accounting.state_bytes(config)
    gib = {name: round(size / shape_lib.GIB, 2) for name, size in state.items()}
    flops = accounting.flops_per_token(config.model, args.length)
    lines.about(parameters=sizes, state_gib=gib, flops_per_token=flops)
    mesh = mesh_lib.make_mesh(config.mesh)
    if args.compile_only:
        devices = aot.device_mesh(chips.CHIPS["h200"]).devices
        shape = (1,) * len(mesh_lib.AXES)
        kinds = (AxisType.Auto,) * len(mesh_lib.AXES)
        mesh = Mesh(devices.reshape(shape), mesh_lib.AXES, axis_types=kinds)
    program = program_lib.make_program(config, mesh)
    began = time.perf_counter()
    lowered = program.lower(args.rows)
    seconds = {"lower_seconds": round(time.perf_counter() - began, 1)}
    began = time.perf_counter()
    compiled = lowered.compile()
    seconds["compile_seconds"] = round(time.perf_counter() - began, 1)
    lines.put("compiled", **seconds, **_bytes(compiled))
    if args.compile_only:
        return
    params, opt_state = program.initial(0)
    jax.block_until_ready((params, opt_state))
    batch = _batch(program, args)
    times, losses = [], []
    for step in range(args.warmup + args.steps):
        began = time.perf_counter()
        params, opt_state, metrics = compiled(params, opt_state, batch)
        jax.block_until_ready((params, opt_state, metrics))
        times.append(time.perf_counter() - began)
        losses.append(float(metrics["train/loss"]))
        values = {k: float(v) for k, v in metrics.items() if v.ndim == 0}
        ms = round(times[-1] * 1e3, 2)
        lines.put("step", step=step, ms=ms, **({} if step else values))
    median = statistics.median(times[args.warmup :])
    tokens = args.rows * args.length
    found = shape_lib.step_rates(median, tokens, flops) | seconds | _bytes(compiled)
    found |= {"first_loss": losses[0], "last_loss": losses[-1]}
    found |= {"is_finite": bool(np.isfinite(losses).all()), "peak_gib": _peak_gib()}
    lines.put("train", parameters=sizes["total"], **found)


def _bytes(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Returns the memory of a compiled step, in GiB."""
    memory = compiled.memory_analysis()
    if memory is None:
        return {}
    kinds = ("argument", "output", "alias", "temp")
    gib = {k: getattr(memory, f"{k}_size_in_bytes") / shape_lib.GIB for k in kinds}
    total = gib["argument"] + gib["output"] - gib["alias"] + gib["temp"]
    return {f"{k}_gib": round(v, 2) for k, v in {**gib, "needed": total}.items()}


def _peak_gib() -> float | None:
    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else round(peak / shape_lib.GIB, 2)


def _batch(program: program_lib.Program, args: argparse.Namespace) -> dict:
    """Returns rows of random tokens, each one document."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, args.vocab, (args.rows, args.length + 1), np.int32)
    known = {
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "positions": np.broadcast_to(np.arange(args.length), text[:, 1:].shape),
    }
    batch = {
        name: known.get(name, np.ones(x.shape)).astype(x.dtype)
        for name, x in program.batch.items()
    }
    return jax.device_put(batch, program_lib.batch_place(program.mesh))


def decode(args: argparse.Namespace, lines: shape_lib.Lines) -> None:
    """Times prompts read alone, then sequences that draw together."""
    config = model_config(args, param_dtype="bfloat16", num_nextn_predict_layers=0)
    config = dataclasses.replace(config, mtp_num_steps=0)
    init = jax.jit(transformer.init_params, static_argnums=0)
    params = jax.block_until_ready(init(config, jax.random.key(0)))
    size = sum(x.nbytes for x in jax.tree.leaves(params)) / shape_lib.GIB
    count = accounting.count_parameters(config)
    cache = accounting.cache_bytes_per_token(config)
    about = {"weights_gib": round(size, 2), "cache_bytes_per_token": cache}
    lines.about(parameters=count, **about)
    for length in shape_lib.lengths(args.prefill):
        with lines.failing("prefill", tokens=length):
            lines.put("prefill", tokens=length, **_prefill(params, config, length))
        gc.collect()
    for batch, length in shape_lib.cases(args.cases):
        case = {"batch": batch, "context": length}
        with lines.failing("decode", **case):
            found = _decode(params, config, batch, length, args.new)
            lines.put("decode", **case, **found, peak_gib=_peak_gib())
        gc.collect()


def _prefill(params: dict, config: config_lib.ModelConfig, length: int) -> dict:
    """Returns the rate at which an engine reads a prompt, the first token drawn."""
    machine = _engine(params, config, 1, length, 1)
    began = time.perf_counter()
    _times(machine, config, 1, length, 1)
    whole = time.perf_counter() - began
    times = _times(machine, config, 1, length, 1)
    seconds = sum(time for _, time in times)
    return {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(length / seconds, 1),
        "num_dispatches": len(times),
        "compile_seconds": round(whole - seconds, 1),
    }


def _decode(
    params: dict, config: config_lib.ModelConfig, batch: int, length: int, new: int
) -> dict:
    """Returns the rates of sequences that draw together, behind long prompts."""
    machine = _engine(params, config, batch, length, new)
    times = _times(machine, config, batch, length, new)
    drawn = [time for (kind, num), time in times if (kind, num) == ("decode", batch)]
    read = [time for (kind, num), time in times if (kind, num) == ("behind", batch)]
    seconds = statistics.median(drawn[1:]) / engine.NUM_STEPS  # the first compiles
    chunk = min(PREFILL_TOKENS // batch, length)
    found = {
        "ms_per_step": round(seconds * 1e3, 3),
        "tokens_per_second": round(batch / seconds, 1),
        "num_dispatches": len(drawn) - 1,
        "first_dispatch_seconds": round(drawn[0], 1),
    }
    if len(read) > 1:
        rate = batch * chunk / statistics.median(read[1:])
        found["prefill_tokens_per_second"] = round(rate, 1)
    return found


def _engine(
    params: dict, config: config_lib.ModelConfig, batch: int, length: int, new: int
) -> engine.Engine:
    """Returns an engine that reads all prompts side by side before any draws."""
    return engine.Engine(
        params,
        config,
        num_slots=batch,
        capacity=length + new,
        chunk=PREFILL_TOKENS // batch,
        limits=limits.Limits(prefill_tokens=max(batch * length, PREFILL_TOKENS)),
    )


def _times(
    machine: engine.Engine,
    config: config_lib.ModelConfig,
    batch: int,
    length: int,
    new: int,
) -> list[tuple[tuple[str, int], float]]:
    """Runs random prompts greedily; returns kind, sequences and seconds of dispatches.

    The engine copies what a dispatch drew to the host, and so waits for its end.
    """
    rng, times = np.random.default_rng(machine.version + time.time_ns()), []
    for i in range(batch):
        prompt = rng.integers(1, config.vocab_size, length).tolist()
        machine.submit(engine.Request(i, prompt, new, temperature=0.0))
    while machine.num_pending:
        began = time.perf_counter()
        machine.step()
        seconds, done = time.perf_counter() - began, machine.dispatch
        if done is not None:
            times.append(((done.kind, len(done.parts)), seconds))
    return times


if __name__ == "__main__":
    main()
