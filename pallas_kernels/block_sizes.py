"""Block sizes by chip: one table, which an op reads while it is traced.

Among entries that compile without spills, these need the fewest bundles
(docs/kernels.md); none was chosen by timing. Try another entry with
`python -m pallas_kernels.bench OP --blocks NAME=...`. The kernels themselves hold sizes
that the hardware or a layout dictates, and those for float32, which serves only tests.
"""

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator
from typing import Any

from pallas_kernels import chips, dispatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """Block sizes of the Pallas kernels on one chip."""

    cores: int = 1  # per device; each sums a part of the queries
    vmem_bytes: int = 56 << 20  # limit of a kernel: 64 MB less XLA's own
    masked_mla: tuple[int, int] = (1024, 1024)  # queries, keys: powers of two
    indexer_kl: tuple[int, int] = (512, 1024)  # queries, keys
    indexer_keys: int = 1024  # fetched and scored at a time; divides selection.RUN
    sparse_rows: int = 1024  # fetched at a time; attention and loss
    decode_groups: int = 128  # tiles of 8 cached rows fetched at a time


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of a Triton kernel in bfloat16."""

    sizes: tuple[int, ...]
    warps: int
    stages: int  # of software pipelining


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Tiles of the Triton kernels on a Hopper GPU."""

    sparse_mla: Tile = Tile((64,), 8, 2)  # keys gathered per step
    sparse_mla_dq: Tile = Tile((32,), 8, 2)
    sparse_mla_dkv: Tile = Tile((64,), 4, 1)  # 8 warps would compute the scores twice
    masked_mla: Tile = Tile((128, 64), 8, 2)  # queries, keys
    masked_mla_dq: Tile = Tile((128, 32), 8, 3)
    masked_mla_dk: Tile = Tile((32, 128), 8, 3)
    masked_mla_dv: Tile = Tile((64, 128), 8, 2)
    indexer_scores: Tile = Tile((256,), 4, 2)  # queries times heads per step
    grouped_matmul: Tile = Tile((128, 256, 64), 8, 4)  # rows, columns, depth
    grouped_matmul_quantized: Tile = Tile((128, 128, 128), 8, 3)  # blocks of scales
    grouped_matmul_dw: Tile = Tile((128, 256, 64), 8, 3)  # depth, columns, rows
    decode_sparse_mla: Tile = Tile((64,), 8, 2)  # keys gathered per step


# By the chip's name in `chips.CHIPS`. A v6e has 128 MB of VMEM, the others 64.
TPUS = {
    "v5p": Tpu(cores=chips.CHIPS["v5p"].cores),
    "v6e": Tpu(vmem_bytes=112 << 20, indexer_keys=2048),
    "tpu7x": Tpu(indexer_keys=2048),
}
GPUS = {"h200": Gpu()}
NAMES = (*TPUS, *GPUS)


def of(chip: str) -> Tpu | Gpu:
    """Returns the sizes of a chip by its name in `chips.CHIPS`."""
    return (TPUS | GPUS)[chip]


def tpu() -> Tpu:
    """Returns the sizes of the TPU that a program is traced for, else v5p's."""
    chip = dispatch.chip()
    return TPUS.get("" if chip is None else chip.name, TPUS["v5p"])


def gpu() -> Gpu:
    """Returns the sizes of GPUs; every Hopper uses those of the H200."""
    chip = dispatch.chip()
    return GPUS.get("" if chip is None else chip.name, GPUS["h200"])


def changed(sizes: Tpu | Gpu, entry: str) -> Tpu | Gpu:
    """Changes one entry, such as "NAME=64,8,2": a tile's sizes, then warps and stages.

    Raises:
      ValueError: if the entry does not exist or takes other numbers.
    """
    name, _, values = entry.partition("=")
    names = [field.name for field in dataclasses.fields(sizes)]
    if name not in names:
        close = difflib.get_close_matches(name, names)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"NAME must be of {', '.join(names)}, got {name!r}{hint}")
    old = getattr(sizes, name)
    before, given = _numbers(old), values.split(",")
    if len(given) != len(before) or not all(n.isdigit() for n in given):
        example = ",".join(map(str, before))
        raise ValueError(
            f"{name} takes {len(before)} numbers, as in {example}, got {values!r}"
        )
    numbers = tuple(map(int, given))
    new: Any = numbers if isinstance(old, tuple) else numbers[0]
    if isinstance(old, Tile):
        new = Tile(numbers[:-2], *numbers[-2:])
    return dataclasses.replace(sizes, **{name: new})


def _numbers(entry: Tile | tuple[int, ...] | int) -> tuple[int, ...]:
    if isinstance(entry, Tile):
        return (*entry.sizes, entry.warps, entry.stages)
    return entry if isinstance(entry, tuple) else (entry,)


@contextlib.contextmanager
def tried(sizes: Tpu | Gpu) -> Iterator[None]:
    """Makes programs traced inside use these sizes, whatever the chip."""
    table: dict = TPUS if isinstance(sizes, Tpu) else GPUS
    before = dict(table)
    table.update(dict.fromkeys(table, sizes))
    try:
        yield
    finally:
        table.update(before)
