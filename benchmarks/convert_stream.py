"""Time and memory of `convert` for a checkpoint with GLM-5's names, scaled down.

    python benchmarks/convert_stream.py --folder=DIR [--fp8] [--trained=1,8]

Writes 78 + 1 layers of 256 experts (59,870 tensors; every width divided by 16) in
several files, converts them to a run folder and back, each in a process of its own, and
compares every tensor. Prints one JSON line a conversion, for a quarter, half and all of
the layers: the time per tensor should not depend on their number, nor the memory.
--trained also exports a step that training's manager saved from that many devices (it
needs memory for the model, and a little more of the disk).
DIR needs three times the bytes of the model (6 GB for the largest) and is left empty.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import zlib

import numpy as np

from glm5_jax import presets
from glm5_jax.checkpoint import leaves as leaves_lib
from glm5_jax.model import transformer
from glm5_jax.weights import huggingface, huggingface_config, safetensors_file
from glm5_jax.weights import huggingface_names as names_lib

CONSTANT = 3 * 2**29  # bytes a conversion may need beside its largest tensor
BF16 = safetensors_file.DTYPES["BF16"]
F32 = safetensors_file.DTYPES["F32"]
WIDTHS = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "num_attention_heads", "index_n_heads", "index_head_dim"),
)


def main() -> None:
    """Parses flags and prints JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--layers", default="20,39,78", help="sizes, by main layers")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--divide", type=int, default=16, help="every width by this")
    parser.add_argument("--shard_bytes", type=int, default=2**28)
    parser.add_argument("--fp8", action="store_true", help="also to FP8 and back")
    parser.add_argument("--trained", default="", help="numbers of devices")
    parser.add_argument("--child", nargs=3, help="source, target and dtype, or ''")
    parser.add_argument("--save", nargs=2, help="run, and run to save it to")
    args = parser.parse_args()
    if args.child:
        _convert(*args.child)
        return
    if args.save:
        _save_as_training_does(*map(pathlib.Path, args.save))
        return
    for layers in args.layers.split(","):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            _measure(pathlib.Path(folder), int(layers), args)


def _measure(folder: pathlib.Path, num_layers: int, args: argparse.Namespace) -> None:
    source, run, back = folder / "source", folder / "run", folder / "back"
    config = _config(num_layers, args.experts, args.divide)
    tensors = _write(source, config, args.shard_bytes)
    sizes = [
        math.prod(x.shape) * safetensors_file.DTYPES[x.dtype].itemsize
        for x in tensors.values()
    ]
    steps = [("import", source, run, ""), ("export", run, back, "")]
    if args.fp8:
        steps += [("fp8", run, folder / "fp8", "fp8")]
        steps += [("fp8 to float32", folder / "fp8", folder / "float32", "float32")]
        steps += [("and to fp8", folder / "float32", folder / "fp8_back", "fp8")]
    for count in filter(None, args.trained.split(",")):
        trained = folder / f"trained_{count}"
        steps.append((f"export of training on {count}", trained, back, ""))
    for step, here, there, dtype in steps:
        if not here.exists():
            _save_from(run, here, here.name.removeprefix("trained_"))
        command = [sys.executable, __file__, "--child", str(here), str(there), dtype]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        num, total = len(tensors), sum(sizes)
        row = {
            "step": step,
            "layers": num_layers,
            "tensors": num,
            "total_bytes": total,
            "largest_bytes": max(sizes),
            "seconds": round(found["seconds"], 2),
            "tensors_per_second": round(num / found["seconds"], 1),
            "tensors_per_cpu_second": round(num / found["cpu_seconds"], 1),
            "cpu_microseconds_per_tensor": round(1e6 * found["cpu_seconds"] / num, 1),
            "bytes_per_cpu_second": round(total / found["cpu_seconds"]),
            "peak_bytes": found["peak_bytes"],
            "allowed_bytes": max(sizes) + CONSTANT,
        }
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if there.name in ("back", "fp8_back"):
            _require_same(source if there == back else folder / "fp8", there)
            shutil.rmtree(there)
        if here.name.startswith("trained"):
            shutil.rmtree(here)


