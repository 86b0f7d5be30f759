"""Times torch where we have a kernel, with the same shapes on the same card.

Dense attention through scaled_dot_product_attention; the indexer's scores a chunk at a
time with torch.topk, and sparse attention by gathering rows, as transformers' own code
for the model does it.
"""

import functools
import time
from collections.abc import Callable

import torch

from pallas_kernels import cases

SAMPLES = 5
CHUNK = 512  # queries scored or gathered at a time


def timed(op: str, length: int, mode: str) -> dict[str, float]:
    """{"torch_ms": ...}, or nothing where torch has no such op or takes too long."""
    makers = {"dense_attention": _dense, "indexer_topk": _topk, "sparse_mla": _sparse}
    if (
        op not in makers
        or length > 32768
        or (mode != "fwd" and op != "dense_attention")
    ):
        return {}
    call = makers[op](cases.full(length), mode != "fwd")
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    del call
    torch.cuda.empty_cache()
    return {"torch_ms": sorted(times)[SAMPLES // 2] * 1e3}


_normal = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)


def _dense(case: cases.Case, with_gradient: bool) -> Callable:
    shape = (1, case.heads, case.queries, case.head_dim)
    q, k, v = (_normal(shape).requires_grad_(with_gradient) for _ in range(3))

    def run() -> None:
        q.grad = k.grad = v.grad = None
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        if with_gradient:
            out.backward(torch.ones_like(out))

    return run


def _topk(case: cases.Case, with_gradient: bool) -> Callable:
    q = _normal(case.queries, case.index_heads, case.index_dim)
    k = _normal(case.keys, case.index_dim)
    w = _normal(case.queries, case.index_heads).float()

    def run() -> None:
        for start in range(0, case.queries, CHUNK):
            part = slice(start, start + CHUNK)
            dots = torch.einsum("tij,sj->tis", q[part], k[: start + CHUNK]).relu_()
            scores = torch.einsum("ti,tis->ts", w[part], dots.float())
            torch.topk(scores, min(case.topk, scores.shape[-1]), dim=-1)

    return run


def _sparse(case: cases.Case, with_gradient: bool) -> Callable:
    width = case.latent + case.rope
    q, kv = _normal(case.queries, case.heads, width), _normal(case.keys, width)
    shape = (case.queries, case.topk)
    indices = torch.randint(0, case.keys, shape, device="cuda")

    def run() -> None:
        for start in range(0, case.queries, CHUNK):
            part = slice(start, start + CHUNK)
            rows = kv[indices[part]]
            scores = torch.einsum("tnc,tkc->tnk", q[part], rows) * case.scale
            probs = scores.softmax(-1, dtype=torch.float32).to(rows.dtype)
            torch.einsum("tnk,tkc->tnc", probs, rows[..., : case.latent])

    return run
