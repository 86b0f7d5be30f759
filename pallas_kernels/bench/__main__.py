r"""Times kernels against their rooflines, or compiles them for chips not at hand.

On a machine with the device:
  python -m pallas_kernels.bench sparse_mla indexer_topk --length 4096,32768 \
      --mode fwd,bwd,det --json times.json --plot times.png
Anywhere, with the extra `aot` installed:
  python -m pallas_kernels.bench --aot --chip v5p --length 32768
Of GPUs of a compute capability, with Triton alone:
  python -m pallas_kernels.bench sparse_mla --aot --capability 8.6 --mode bwd
"""

import argparse
import atexit
import difflib
import importlib.util
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels import (
    aot,
    block_sizes,
    capabilities,
    cases,
    chips,
    dispatch,
    selection,
)
from pallas_kernels.bench import measure, operations, table

_CAPABILITIES = {capabilities.text(n): n for n in capabilities.GPUS}
_BLOCKS = "other block sizes, one by one: sparse_mla=64,32,8,2; then warps, stages"


def main(argv: list[str] | None = None) -> int:
    """Runs the jobs one by one; reports a job that fails and runs the others."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; the extra 'bench' brings it")
    jobs = _jobs(parser, args)
    chip = _chip(parser, args)
    _check_blocks(parser, args, chip)
    columns = table.COMPILED if args.aot else table.TIMED
    where = chip.name if chip else args.capability or jax.devices()[0].device_kind
    print(
        f"{'compiled for' if args.aot else 'timed on'} {where}, jax {jax.__version__}"
    )
    print(table.header(columns), flush=True)
    rows = []
    for row in _run(jobs, chip, args):
        rows.append(row)
        print(table.line(row, columns), flush=True)
        if args.json:
            _write(args.json, {"chip": where, "jax": jax.__version__, "rows": rows})
    if args.plot:
        from pallas_kernels.bench import plot

        plot.save(rows, args.plot, where)
    return int(any("failure" in row or row.get("is_wrong") for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help=", ".join(operations.OPERATIONS))
    add("--chip", choices=block_sizes.names(), help="default: the device at hand")
    add("--capability", choices=_CAPABILITIES, help="of GPUs, instead of --chip")
    add("--length", default="4096", help="tokens: 4096,32768,131072,202752")
    add("--mode", default="fwd", help="of fwd, bwd (with forward), det (reproducible)")
    add("--index", default="random", help="index lists: random, local, captured")
    add("--lists", type=pathlib.Path, help="captured lists, [T, K] int32 .npy")
    add("--implementation", help="default: the best one of the chip")
    add("--queries", type=int, help="of the last tokens alone: context parallelism")
    add("--heads", type=int, help="of the attention: tensor parallelism")
    add("--blocks", nargs="*", default=[""], metavar="NAME=N,N", help=_BLOCKS)
    add("--size", default="glm5", choices=("glm5", "small"), help="dims of the layer")
    add("--aot", action="store_true", help="compile only; no device is needed")
    add("--no_baseline", action="store_true", help="do not time plain XLA beside it")
    add("--json", type=pathlib.Path, help="write all rows to this file, as they come")
    add("--plot", type=pathlib.Path, help="draw time against length into this file")
    return parser


def _jobs(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> list[measure.Job]:
    """Returns a job per combination of requested values; exits with 2 if invalid."""
    for op in args.ops:
        if op not in operations.OPERATIONS:
            close = difflib.get_close_matches(op, operations.OPERATIONS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            known = ", ".join(operations.OPERATIONS)
            parser.error(f"OP must be of {known}, got {op}{hint}")
    modes = args.mode.split(",")
    if set(modes) - set(measure.MODES):
        parser.error(f"--mode must be of {','.join(measure.MODES)}, got {args.mode}")
    if not all(n.isdigit() and int(n) > 0 for n in args.length.split(",")):
        parser.error(f"--length must be positive integers, got {args.length}")
    for name in ("queries", "heads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    if args.index not in (*cases.INDEX_PATTERNS, "captured"):
        parser.error(f"--index must be random, local or captured, got {args.index}")
    if (args.index == "captured") != (args.lists is not None):
        parser.error("--index captured needs --lists=FILE.npy, and only it does")
    lists = _lists(parser, args)
    ops = args.ops or list(operations.OPERATIONS)
    return [
        measure.Job(
            op=op,
            length=int(length),
            mode=mode,
            implementation=args.implementation,
            pattern=args.index,
            lists=lists,
            small=args.size == "small",
            queries=args.queries,
            heads=args.heads,
            blocks=blocks,
        )
        for op in ops
        for length in args.length.split(",")
        for mode in modes
        for blocks in args.blocks
        if measure.runnable(op, mode)
    ]


def _lists(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> np.ndarray | None:
    """Reads captured lists, one per token."""
    if args.lists is None:
        return None
    if not args.lists.is_file():
        parser.error(f"--lists: there is no file {args.lists}")
    lists = np.load(args.lists)
    for length in map(int, args.length.split(",")):
        topk = operations.at("sparse_mla", length, args.size == "small").topk
        if lists.dtype != np.int32 or lists.shape != (length, topk):
            given = f"{lists.dtype} {lists.shape}"
            parser.error(f"--lists must be int32 [{length}, {topk}], got {given}")
        try:
            selection.check_lists(lists[None], length)
        except ValueError as error:
            parser.error(f"--lists: {error}")
    return lists


def _chip(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> chips.Chip | None:
    """Returns the chip to compile for, or this machine's, which timing needs."""
    if args.capability and (args.chip or not args.aot):
        parser.error("--capability replaces --chip, and only --aot takes it")
    if args.capability:
        return None
    if args.aot:
        if args.chip is None:
            known = ", ".join(block_sizes.names())
            parser.error(f"--aot needs --chip, one of {known}, or --capability")
        folder = pathlib.Path(tempfile.mkdtemp(prefix="pallas_kernels_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # gigabytes
        aot.dump_bundles(folder)
        return chips.CHIPS[args.chip]
    here = dispatch.chip()
    if args.chip is not None and (here is None or here.name != args.chip):
        kind = jax.devices()[0].device_kind
        parser.error(f"--chip={args.chip}, but the device is {kind}; add --aot")
    return here


def _check_blocks(
    parser: argparse.ArgumentParser, args: argparse.Namespace, chip: chips.Chip | None
) -> None:
    """Exits with 2 on an entry that the chip's row of block sizes does not have."""
    for entry in filter(None, args.blocks):
        if args.capability:
            sizes = capabilities.GPUS[_CAPABILITIES[args.capability]]
        elif chip is None or chip.name not in block_sizes.names():
            parser.error(f"--blocks needs a chip of {', '.join(block_sizes.names())}")
        else:
            sizes = block_sizes.of(chip.name)
        try:
            block_sizes.changed(sizes, entry)
        except ValueError as error:
            parser.error(f"--blocks: {error}")


def _run(
    jobs: list[measure.Job], chip: chips.Chip | None, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    for i, job in enumerate(jobs, 1):
        name = {"op": job.op, "length": job.length, "mode": job.mode}
        name |= {"blocks": job.blocks} if job.blocks else {}
        print(f"[{i}/{len(jobs)}] {' '.join(map(str, name.values()))}", file=sys.stderr)
        try:
            if args.capability:
                number = _CAPABILITIES[args.capability]
                row = measure.compiled_by_triton(job, number)
            elif args.aot:
                assert chip is not None
                row = measure.compiled(job, chip)
            else:
                row = measure.timed(job, chip, baseline=not args.no_baseline)
        except Exception as error:  # other ops run even if one is out of memory
            row = {"failure": f"{type(error).__name__}: {error}"}
        yield name | row


def _write(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
