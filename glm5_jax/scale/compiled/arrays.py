"""Lists every array of a program: its place on the mesh and its bytes of a device.

Nothing is compiled and no compiler is needed: shapes and dims follow from the table of
parameters, placement from the rule table. What a step makes for itself is listed as far
as it is known by name: gradients, and what the scans over layers keep for the backward
pass.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from glm5_jax import config as config_lib
from glm5_jax import depth as depth_lib
from glm5_jax import sharding
from glm5_jax.model import attention, transformer
from glm5_jax.scale import inputs, markdown, programs, slice_devices
from glm5_jax.training import accumulation
from glm5_jax.training import critic as critic_lib
from glm5_jax.training import program as program_lib

Dims = tuple[str, ...]
HEAD = ("array", "kind", "dims", "shape", "dtype", "spec", "MiB of a device", "copies")
MADE_BY_THE_STEP = ("gradients", "activations")  # kinds that no argument has
# What stays between the steps: weights of rl.reference, a critic with its moments.
BESIDE = "reference"
CRITIC = critic_lib.NAME
MIB = 2**20

# Dims of what serving keeps, as the letters of shapes.py.
_CACHE_DIMS = {
    "kv": ("L", "B", "S", "C+R"),
    "k_index": ("L", "B", "S", "J"),
    "k_index_exponents": ("L", "B", "S"),
}


@dataclasses.dataclass(frozen=True)
class Array(inputs.Array):
    """An array and the logical dims (glm5_jax/shapes.py) that its spec follows from."""

    dims: Dims


@dataclasses.dataclass(frozen=True)
class Listing:
    """The arrays of a program on a mesh."""

    title: str
    setting: dict[str, Any]  # what the arrays follow from
    arrays: list[Array]
    notes: tuple[str, ...]

    @property
    def sums(self) -> list[tuple[str, str]]:
        """GiB of a device by kind, then of the arguments and of all."""
        kinds = inputs.by_kind(list(self.arrays))
        others = (*MADE_BY_THE_STEP, BESIDE, CRITIC)
        given = sum(n for k, n in kinds.items() if not k.startswith(others))
        kinds |= {"all arguments": given, "all of these": sum(kinds.values())}
        return [
            (kind, f"{size / slice_devices.GIB:.4g}") for kind, size in kinds.items()
        ]

    def text(self) -> str:
        """Writes it for a terminal."""
        parts = [self.title, markdown.aligned([HEAD, *map(_cells, self.arrays)])]
        parts += [
            markdown.aligned([("kind", "GiB of a device"), *self.sums]),
            *self.notes,
        ]
        return "\n\n".join(parts)

    def write(self, stem: str) -> None:
        """Writes STEM.json and STEM.md."""
        content = {
            "title": self.title,
            **self.setting,
            "arrays": [dataclasses.asdict(array) for array in self.arrays],
            "gib_by_kind": dict(self.sums),
            "notes": self.notes,
        }
        parts = [
            f"# {self.title}",
            *(f"```\n{c}\n```" for c in [self.setting["command"]] if c),
            markdown.table(("kind", "GiB of a device"), self.sums),
            *self.notes,
            markdown.table(HEAD, map(_cells, self.arrays)),
        ]
        markdown.write(stem, content, "\n\n".join(parts) + "\n")


def make(
    config: config_lib.TrainConfig,
    config_name: str,
    topology: str,
    *,
    program: str = "train",
    serving: programs.Serving = programs.AS_STORED,
    num_slices: int | None = None,
    depth: int | None = None,
    command: str = "",
) -> Listing:
    """Lists the arrays of a program of a config on a topology.

    Args: as those of `report.make`.

    Raises:
      InputError: topology, mesh, program or depth cannot be.
    """
    config = programs.changed(config, num_slices, depth)
    mesh = slice_devices.abstract_mesh(config.mesh, topology)
    programs.require_whole_rows(config, mesh.shape)
    sizes = " x ".join(f"{a} {n}" for a, n in mesh.shape.items() if n > 1)
    slices = f" x {config.mesh.slices} slices" if config.mesh.slices > 1 else ""
    return Listing(
        title=f"{config_name}: {program} on {topology}{slices}, {mesh.size} devices, "
        f"mesh {sizes or 'of one device'}",
        setting={
            "command": command,
            "mesh": dict(mesh.shape),
            "expert_chunks": config.model.expert_chunks,
            "accumulation_steps": config.optim.accumulation_steps,
        },
        arrays=of_program(config, mesh, program, serving),
        notes=tuple(_notes(config, program)),
    )


def of_program(
    config: config_lib.TrainConfig,
    mesh: AbstractMesh,
    program: str = "train",
    serving: programs.Serving = programs.AS_STORED,
) -> list[Array]:
    """Arguments of a program, and for a training step what it is known to keep."""
    job = programs.make(config, mesh, program, serving)
    arguments = inputs.arguments(job.arguments, job.names)
    table = dict(_parameters(config.model))
    arrays = [_with_dims(array, table) for array in arguments]
    if program == "train":
        arrays += [*_gradients(config, arrays), *_reference(config, arrays)]
        critic = critic_lib.make(config, program_lib.make_program(config, mesh)).state
        kept = inputs.arguments(tuple(critic.values()), tuple(critic))
        arrays += [_with_dims(array, table) for array in kept]
        arrays += _placed(_activations(config, mesh), mesh)
    return arrays


def _parameters(config: config_lib.ModelConfig) -> Iterator[tuple[str, Dims]]:
    """Path and dims of every parameter."""
    flat = jax.tree_util.tree_flatten_with_path(
        transformer.param_dims(config), is_leaf=lambda x: isinstance(x, tuple)
    )[0]
    return ((".".join(key.key for key in path), dims) for path, dims in flat)


def _with_dims(array: inputs.Array, table: dict[str, Dims]) -> Array:
    """Moments have the dims of their parameter, whose path ends their own."""
    first, *words = array.name.split(".")
    if first == "batch":
        dims = program_lib.BATCH_DIMS if len(words) == 1 else ("B",)
    elif first == "cache":
        dims = _CACHE_DIMS.get(words[-1], ("B",))
    else:
        ends = (".".join(words[i:]) for i in range(len(words)))
        dims = next((table[end] for end in ends if end in table), ())
    return Array(**dataclasses.asdict(array), dims=dims[: len(array.shape)])


def _gradients(config: config_lib.TrainConfig, arrays: list[Array]) -> Iterator[Array]:
    """Placed like the parameters."""
    is_trained = config.stage_record.trains
    flat = jax.tree_util.tree_flatten_with_path(
        accumulation.abstract_gradients(config)
    )[0]
    dtypes = {".".join(key.key for key in path): x.dtype for path, x in flat}
    for array in arrays:
        first, *path = array.name.split(".")
        if first == "params" and is_trained(tuple(path)):
            name = ".".join(path)
            size = array.device_bytes // jnp.dtype(array.dtype).itemsize
            yield dataclasses.replace(
                array,
                name=f"gradients.{name}",
                kind=array.kind.replace("parameters", "gradients"),
                dtype=str(dtypes[name]),
                device_bytes=size * dtypes[name].itemsize,
            )


def _reference(config: config_lib.TrainConfig, arrays: list[Array]) -> Iterator[Array]:
    """The weights of rl.reference or teachers as a step computes with them."""
    number = config.num_other_policies
    if not number:
        return
    computed = jax.eval_shape(
        lambda params: transformer.cast(params, config.model),
        transformer.abstract_params(config.model),
    )
    flat = jax.tree_util.tree_flatten_with_path(computed)[0]
    dtypes = {".".join(key.key for key in path): x.dtype for path, x in flat}
    for array in arrays:
        first, _, name = array.name.partition(".")
        if first == "params":
            size = array.device_bytes // jnp.dtype(array.dtype).itemsize
            yield dataclasses.replace(
                array,
                name=f"{BESIDE}.{name}",
                kind=array.kind.replace("parameters", BESIDE),
                dtype=str(dtypes[name]),
                device_bytes=number * size * dtypes[name].itemsize,
            )


def _activations(
    config: config_lib.TrainConfig, mesh: AbstractMesh
) -> Iterator[tuple[str, Dims, jax.ShapeDtypeStruct]]:
    """Yields what each step of a scan over layers was given, of a part of the batch."""
    model, length = config.model, config.data.sequence_length
    num_parts = config.optim.accumulation_steps * config.updates_per_step
    batch = config.num_rows // num_parts
    state = (batch, length, model.hidden_size)
    has_kl = config.has_indexer_loss
    with jax.sharding.use_abstract_mesh(mesh):  # a selection's form depends on chips
        shared = jax.eval_shape(
            lambda: attention.first_shared(model, batch, length, has_kl)
        )
    for g, group in enumerate(depth_lib.layer_groups(model)):
        name, repeats = f"layers_{g}", group.repeats
        yield f"{name}.x", ("L", "B", "T", "D"), _shape((repeats, *state), model.dtype)
        for path, x in jax.tree_util.tree_flatten_with_path(shared)[0]:
            part = jax.tree_util.keystr(path, simple=True, separator=".")
            dims = ("L", *_SHARED_DIMS[part.rpartition(".")[2]])
            yield f"{name}.{part}", dims, _shape((repeats, *x.shape), x.dtype)
    yield "hidden", ("B", "T", "D"), _shape(state, model.dtype)
    if num_steps := config.num_mtp_steps:
        for name in ("x", "hidden"):  # of each of its steps: before and after
            shape = _shape((num_steps, *state), model.dtype)
            yield f"mtp.{name}", ("k", "B", "T", "D"), shape


# Dims of an index that layers share, by the names of its fields.
_SHARED_DIMS = {
    "q": ("B", "T", "I", "J"),
    "k": ("B", "S", "J"),
    "w": ("B", "T", "I"),
    "keep": ("B", "S", "T"),
    "words": ("B", "T", "W"),
    "indices": ("B", "T", "K"),
}


def _shape(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _placed(
    entries: Iterator[tuple[str, Dims, jax.ShapeDtypeStruct]], mesh: AbstractMesh
) -> Iterator[Array]:
    """Arrays of the step by the rule table."""
    for name, dims, x in entries:
        place = NamedSharding(mesh, sharding.spec(dims))
        local = math.prod(place.shard_shape(x.shape))
        yield Array(
            name=f"activations.{name}",
            kind="activations",
            shape=x.shape,
            dtype=str(x.dtype),
            spec=str(tuple(place.spec)),
            device_bytes=local * x.dtype.itemsize,
            num_copies=mesh.size * local // math.prod(x.shape),
            dims=dims,
        )


def _notes(config: config_lib.TrainConfig, program: str) -> Iterator[str]:
    """Yields what the list leaves out."""
    yield "By name and shape alone: nothing was compiled."
    if program == "train":
        kept = {
            "full": "the scans keep what is listed, and compute the rest again",
            "offload": "the scans keep the layers' inputs in the host's memory, and "
            "compute the rest again",
            "kernels": "the scans keep results of kernels and the states after "
            "attention too, which are not listed",
            "experts": "the scans keep results of kernels, the states after attention "
            "and the experts' first products too, which are not listed",
            "dots": "the scans keep results of products too, which are not listed",
            "none": "the scans keep all of a layer, of which only inputs are listed",
        }
        policy = config.model.remat_policy
        yield (
            f"With model.remat_policy={policy} {kept[policy]}. What else lives, "
            "and how long, is the compiler's answer: that of the command without "
            "--arrays."
        )


def _cells(a: Array) -> tuple[str, ...]:
    size = f"{a.device_bytes / MIB:.4g}"
    dims, shape = " ".join(a.dims), str(list(a.shape))
    return a.name, a.kind, dims, shape, a.dtype, a.spec, size, str(a.num_copies)
