"""transformers' GLM-5 on a CPU: training steps or cached decoding of the bench shape.

    python3.11 -m venv /tmp/peer
    /tmp/peer/bin/pip install torch==2.13.0 transformers==5.23.0
    taskset -c 0 /tmp/peer/bin/python benchmarks/transformers_cpu.py
    taskset -c 0 /tmp/peer/bin/python benchmarks/transformers_cpu.py --decode --batch=1
    taskset -c 0 /tmp/peer/bin/python benchmarks/transformers_cpu.py --mixed

The shape is that of configs/bench_cpu.py. Training is the whole step: next-token loss,
gradients, fused AdamW; the indexer has no gradient there and there is no MTP. Prints
one JSON line; rates are medians over the timed steps.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from decode_lengths import MIXED, NEW_TOKENS, PROMPT
from transformers.models import glm_moe_dsa

CONFIG = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "bos_token_id": None,
    "eos_token_id": None,
}


def measure(run: Callable[[], int], warmup: int, steps: int) -> dict[str, float]:
    """Rates of a function that returns how many tokens it processed."""
    for _ in range(warmup):
        run()
    wall, cpu = [], []
    for _ in range(steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        tokens = run()
        wall.append(tokens / (time.perf_counter() - start))
        cpu.append(tokens / (time.process_time() - cpu_start))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tokens_per_second": round(statistics.median(wall), 1),
        "tokens_per_cpu_second": round(statistics.median(cpu), 1),
        "peak_rss_gib": round(peak / 2**20, 2),
    }


def train(args: argparse.Namespace, model: transformers.PreTrainedModel) -> dict:
    """Times full training steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    ids = torch.randint(0, CONFIG["vocab_size"], (args.batch, args.length))
    losses = []

    def step() -> int:
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return ids.numel()

    rates = measure(step, args.warmup, args.steps)
    return rates | {"first_loss": losses[0], "last_loss": losses[-1]}


def generate(
    model: transformers.PreTrainedModel, batch: int, prompt: int, new_tokens: int
) -> int:
    """Continues random prompts greedily; returns the number of new tokens."""
    ids = torch.randint(0, CONFIG["vocab_size"], (batch, prompt))
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    assert out.shape[1] == prompt + new_tokens
    return batch * new_tokens


def decode(args: argparse.Namespace, model: transformers.PreTrainedModel) -> dict:
    """Times generate() as a whole and without its prefill."""
    run = lambda new_tokens: lambda: generate(model, args.batch, PROMPT, new_tokens)
    whole = measure(run(NEW_TOKENS), 1, args.steps)
    prefill = measure(run(1), 1, args.steps)["tokens_per_second"]
    seconds = args.batch * (NEW_TOKENS / whole["tokens_per_second"] - 1 / prefill)
    rate = args.batch * (NEW_TOKENS - 1) / seconds
    return whole | {"without_prefill_tokens_per_second": round(rate, 1)}


def mixed(args: argparse.Namespace, model: transformers.PreTrainedModel) -> dict:
    """Times 16 requests of mixed lengths, one after another."""
    run = lambda: sum(generate(model, 1, *lengths) for lengths in MIXED)
    return measure(run, 1, args.steps)


def main() -> None:
    """Parses flags and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--mixed", action="store_true", help="16 requests of MIXED")
    parser.add_argument("--experts", choices=("eager", "grouped_mm"), default="eager")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens of one")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    config = glm_moe_dsa.GlmMoeDsaConfig(**CONFIG, experts_implementation=args.experts)
    model = glm_moe_dsa.GlmMoeDsaForCausalLM(config).to(getattr(torch, args.dtype))
    if args.decode or args.mixed:
        model.eval()
    what = mixed if args.mixed else decode if args.decode else train
    result = what(args, model)
    parameters = sum(p.numel() for p in model.parameters())
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps(versions | vars(args) | {"parameters": parameters} | result))


if __name__ == "__main__":
    main()
