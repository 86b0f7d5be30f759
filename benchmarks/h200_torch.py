"""Times torch where we have a kernel, with the same shapes on the same card.

Dense attention through scaled_dot_product_attention, and FlexAttention where keys are
selected; grouped products through grouped_mm; the indexer's scores a chunk at a time
with torch.topk, and sparse attention by gathering rows, as transformers' own code for
the model does it.
"""

import functools
import time
from collections.abc import Callable

import torch
from torch.nn.attention import flex_attention

from pallas_kernels import cases

SAMPLES = 5
CHUNK = 512  # queries scored or gathered at a time
FLEX_LENGTH = 4096  # tokens up to which a mask of all pairs is made
SHARE = 0.5  # of the visible keys, selected


def timed(
    op: str, length: int, mode: str, case: cases.Case | None = None
) -> dict[str, float]:
    """Returns {"torch_ms": ...}, or nothing where torch has no such op.

    Args:
      op: of the benchmark.
      length: tokens.
      mode: "fwd", or "bwd" for forward and backward.
      case: sizes instead of those of GLM-5 at the length.
    """
    if op not in MAKERS or (op == "dense_attention_bits" and length > FLEX_LENGTH):
        return {}
    call = MAKERS[op](case or cases.full(length), mode != "fwd")
    call()
    _wait()
    times = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        call()
        _wait()
        times.append(time.perf_counter() - start)
    del call
    torch.cuda.empty_cache()
    return {"torch_ms": sorted(times)[SAMPLES // 2] * 1e3}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # to rehearse
_normal = functools.partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)


def _dense(case: cases.Case, with_gradient: bool) -> Callable:
    attend = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, is_causal=True
    )
    return _attention(case, with_gradient, attend)


def _flex(case: cases.Case, with_gradient: bool) -> Callable:
    """FlexAttention to half of the visible keys, chosen at random."""
    pairs = torch.rand(case.queries, case.keys, device=DEVICE) < SHARE
    pairs = torch.tril(pairs)
    pairs.fill_diagonal_(True)
    mask = flex_attention.create_block_mask(
        lambda b, h, q, k: pairs[q, k],
        None,
        None,
        case.queries,
        case.keys,
        device=DEVICE,
    )
    flex = flex_attention.flex_attention
    flex = torch.compile(flex) if DEVICE == "cuda" else flex
    return _attention(case, with_gradient, functools.partial(flex, block_mask=mask))


def _attention(case: cases.Case, with_gradient: bool, attend: Callable) -> Callable:
    shape = (1, case.heads, case.queries, case.head_dim)
    q, k, v = (_normal(shape).requires_grad_(with_gradient) for _ in range(3))

    def run() -> None:
        q.grad = k.grad = v.grad = None
        out = attend(q, k, v)
        if with_gradient:
            out.backward(torch.ones_like(out))

    return run


def _grouped(case: cases.Case, with_gradient: bool) -> Callable:
    """Rows of tokens times their experts' matrices, evenly many for each."""
    rows = case.batch * case.queries * case.experts_per_token
    x = _normal(rows, case.hidden).requires_grad_(with_gradient)
    w = _normal(case.experts, case.hidden, case.expert_dim)
    w.requires_grad_(with_gradient)
    ends = torch.arange(1, case.experts + 1, device=DEVICE) * rows // case.experts
    ends = ends.to(torch.int32)

    def run() -> None:
        x.grad = w.grad = None
        y = torch._grouped_mm(x, w, offs=ends)
        if with_gradient:
            y.backward(torch.ones_like(y))

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
    q.requires_grad_(with_gradient), kv.requires_grad_(with_gradient)
    shape = (case.queries, case.topk)
    indices = torch.randint(0, case.keys, shape, device=DEVICE)

    def run() -> None:
        q.grad = kv.grad = None
        for start in range(0, case.queries, CHUNK):
            part = slice(start, start + CHUNK)
            rows = kv[indices[part]]
            scores = torch.einsum("tnc,tkc->tnk", q[part], rows) * case.scale
            probs = scores.softmax(-1, dtype=torch.float32).to(rows.dtype)
            out = torch.einsum("tnk,tkc->tnc", probs, rows[..., : case.latent])
            if with_gradient:
                out.backward(torch.ones_like(out))

    return run


MAKERS = {
    "dense_attention": _dense,
    "dense_attention_bits": _flex,
    "grouped_matmul": _grouped,
    "indexer_topk": _topk,
    "sparse_mla": _sparse,
}
