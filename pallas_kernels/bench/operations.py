"""Describes every op to the benchmark: its inputs, a call, and its least work.

Work follows from the definition, whatever an implementation does: visible pairs of
query and key, listed rows, rows that have an expert. Bytes count each input and output
once, and listed rows once per query. A kernel moves less if rows are in a cache.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import cases
from pallas_kernels.cases import Case

# Inputs with a row per query.
OF_QUERIES = ("q", "q_latent", "q_index", "w", "lo", "hi", "indices", "bits", "weight")
OF_QUERIES += ("q_index_fp8",)
LATENT_BYTES = 2  # bfloat16
LISTS: dict[str, Any] = {"indices_are_sorted": True}  # as a selection gives them


@dataclasses.dataclass(frozen=True)
class Operation:
    """An op as the benchmark calls it.

    `call(case, implementation, deterministic)` returns a function of the inputs;
    `work(case)` the FLOPs and bytes of the forward and of the backward pass.
    """

    inputs: tuple[str, ...]
    call: Callable[[Case, str | None, bool], Callable]
    work: Callable[[Case], tuple[float, float, float, float]]
    differentiable: tuple[int, ...] = ()  # inputs that have a gradient
    rate: int = 1  # of its products on tensor cores, over bfloat16's

    @property
    def has_rows(self) -> bool:
        """Tells whether each output row depends only on its own query."""
        is_loss = "weight" in self.inputs
        return not is_loss and "rows" not in self.inputs


def pairs(case: Case) -> float:
    """Returns the number of visible pairs of query and key."""
    lo, hi = cases.bounds(case)
    return float(np.maximum(hi - lo, 0).sum(dtype=np.float64))


def listed(case: Case) -> float:
    """Returns the number of entries of the index lists."""
    lo, hi = cases.bounds(case)
    return float(np.clip(hi - lo, 0, case.topk).sum(dtype=np.float64))


def size(case: Case, *names: str) -> float:
    """Returns the bytes of inputs."""
    table = cases.shapes(case)
    return float(sum(np.prod(table[n].shape) * table[n].dtype.itemsize for n in names))


def make(case: Case, names: tuple[str, ...], pattern: str, lists: Any) -> tuple:
    """Makes random inputs; `lists` [T, K] are used by the pattern "captured"."""
    return tuple(_input(case, name, pattern, lists) for name in names)


def _input(case: Case, name: str, pattern: str, lists: Any) -> jax.Array:
    table = cases.shapes(case)
    wanted = table[name]
    key = jax.random.fold_in(jax.random.key(0), list(table).index(name))
    if name == "indices" and pattern == "captured":
        last = lists[-case.queries :]
        return jnp.asarray(np.broadcast_to(last, wanted.shape), jnp.int32)
    if name == "bits":
        names = ("q_index", "k_index", "w", "lo", "hi")
        args = make(case, names, pattern, lists)
        return jax.jit(_call("indexer_bits", topk=case.topk))(*args)
    if name == "lse":  # for scores with unit variance
        lo, hi = cases.bounds(case)
        row = np.log(np.maximum(np.minimum(hi - lo, case.topk), 1)) + 0.5
        return jnp.asarray(np.broadcast_to(row[:, None], wanted.shape), jnp.float32)
    if name == "group_sizes":
        share = np.random.default_rng(0).dirichlet(np.full(case.experts, 20.0))
        rows = cases.shapes(case)["rows"].shape[0]
        sizes = np.floor(share * rows).astype(np.int32)
        sizes[0] += rows - sizes.sum()
        return jnp.asarray(sizes)
    if name == "indices":  # a gigabyte at 128K
        uniform = lambda key: jax.random.uniform(key, wanted.shape)
        return jax.jit(lambda key: cases.lists(case, uniform(key), pattern))(key)
    if name in ("lo", "hi", "weight"):
        return cases.make(case, name, pattern=pattern)[0]
    if name == "k_exponents":
        return jax.random.randint(key, wanted.shape, -3, 3, jnp.int8)
    if name in _ROW_CODES:
        made = functools.partial(_rows_of_bytes, case, _ROW_CODES[name])
        return jax.jit(made)(key)
    if name == "experts_int8":
        return jax.random.randint(key, wanted.shape, -127, 128, jnp.int8)
    if name == "scales":
        return jnp.full(wanted.shape, 0.01)
    # Sampled on the device: hundreds of megabytes.
    return jax.random.normal(key, wanted.shape, jnp.bfloat16).astype(wanted.dtype)


def _rows_of_bytes(case: Case, codes: str, key: jax.Array) -> jax.Array:
    """Makes cached rows with numbers of about 1."""
    form, rows = case.row_form(codes), (case.batch, case.keys)
    keys, largest = jax.random.split(key, 3), 100 if codes == "int8" else 1
    normal = jax.random.normal(keys[0], (*rows, form.latent), jnp.bfloat16)
    scales = jax.random.uniform(keys[1], (*rows, form.num_tiles), minval=0.5)
    kept = jax.random.normal(keys[2], (*rows, form.kept), jnp.bfloat16)
    small = jnp.clip(normal * (largest / 4), -largest, largest).astype(codes)
    made = form.joined(small, scales * (4 / largest), kept)
    return jnp.pad(made, ((0, 0), (0, 0), (0, case.byte_padding)))


def _call(name: str, **options: Any) -> Callable:
    return lambda *args: getattr(pallas_kernels, name)(*args, **options)


def _index_call(name: str) -> Callable:
    return lambda case, implementation, deterministic: _call(
        name, topk=case.topk, implementation=implementation
    )


def _codes_call(name: str) -> Callable:
    def build(case: Case, implementation: str | None, deterministic: bool) -> Callable:
        options = {"topk": case.topk, "implementation": implementation}

        def run(q: jax.Array, k: jax.Array, k_exponents: jax.Array, *rest: Any) -> Any:
            return _call(name, k_exponents=k_exponents, **options)(q, k, *rest)

        return run

    return build


def _indexer_work(
    case: Case, inputs: tuple[str, ...] = ("q_index", "k_index", "w")
) -> tuple[float, float, float, float]:
    flops = pairs(case) * 2 * case.index_heads * case.index_dim
    return flops, size(case, *inputs, "indices"), 0.0, 0.0


def _scores_at_work(case: Case) -> tuple[float, float, float, float]:
    one = listed(case) * 2 * case.index_heads * case.index_dim
    gathered = listed(case) * case.index_dim * LATENT_BYTES
    moved = size(case, "q_index", "w", "indices")
    return one, gathered + moved, 2 * one, 5 * gathered + 2 * moved


def _sparse_work(case: Case) -> tuple[float, float, float, float]:
    c, o = case.latent + case.rope, case.latent
    entries, row = listed(case), (case.latent + case.rope) * LATENT_BYTES
    forward = entries * 2 * case.heads * (c + o)
    backward = entries * 2 * case.heads * (3 * c + 2 * o)
    moved = size(case, "q_latent", "indices")
    # A row's gradient is read, increased and written in float32.
    return forward, entries * row + 2 * moved, backward, entries * row * 5 + 4 * moved


def _sparse_call(case: Case, implementation: str | None, deterministic: bool) -> Any:
    return _call(
        "sparse_mla",
        scale=case.scale,
        value_dim=case.latent,
        deterministic=deterministic,
        implementation=implementation,
        **LISTS,
    )


def _dense_work(case: Case) -> tuple[float, float, float, float]:
    h, o = case.head_dim, case.value_dim
    one = pairs(case) * 2 * case.heads
    moved = size(case, "q", "k", "v", "v")
    return one * (h + o), moved, one * (3 * h + 2 * o), 2 * moved


def _dense_call(case: Case, implementation: str | None, deterministic: bool) -> Any:
    return _call("dense_attention", scale=case.scale, implementation=implementation)


def _kl_call(name: str, num_main: int) -> Callable:
    def build(case: Case, implementation: str | None, deterministic: bool) -> Callable:
        loss = getattr(pallas_kernels, name)
        extra = LISTS if name == "sparse_indexer_kl_loss" else {}

        def run(*args: Any) -> jax.Array:
            index, main, rest = args[:3], args[3 : 3 + num_main], args[3 + num_main :]
            options = {"scale": case.scale, "implementation": implementation}
            return loss(main, index, *rest, **options, **extra)

        return run

    return build


def _kl_work(case: Case) -> tuple[float, float, float, float]:
    main = 2 * case.heads * case.head_dim
    index = 2 * case.index_heads * case.index_dim
    moved = size(case, "q", "k", "q_index", "k_index", "lse")
    return pairs(case) * (main + index), moved, pairs(case) * 2 * index, moved


def _sparse_kl_work(case: Case) -> tuple[float, float, float, float]:
    width = case.latent + case.rope
    main, index = 2 * case.heads * width, 2 * case.index_heads * case.index_dim
    rows = listed(case) * (width + case.index_dim) * LATENT_BYTES
    moved = size(case, "q_latent", "q_index", "lse", "indices")
    entries = listed(case)
    return entries * (main + index), rows + moved, entries * 2 * index, rows + moved


def _layer_call(select: str, attend: str, loss: str) -> Callable:
    """Calls a layer's attention: selection, attention to it, and the indexer's loss."""

    def build(case: Case, implementation: str | None, deterministic: bool) -> Callable:
        named = functools.partial(_call, implementation=implementation)
        is_latent = attend == "sparse_mla"
        lists = LISTS if is_latent else {}
        extra = {**lists, "value_dim": case.latent} if is_latent else {}

        def run(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
            *index, lo, hi, weight = args[:6]
            main = args[6:]
            selected = named(select, topk=case.topk)(*index, lo, hi)
            bounds = (selected,) if is_latent else (lo, hi, selected)
            out, lse = named(attend, scale=case.scale, **extra)(*main, *bounds)
            target = (*main[:2], lse)
            kl = named(loss, scale=case.scale, **lists)(
                target, tuple(index), *bounds, weight
            )
            return out, kl

        return run

    return build


def _layer_work(*parts: Callable) -> Callable:
    def work(case: Case) -> tuple[float, float, float, float]:
        a, b, c, d = zip(*(part(case) for part in parts), strict=True)
        return sum(a), sum(b), sum(c), sum(d)

    return work


def _grouped_work(weights: str, num_gradients: int) -> Callable:
    def work(case: Case) -> tuple[float, float, float, float]:
        rows = case.batch * case.queries * case.experts_per_token
        flops = 2.0 * rows * case.hidden * case.expert_dim
        moved = rows * (case.hidden + case.expert_dim) * LATENT_BYTES
        moved += size(case, weights)
        return flops, moved, num_gradients * flops, num_gradients * moved

    return work


def _plain_call(name: str) -> Callable:
    return lambda case, implementation, deterministic: _call(
        name, implementation=implementation
    )


def _decode_work(
    case: Case, codes: str | None = None
) -> tuple[float, float, float, float]:
    flops, moved, *_ = _sparse_work(case)
    if codes is not None:
        row = (case.latent + case.rope) * LATENT_BYTES
        moved -= listed(case) * (row - case.row_form(codes).width)
    return flops, moved, 0.0, 0.0


def _decode_call(
    case: Case,
    implementation: str | None,
    deterministic: bool,
    codes: str | None = None,
) -> Any:
    return _call(
        "decode_sparse_mla",
        scale=case.scale,
        value_dim=case.latent,
        kv_codes=codes,
        implementation=implementation,
        **LISTS,
    )


_INDEX = ("q_index", "k_index", "w")
_CODES = ("k_index_fp8", "k_exponents")
_ROW_CODES = {"kv_fp8": "float8_e4m3fn", "kv_int8": "int8"}  # of rows of bytes
OPERATIONS = {
    "indexer_topk": Operation(
        (*_INDEX, "lo", "hi"), _index_call("indexer_topk"), _indexer_work
    ),
    "indexer_topk_fp8": Operation(
        ("q_index_fp8", *_CODES, "w", "lo", "hi"),
        _codes_call("indexer_topk"),
        functools.partial(_indexer_work, inputs=("q_index_fp8", *_CODES, "w")),
        rate=2,
    ),
    "indexer_bits": Operation(
        (*_INDEX, "lo", "hi"), _index_call("indexer_bits"), _indexer_work
    ),
    "indexer_scores_at": Operation(
        (*_INDEX, "indices"),
        _plain_call("indexer_scores_at"),
        _scores_at_work,
        (0, 1, 2),
    ),
    "sparse_mla": Operation(
        ("q_latent", "kv", "indices"), _sparse_call, _sparse_work, (0, 1)
    ),
    "dense_attention": Operation(
        ("q", "k", "v", "lo", "hi"), _dense_call, _dense_work, (0, 1, 2)
    ),
    "dense_attention_bits": Operation(
        ("q", "k", "v", "lo", "hi", "bits"), _dense_call, _dense_work, (0, 1, 2)
    ),
    "indexer_kl_loss": Operation(
        (*_INDEX, "q", "k", "lse", "lo", "hi", "bits", "weight"),
        _kl_call("indexer_kl_loss", 3),
        _kl_work,
        (0, 1, 2),
    ),
    "sparse_indexer_kl_loss": Operation(
        (*_INDEX, "q_latent", "kv", "lse", "indices", "weight"),
        _kl_call("sparse_indexer_kl_loss", 3),
        _sparse_kl_work,
        (0, 1, 2),
    ),
    "listed_layer": Operation(
        (*_INDEX, "lo", "hi", "weight", "q_latent", "kv"),
        _layer_call("indexer_topk", "sparse_mla", "sparse_indexer_kl_loss"),
        _layer_work(_indexer_work, _sparse_work, _sparse_kl_work),
        (0, 1, 2, 6, 7),
    ),
    "masked_layer": Operation(
        (*_INDEX, "lo", "hi", "weight", "q", "k", "v"),
        _layer_call("indexer_bits", "dense_attention", "indexer_kl_loss"),
        _layer_work(_indexer_work, _dense_work, _kl_work),
        (0, 1, 2, 6, 7, 8),
    ),
    "grouped_matmul": Operation(
        ("rows", "experts", "group_sizes"),
        _plain_call("grouped_matmul"),
        _grouped_work("experts", 2),
        (0, 1),
    ),
    "grouped_matmul_fp8": Operation(
        ("rows", "experts_fp8", "scales", "group_sizes"),
        _plain_call("grouped_matmul_quantized"),
        _grouped_work("experts_fp8", 1),
        (0,),
    ),
    "grouped_matmul_int8": Operation(
        ("rows", "experts_int8", "scales", "group_sizes"),
        _plain_call("grouped_matmul_quantized"),
        _grouped_work("experts_int8", 1),
        (0,),
    ),
    "decode_indexer_topk": Operation(
        (*_INDEX, "lo", "hi"), _index_call("decode_indexer_topk"), _indexer_work
    ),
    "decode_indexer_topk_fp8": Operation(
        ("q_index", *_CODES, "w", "lo", "hi"),
        _codes_call("decode_indexer_topk"),
        functools.partial(_indexer_work, inputs=("q_index", *_CODES, "w")),
    ),
    "decode_sparse_mla": Operation(
        ("q_latent", "kv", "indices"), _decode_call, _decode_work
    ),
    **{
        name.replace("kv", "decode_sparse_mla"): Operation(
            ("q_latent", name, "indices"),
            functools.partial(_decode_call, codes=codes),
            functools.partial(_decode_work, codes=codes),
        )
        for name, codes in _ROW_CODES.items()
    },
}


def at(name: str, length: int, small: bool = False) -> Case:
    """Returns an op's sizes at a length: decoding has one query, experts no keys."""
    case = cases.full(length)
    if small:
        case = dataclasses.replace(cases.SMALL["short"], queries=length, keys=length)
    if name.startswith("decode"):
        case = dataclasses.replace(case, queries=1, batch=1 if small else 8)
    return case