def _convert(source: str, target: str, dtype: str) -> None:
    """The child: converts, and prints seconds and bytes of memory that it took."""
    from glm5_jax.weights import conversion

    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _status("VmRSS")
    began, cpu_began = time.perf_counter(), time.process_time()
    conversion.convert(source, target, dtype=dtype or None)
    found = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - cpu_began,
        "peak_bytes": _status("VmHWM") - before,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def _save_from(run: pathlib.Path, target: pathlib.Path, num_devices: str) -> None:
    count = f"--xla_force_host_platform_device_count={num_devices}"
    command = [sys.executable, __file__, "--save", str(run), str(target)]
    subprocess.run(command, check=True, env=os.environ | {"XLA_FLAGS": count})


def _save_as_training_does(run: pathlib.Path, target: pathlib.Path) -> None:
    """The child: puts a model on all devices, as fsdp does, and saves it."""
    import jax

    from glm5_jax import config as config_lib
    from glm5_jax import mesh as mesh_lib
    from glm5_jax import sharding
    from glm5_jax.checkpoint import manager
    from glm5_jax.weights import loading

    config = loading.read_config(loading.find(run))
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=1, fsdp=jax.device_count()))
    places = sharding.shardings(transformer.param_dims(config), mesh)
    shapes, treedef = leaves_lib.flatten(transformer.abstract_params(config))
    abstract = [
        jax.ShapeDtypeStruct(
            leaf.shape, huggingface.cast(path, leaf.dtype), sharding=place
        )
        for (path, leaf), place in zip(
            shapes.items(), treedef.flatten_up_to(places), strict=True
        )
    ]
    abstract = jax.tree.unflatten(treedef, abstract)
    params = loading.load_params(run, config, abstract)
    checkpoints = manager.CheckpointManager(target, keep=1)
    began = time.perf_counter()
    checkpoints.save(1, {"params": params}, {})
    checkpoints.close()
    seconds = time.perf_counter() - began
    shutil.copy(run / "config.json", target)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    row = {"step": f"save on {jax.device_count()}", "bytes_per_second": size / seconds}
    sys.stdout.write(json.dumps(row) + "\n")


def _status(field: str) -> int:
    """A field of the process's status in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(x for x in lines if x.startswith(field)).split()[1])


def _config(num_layers: int, num_experts: int, divide: int):  # noqa: ANN202
    widths = {name: getattr(presets.GLM5, name) // divide for name in WIDTHS}
    return dataclasses.replace(
        presets.GLM5,
        num_hidden_layers=num_layers,
        n_routed_experts=num_experts,
        num_experts_per_tok=min(8, num_experts),
        eos_token_id=(0,),
        pad_token_id=0,
        param_dtype="bfloat16",
        **widths,
    )


def _write(folder: pathlib.Path, config, shard_bytes: int):  # noqa: ANN001, ANN202
    """Random tensors of a model in files as they are released."""
    folder.mkdir()
    huggingface_config.write_config(config, folder)
    leaves, _ = leaves_lib.flatten(transformer.abstract_params(config))
    files, used = [{}], 0
    for slot in names_lib.tensor_slots(config, leaves):
        kind = F32 if slot.name.endswith("correction_bias") else BF16
        size = math.prod(slot.layout.shape) * kind.itemsize
        if used + size > shard_bytes and files[-1]:
            files.append({})
            used = 0
        files[-1][slot.name] = (kind, slot.layout.shape)
        used += size
    rng, tensors = np.random.default_rng(0), {}
    for i, entries in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        made = safetensors_file.create(folder / name, entries)
        for tensor in made.values():
            kind = safetensors_file.DTYPES[tensor.dtype]
            values = rng.standard_normal(tensor.shape, np.float32) * np.float32(0.02)
            tensor.write(0, values.astype(kind))
        tensors |= made
    index = {"weight_map": {name: x.path.name for name, x in tensors.items()}}
    (folder / huggingface.INDEX_FILE).write_text(json.dumps(index))
    return tensors


def _require_same(one: pathlib.Path, other: pathlib.Path) -> None:
    before, after = (_checksums(folder) for folder in (one, other))
    assert before == after, "the tensors are not the same"


def _checksums(folder: pathlib.Path) -> dict[str, tuple[str, int]]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors_file.read_header(path).items():
            values = tensor[tuple(slice(None) for _ in tensor.shape)]
            data = np.ascontiguousarray(values).view(np.uint8).data
            found[name] = (tensor.dtype, zlib.crc32(data))
    return found


if __name__ == "__main__":
    main()
