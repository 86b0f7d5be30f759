"""Block sizes by chip, which an op reads while it is traced.

TPUs have a row a chip, here; GPUs a row a compute capability, in capabilities.py.

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

from pallas_kernels import capabilities, chips, dispatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """Block sizes of the Pallas kernels on one chip."""

    cores: int = 1  # per device; each sums a part of the queries
    vmem_bytes: int = 56 << 20  # limit of a kernel: 64 MB less XLA's own
    dense_attention: tuple[int, int] = (1024, 1024)  # queries, keys: powers of two
    indexer_kl: tuple[int, int] = (512, 1024)  # queries, keys
    indexer_keys: int = 1024  # fetched and scored at a time; divides selection.RUN
    sparse_rows: int = 1024  # fetched at a time; attention and loss
    decode_groups: int = 128  # tiles of 8 cached rows fetched at a time
    decode_gathers: int = 0  # 1: XLA gathers listed rows, on chips with SparseCores


# By the name in `chips.CHIPS`. A v5e and a v6e have 128 MB of VMEM, the others 64.
TPUS = {
    "v5e": Tpu(vmem_bytes=112 << 20),
    "v5p": Tpu(cores=chips.CHIPS["v5p"].cores, decode_gathers=1),
    "v6e": Tpu(vmem_bytes=112 << 20, indexer_keys=2048, decode_gathers=1),
    "tpu7x": Tpu(indexer_keys=2048, decode_gathers=1),
}


def names() -> tuple[str, ...]:
    """Returns the chips of `chips.CHIPS` that have a row."""
    gpus = [c for c in chips.CHIPS.values() if c.platform == "gpu"]
    return (*TPUS, *(c.name for c in gpus if _gpu_row(c) is not None))


def of(chip: str) -> Tpu | capabilities.Gpu:
    """Returns the sizes of a chip by its name in `chips.CHIPS`."""
    row = TPUS.get(chip) or _gpu_row(chips.CHIPS[chip])
    assert row is not None, f"there are no block sizes for {chip}"
    return row


def _gpu_row(chip: chips.Chip) -> capabilities.Gpu | None:
    return capabilities.row(capabilities.named(chip.device_kind))


def tpu() -> Tpu:
    """Returns the sizes of the TPU that a program is traced for, else v5p's."""
    chip = dispatch.chip()
    return TPUS.get("" if chip is None else chip.name, TPUS["v5p"])


def gpu() -> capabilities.Gpu:
    """Returns the tiles of the GPU that a program is traced for, else Hopper's."""
    return (
        capabilities.row(dispatch.capability())
        or capabilities.GPUS[capabilities.HOPPER]
    )


def changed(sizes: Tpu | capabilities.Gpu, entry: str) -> Tpu | capabilities.Gpu:
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
    if isinstance(old, capabilities.Tile):
        new = capabilities.Tile(numbers[:-2], *numbers[-2:])
    return dataclasses.replace(sizes, **{name: new})


def _numbers(entry: capabilities.Tile | tuple[int, ...] | int) -> tuple[int, ...]:
    if isinstance(entry, capabilities.Tile):
        return (*entry.sizes, entry.warps, entry.stages)
    return entry if isinstance(entry, tuple) else (entry,)


@contextlib.contextmanager
def tried(sizes: Tpu | capabilities.Gpu) -> Iterator[None]:
    """Makes programs traced inside use these sizes, whatever the chip."""
    table: dict = TPUS if isinstance(sizes, Tpu) else capabilities.GPUS
    before = dict(table)
    table.update(dict.fromkeys(table, sizes))
    try:
        yield
    finally:
        table.update(before)
