"""The shapes, flags and printing that h200_model.py and h200_model_torch.py share.

Imports neither jax nor torch. A model has GLM-5's layers, but fewer of them, with fewer
experts and a smaller vocabulary, so that one card holds it.
"""

import argparse
import contextlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

MATMUL_TFLOPS = 716.0  # of large bfloat16 products, measured on this H200
GIB = 2**30

# zai-org/GLM-5 config.json, in the names of Hugging Face.
GLM5 = {
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_experts_per_tok": 8,
}
SMALL = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 16,
    "num_experts_per_tok": 2,
}


def parser(doc: str) -> tuple[argparse.ArgumentParser, Any]:
    """Returns the parser of a program, and what adds flags to all its subcommands."""
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--layers", type=int, default=5, help="the first one without experts")
    add("--experts", type=int, default=32)
    add("--vocab", type=int, default=32768)
    add("--seconds", type=float, default=540, help="to give up after")
    add("--out", type=pathlib.Path, help="a file that gets all lines, too")
    add("--small", action="store_true", help="a rehearsal anywhere")
    whole = argparse.ArgumentParser(description=doc.splitlines()[0])
    commands = whole.add_subparsers(dest="what", required=True)
    return whole, lambda name: commands.add_parser(name, parents=[common])


def add_training(add: Any) -> None:
    """Adds the flags of a training step."""
    add("--length", type=int, default=4096, help="tokens of a row")
    add("--rows", type=int, default=1, help="of a step")
    add("--warmup", type=int, default=2, help="steps that do not count")
    add("--steps", type=int, default=5)


def add_decoding(add: Any) -> None:
    """Adds the flags of decoding."""
    add("--prefill", default="8192,32768", help="tokens of prompts read alone")
    add("--cases", default="1x4096,8x4096,32x4096,1x32768,8x32768,32x32768")
    add("--new", type=int, default=129, help="tokens that each sequence draws")


def cases(text: str) -> list[tuple[int, int]]:
    """Returns sequences and tokens of their prompts, of 1x4096,8x4096."""
    pairs = [case.split("x") for case in text.split(",") if case]
    return [(int(batch), int(length)) for batch, length in pairs]


def lengths(text: str) -> list[int]:
    """Returns the numbers of 8192,32768."""
    return [int(length) for length in text.split(",") if length]


def shape(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sizes of the model, in the names of Hugging Face's config.json."""
    return {
        "vocab_size": args.vocab,
        "num_hidden_layers": args.layers,
        "first_k_dense_replace": 1,
        "n_routed_experts": args.experts,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        **(SMALL if args.small else GLM5),
    }


class Lines:
    """Prints what is measured, a line of JSON each, as soon as it is known."""

    def __init__(self, args: argparse.Namespace, **about: Any) -> None:
        """Takes what each line says, and begins to count the seconds."""
        given = {k: v for k, v in vars(args).items() if k not in ("out", "seconds")}
        self._about, self._out, self._began = about | given, args.out, time.time()
        timer = threading.Timer(args.seconds, self._give_up, [args.seconds])
        timer.daemon = True
        timer.start()

    def put(self, event: str, **found: Any) -> None:
        """Prints a line."""
        seconds = round(time.time() - self._began, 1)
        line = json.dumps({"event": event, "at": seconds} | found, default=str)
        print(line, flush=True)
        if self._out:
            with self._out.open("a") as file:
                file.write(line + "\n")

    def about(self, **more: Any) -> None:
        """Prints the flags and versions."""
        self.put("about", **self._about, **more)

    @contextlib.contextmanager
    def failing(self, event: str, **what: Any) -> Iterator[None]:
        """Makes an error of the block a line, after which others may still run."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            is_memory = any(
                word in message for word in ("OutOfMemory", "RESOURCE_EXHAUSTED")
            )
            note = {"error": message[:1500], "is_out_of_memory": is_memory}
            self.put(event, **what, **note)

    def _give_up(self, seconds: float) -> None:
        self.put("gave up", error=f"no end after {seconds:.0f} s")
        os._exit(3)


def step_rates(
    seconds: float, tokens: int, flops: float | None = None
) -> dict[str, float]:
    """Returns the rates of a step; model FLOP/s of `flops` a token."""
    rates = {
        "ms_per_step": round(seconds * 1e3, 2),
        "tokens_per_second": round(tokens / seconds, 1),
    }
    if flops:
        tflops = flops * tokens / seconds / 1e12
        rates["model_tflops"] = round(tflops, 1)
        rates["share_of_matmul"] = round(tflops / MATMUL_TFLOPS, 4)
    return rates
