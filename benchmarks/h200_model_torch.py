"""Times transformers' GLM-5 on the same card and of the same shape as h200_model.py.

    python benchmarks/h200_model_torch.py train
    python benchmarks/h200_model_torch.py train --length=16384 --checkpointing
    python benchmarks/h200_model_torch.py decode --layers=8 --experts=64
    python benchmarks/h200_model_torch.py train --small --length=64 --device=cpu

Training is the next token's loss, its gradient and an update; the indexer has no
gradient and there is no multi-token prediction. Parameters are bfloat16, and so are
AdamW's moments; `--dtype=float32` has both in float32, with bfloat16 products by
autocast. Of `--attention` and `--experts_by` the first that runs is timed. Decoding is
generate() with its own cache. Needs nothing of this repository; prints lines of JSON.
"""

import argparse
import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import h200_model_shape as shape_lib
import torch
import transformers
from transformers.models import glm_moe_dsa

OPTIMIZERS: dict[str, Callable] = {
    "adamw": lambda params: torch.optim.AdamW(
        params, lr=2e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    ),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3),
}


def main() -> None:
    """Parses flags and measures."""
    parser, command = shape_lib.parser(__doc__)
    for name in ("train", "decode"):
        add = command(name).add_argument
        add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
        add("--attention", default="sdpa,eager", help="the first that runs is timed")
        add("--experts_by", default="grouped_mm,eager", help="the same")
        add("--device", default="cuda")
        if name == "train":
            shape_lib.add_training(add)
            add("--optimizer", choices=tuple(OPTIMIZERS), default="adamw")
            add("--checkpointing", action="store_true", help="of each layer")
            add("--flops_per_token", type=float, help="as h200_model.py prints it")
        else:
            shape_lib.add_decoding(add)
            add("--prefill_chunk", type=int, default=0, help="tokens; 0: no chunks")
    args = parser.parse_args()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    on_card = args.device == "cuda"
    name = torch.cuda.get_device_name() if on_card else args.device
    lines = shape_lib.Lines(args, **versions, device_name=name)
    lines.about()
    ways = itertools.product(args.attention.split(","), args.experts_by.split(","))
    for attention, experts in ways:
        way = {"attention": attention, "experts_by": experts}
        try:
            model = make(args, attention, experts)
            _try(args, model)
        except Exception as error:
            lines.put("cannot run", **way, error=f"{type(error).__name__}: {error}")
            model = None
            _free(args)
            continue
        (train if args.what == "train" else decode)(args, model, lines, way)
        return
    lines.put(args.what, error="no way runs")


def make(
    args: argparse.Namespace, attention: str, experts: str
) -> transformers.PreTrainedModel:
    """Returns a model with random weights, made on the card."""
    config = glm_moe_dsa.GlmMoeDsaConfig(
        **_listed(shape_lib.shape(args)),
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation=attention,
        experts_implementation=experts,
    )
    torch.manual_seed(0)
    kept, dtype = torch.get_default_dtype(), getattr(torch, args.dtype)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(args.device):
            model = glm_moe_dsa.GlmMoeDsaForCausalLM(config)
    finally:
        torch.set_default_dtype(kept)
    return model.to(dtype)


def _listed(sizes: dict[str, Any]) -> dict[str, Any]:
    """Adds the fields that transformers spells in another way."""
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    kinds = ["dense"] + ["sparse"] * (layers - 1)
    return sizes | {"num_key_value_heads": heads, "mlp_layer_types": kinds}


def _try(args: argparse.Namespace, model: transformers.PreTrainedModel) -> None:
    """Runs a few tokens, forward and backward."""
    ids = torch.randint(0, args.vocab, (1, 64), device=args.device)
    with _cast(args):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    model.zero_grad(set_to_none=True)
    _free(args)


def _cast(args: argparse.Namespace) -> contextlib.AbstractContextManager:
    if args.dtype == "bfloat16":
        return contextlib.nullcontext()
    return torch.autocast(args.device, torch.bfloat16)


def _free(args: argparse.Namespace) -> None:
    gc.collect()
    if args.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _now(args: argparse.Namespace) -> float:
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _about(args: argparse.Namespace, model: transformers.PreTrainedModel) -> dict:
    peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "peak_gib": round(peak / shape_lib.GIB, 2)}


def train(
    args: argparse.Namespace,
    model: transformers.PreTrainedModel,
    lines: shape_lib.Lines,
    way: dict[str, str],
) -> None:
    """Times whole training steps."""
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = OPTIMIZERS[args.optimizer](model.parameters())
    shape = (args.rows, args.length)
    ids = torch.randint(0, args.vocab, shape, device=args.device)
    times, losses = [], []
    with lines.failing("train", **way, optimizer=args.optimizer):
        for step in range(args.warmup + args.steps):
            began = _now(args)
            with _cast(args):
                loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(_now(args) - began)
            losses.append(loss.item())
            lines.put("step", step=step, ms=round(times[-1] * 1e3, 2), loss=losses[-1])
        median = statistics.median(times[args.warmup :])
        found = shape_lib.step_rates(median, ids.numel(), args.flops_per_token) | way
        found |= {"first_loss": losses[0], "last_loss": losses[-1]}
        found |= {"is_finite": all(map(math.isfinite, losses))}
        lines.put("train", **found, **_about(args, model))


def decode(
    args: argparse.Namespace,
    model: transformers.PreTrainedModel,
    lines: shape_lib.Lines,
    way: dict[str, str],
) -> None:
    """Times prompts read alone, then sequences that draw together."""
    model.eval()
    prompts = [("prefill", 1, n, 2) for n in shape_lib.lengths(args.prefill)]
    drawn = [("decode", *case, args.new) for case in shape_lib.cases(args.cases)]
    for event, batch, length, new in prompts + drawn:
        case = {"batch": batch, "context": length} | way
        with lines.failing(event, **case):
            _stamps(args, model, batch, length, 2)  # warms up
            stamps = _stamps(args, model, batch, length, new)
            first = stamps[1] - stamps[0]
            found = {"prefill_seconds": round(first, 4)}
            found["prefill_tokens_per_second"] = round(batch * length / first, 1)
            if event == "decode":
                steps = [b - a for a, b in itertools.pairwise(stamps[1:])]
                found |= shape_lib.step_rates(statistics.median(steps), batch)
            lines.put(event, **case, **found, **_about(args, model))
        _free(args)


def _stamps(
    args: argparse.Namespace,
    model: transformers.PreTrainedModel,
    batch: int,
    length: int,
    new: int,
) -> list[float]:
    """Continues random prompts greedily; returns the times before and behind steps."""
    ids = torch.randint(0, args.vocab, (batch, length), device=args.device)
    stamps: list[float] = []

    def note(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        stamps.append(_now(args))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    chunks = {"prefill_chunk_size": args.prefill_chunk} if args.prefill_chunk else {}
    began = _now(args)
    with torch.inference_mode(), _cast(args):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([note]),
            **chunks,
        )
    assert out.shape[1] == length + new
    return [began, *stamps]


if __name__ == "__main__":
    main()
