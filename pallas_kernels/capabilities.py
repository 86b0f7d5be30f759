"""Tiles of the Triton kernels by a GPU's compute capability: one row for each.

A capability says what a kernel can rely on: products of the tensor cores, asynchronous
copies, shared memory of a program. Each row was chosen by compiling GLM-5's shapes
with Triton 3.6 for the capability (docs/kernels.md): every kernel fits the shared
memory, and few registers are spilled. Only Hopper's were timed since.
"""

import dataclasses
import re

FLOAT8 = 89  # from here on instructions convert and multiply float8_e4m3fn
HOPPER = 90  # whose row stands for GPUs of which nothing is known
# Compute capabilities by words in jax's name of a GPU, as regular expressions
# (developer.nvidia.com/cuda-gpus, read in November 2026).
NAMES = {
    r"P100|P40|P4": 60,
    r"V100|V100S|TITAN V": 70,
    r"T4|T4G|RTX 20[678]0|Quadro RTX \d+|TITAN RTX": 75,
    r"A100|A100X|A30|A800": 80,
    r"A10|A10G|A16|A2|A40|RTX A\d+|RTX 30\d\d": 86,
    r"L4|L20|L40|L40S|RTX 40\d\d|RTX \d+ Ada": 89,
    r"H100|H200|H800|H20|GH200": 90,
    r"B200|B100|GB200": 100,
    r"B300|GB300": 103,
    r"RTX 50\d\d|RTX PRO \d+": 120,
}

