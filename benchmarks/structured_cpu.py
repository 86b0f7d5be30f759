"""Measures what grammars cost: their own requests, and others beside them.

python benchmarks/structured_cpu.py [--size=tiny] [--others=7] [--tokens=128]

Prints tokens a second of requests without a grammar, alone and beside one that has a
grammar, and of the request with the grammar. Then the microseconds of a mask.
"""

import argparse
import time

import jax
import numpy as np

from glm5_jax import config as config_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.inference import constraints, engine, grammars
from glm5_jax.inference.limits import Limits
from glm5_jax.inference.requests import Request
from glm5_jax.model import transformer

TOKENIZER = tokenizer_lib.byte_tokenizer(tokenizer_lib.SPECIAL_TOKENS)
END = frozenset([TOKENIZER.eos_id])
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
    "minItems": 100,
}
SIZES = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2},
    "small": {"hidden_size": 256, "num_hidden_layers": 6},
}
REPEATS = 3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--others", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    asked = parser.parse_args()
    machine = make_engine(SIZES[asked.size], asked.others + 1, asked.tokens)
    compiler = grammars.Grammars(TOKENIZER, machine.config.vocab_size)
    json_text = compiler.compile([grammars.Source("json_schema", SCHEMA)], END)
    fixed = grammars.Source("choice", ["a fixed text " * 40])
    keys = compiler.compile([fixed], END)
    print("| requests | tokens/s of the others | tokens/s of the one with a grammar |")
    print("|---|---|---|")
    for name, constraint in (
        (f"{asked.others} without a grammar", None),
        ("and one with a JSON schema", json_text),
        ("and one with a text that is forced", keys),
    ):
        others, own = rates(machine, asked.others, asked.tokens, constraint)
        print(f"| {name} | {others:.0f} | {f'{own:.0f}' if constraint else ''} |")
    print(f"\nA mask takes {mask_seconds(json_text) * 1e6:.0f} microseconds.")


def make_engine(sizes: dict, num_slots: int, num_tokens: int) -> engine.Engine:
    """Returns an engine of random weights."""
    heads = {"num_attention_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 32}
    dims = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32}
    model = config_lib.ModelConfig(
        vocab_size=TOKENIZER.vocab_size,
        first_k_dense_replace=sizes["num_hidden_layers"],
        intermediate_size=4 * sizes["hidden_size"],
        num_nextn_predict_layers=0,
        attention="dense",
        dtype="float32",
        **sizes,
        **heads,
        **dims,
    )
    return engine.Engine(
        transformer.init_params(model, jax.random.key(0)),
        model,
        num_slots=num_slots,
        capacity=32 + num_tokens,
        limits=Limits(with_adjustments=True),
    )


def rates(
    machine: engine.Engine,
    others: int,
    num_tokens: int,
    constraint: constraints.Constraint | None,
) -> tuple[float, float]:
    """Returns tokens a second of the other requests, and of the one with a grammar."""
    found = []
    for repeat in range(REPEATS + 1):
        prompt = np.random.default_rng(repeat).integers(0, 256, 16).tolist()
        asked = [Request(i, prompt, num_tokens, seed=i) for i in range(others)]
        if constraint is not None:
            bias = dict.fromkeys(b" \t\r\n", -100.0)
            more = {"logit_bias": bias, "constraint": constraint}
            asked.append(Request(others, prompt, num_tokens, END, **more))
        completions = [machine.submit(request) for request in asked]
        machine.step()  # reads the prompts
        began = time.perf_counter()
        while machine.num_pending:
            machine.step()
        seconds = time.perf_counter() - began
        found.append([len(c.tokens) / seconds for c in completions])
    found = np.median(found[1:], axis=0)  # the first compiles
    return float(found[:others].sum()), float(found[others:].sum())


def mask_seconds(constraint: constraints.Constraint) -> float:
    """Returns the seconds of a mask within a string."""
    matcher = constraint.start()
    matcher.consume([*b'[{"name":"some'])
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < 0.5:
        matcher.consume([*b"e"])
        matcher.allowed()
        number += 1
    return (time.perf_counter() - began) / number


if __name__ == "__main__":
    main()