# A GPU of each row of `GPUS`, by jax's name, to compile for.
KINDS = {
    80: "NVIDIA A100-SXM4-80GB",
    86: "NVIDIA A10G",
    89: "NVIDIA L4",
    90: "NVIDIA H200",
    100: "NVIDIA B200",
    120: "NVIDIA GeForce RTX 5090",
}


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of a Triton kernel in bfloat16."""

    sizes: tuple[int, ...]
    warps: int
    stages: int  # of software pipelining


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Tiles of the Triton kernels for one compute capability; defaults are Hopper's."""

    shared_kib: int = 227  # most shared memory of a program
    # Of a multiprocessor, and the most threads that it holds.
    multiprocessor_kib: int = 228
    threads: int = 2048
    cores: int = 132  # multiprocessors among which work is split
    sparse_mla: Tile = Tile((64, 64), 8, 2)  # heads, keys gathered per step
    sparse_mla_dq: Tile = Tile((64, 32), 8, 2)
    sparse_mla_dkv: Tile = Tile((64, 64), 8, 1)
    dense_attention: Tile = Tile((128, 64), 8, 2)  # queries, keys
    dense_attention_dq: Tile = Tile((128, 32), 8, 3)
    dense_attention_dk: Tile = Tile((32, 128), 8, 3)
    dense_attention_dv: Tile = Tile((64, 128), 8, 2)
    indexer_scores: Tile = Tile((256,), 4, 2)  # queries times heads per step
    scores_at: Tile = Tile((128,), 4, 2)  # keys gathered per step
    scores_at_gradient: Tile = Tile((64,), 4, 2)
    kl_target: Tile = Tile((128, 64), 8, 2)  # queries, keys
    kl_loss: Tile = Tile((128, 64), 8, 2)  # queries times heads, keys
    # One stage: pipelined, Hopper's assembler serialises its products (C7515).
    kl_gradient: Tile = Tile((128, 64), 8, 1)
    kl_dk: Tile = Tile((128, 64), 8, 2)
    kl_listed_target: Tile = Tile((64,), 8, 2)  # keys gathered per step
    kl_listed_loss: Tile = Tile((64,), 4, 2)
    kl_listed_gradient: Tile = Tile((64,), 4, 2)
    grouped_matmul: Tile = Tile((128, 256, 64), 8, 4)  # rows, columns, depth
    grouped_matmul_quantized: Tile = Tile((128, 128, 128), 8, 3)  # blocks of scales
    grouped_matmul_dw: Tile = Tile((128, 256, 64), 8, 3)  # depth, columns, rows
    decode_sparse_mla: Tile = Tile((64, 64), 8, 2)  # heads, keys gathered per step
    decode_sparse_mla_codes: Tile = Tile((64, 64), 8, 3)

    def for_heads(self, rest: int) -> "Gpu":
        """Returns the tiles for q and k whose dims exceed a power of two by `rest`.

        Scores then are two products, and more warps than one for 16 queries would
        compute the same ones. In their usual tiles dq and dk would spill on an A100, dk
        on a B200, and Hopper's assembler would serialise dv (C7515).
        """
        if rest == 0:
            return self
        rows_of_warp = 16
        attend, target = self.dense_attention.sizes, self.kl_target.sizes
        is_small = attend[0] < 128
        small, keys = Tile((32, 32), 4, 2), Tile((32, 128), 8, 3)
        return dataclasses.replace(
            self,
            dense_attention=Tile(attend, attend[0] // rows_of_warp, 2),
            dense_attention_dq=small if is_small else self.dense_attention_dq,
            dense_attention_dk=small if is_small else keys,
            dense_attention_dv=small if is_small else keys,
            kl_target=Tile(target, target[0] // rows_of_warp, 2),
        )


_AMPERE = Gpu(  # A100: products of 16 rows from registers, copies of 16 bytes
    shared_kib=163,
    multiprocessor_kib=164,
    cores=108,
    sparse_mla=Tile((64, 32), 8, 2),
    sparse_mla_dq=Tile((32, 16), 4, 2),
    sparse_mla_dkv=Tile((64, 16), 8, 2),
    dense_attention=Tile((64, 64), 8, 2),
    dense_attention_dq=Tile((64, 32), 4, 2),
    dense_attention_dk=Tile((32, 64), 4, 2),
    dense_attention_dv=Tile((32, 64), 4, 2),
    kl_target=Tile((64, 64), 8, 2),
    kl_listed_target=Tile((32,), 4, 2),
    kl_listed_gradient=Tile((32,), 4, 2),
    grouped_matmul=Tile((128, 128, 64), 8, 3),
    grouped_matmul_quantized=Tile((128, 128, 64), 8, 3),
    grouped_matmul_dw=Tile((128, 128, 64), 8, 3),
    decode_sparse_mla=Tile((64, 32), 8, 2),
    decode_sparse_mla_codes=Tile((32, 32), 8, 2),
)
_SMALL = Gpu(  # the same products, and less shared memory
    shared_kib=99,
    multiprocessor_kib=100,
    threads=1536,
    cores=58,
    sparse_mla=Tile((32, 32), 8, 2),
    sparse_mla_dq=Tile((32, 16), 4, 2),
    sparse_mla_dkv=Tile((32, 16), 4, 2),
    dense_attention=Tile((64, 32), 8, 2),
    dense_attention_dq=Tile((32, 32), 4, 2),
    dense_attention_dk=Tile((32, 32), 4, 2),
    dense_attention_dv=Tile((32, 32), 4, 2),
    kl_target=Tile((64, 64), 8, 1),
    kl_dk=Tile((128, 64), 8, 1),
    kl_listed_target=Tile((16,), 4, 2),
    kl_listed_gradient=Tile((32,), 4, 2),
    grouped_matmul=Tile((128, 128, 32), 8, 4),
    grouped_matmul_quantized=Tile((128, 128, 64), 8, 2),
    grouped_matmul_dw=Tile((128, 128, 32), 8, 4),
    decode_sparse_mla=Tile((32, 32), 8, 2),
    decode_sparse_mla_codes=Tile((32, 32), 8, 2),
)
_BLACKWELL = Gpu(  # B200: as Hopper, but for what fits its tensor memory
    cores=148,
    sparse_mla=Tile((64, 32), 8, 2),
    sparse_mla_dq=Tile((32, 32), 8, 2),
    sparse_mla_dkv=Tile((32, 64), 8, 2),
    dense_attention_dq=Tile((128, 32), 8, 2),
    dense_attention_dk=Tile((32, 128), 8, 2),
    indexer_scores=Tile((256,), 8, 2),
    kl_listed_target=Tile((32,), 8, 2),
    decode_sparse_mla=Tile((64, 32), 8, 2),
    decode_sparse_mla_codes=Tile((64, 32), 8, 1),
)
GPUS = {
    80: _AMPERE,
    86: dataclasses.replace(_SMALL, cores=84),
    89: _SMALL,
    90: Gpu(),
    100: _BLACKWELL,
    120: dataclasses.replace(_SMALL, cores=170),
}


def named(device_kind: str) -> int | None:
    """Returns the compute capability of a GPU by jax's name, or None if unknown."""
    for words, number in NAMES.items():
        if re.search(rf"(?<!\w)(?:{words})(?!\w)", device_kind):
            return number
    return None


def row(capability: int | None) -> Gpu | None:
    """Returns the tiles for a compute capability, or None where no kernel runs.

    A newer GPU of the same generation takes the row of an older one: 103 that of 100.
    """
    if capability is None:
        return None
    known = [n for n in GPUS if n // 10 == capability // 10 and n <= capability]
    return GPUS[max(known)] if known else None


def refusal(capability: int | None) -> str | None:
    """Returns why no kernel runs on GPUs of a compute capability, or None."""
    if row(capability) is not None:
        return None
    known = ", ".join(map(text, sorted(GPUS)))
    if capability is None:
        return f"its compute capability is unknown, and the kernels are for {known}"
    given = f"its compute capability is {text(capability)}"
    if capability < min(GPUS):
        given += ", without bfloat16 products and asynchronous copies"
    return f"{given}, and the kernels are for {known}"


def text(capability: int) -> str:
    """Returns a compute capability as NVIDIA writes it: 9.0 for 90."""
    return f"{capability // 10}.{capability % 10}"
