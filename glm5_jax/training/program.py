"""The training step of a run as a program: a jitted step and the shapes that it takes.

`run.start` compiles it for this machine; `glm5_jax.aot` compiles it for chips that this
machine does not have.
"""

import dataclasses
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from glm5_jax import config as config_lib
from glm5_jax import depth, sharding
from glm5_jax.config import stages
from glm5_jax.model import invariance, transformer
from glm5_jax.optim import optimizer as optimizer_lib
from glm5_jax.training import policy
from glm5_jax.training import step as step_lib

BATCH_DIMS = ("B", "T")
# What makes the step of each kind of update: config -> optimizer -> step.
STEPS: dict[stages.Update, Callable] = {
    "losses": step_lib.make_train_step,
    "policy": policy.make_policy_step,
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted step and the arrays it takes, as shapes with their shardings."""

    mesh: Any  # a Mesh; or an AbstractMesh, for shapes only
    optimizer: optimizer_lib.Optimizer
    init: jax.stages.Wrapped  # key -> (params, opt_state)
    step: (
        jax.stages.Wrapped
    )  # (params, opt_state, batch) -> (params, opt_state, metrics)
    params: Any
    opt_state: Any
    batch: dict[str, jax.ShapeDtypeStruct]

    @property
    def arguments(self) -> tuple[Any, Any, Any]:
        """The arguments of the step; the first two are donated."""
        return self.params, self.opt_state, self.batch

    def initial(self, seed: int) -> tuple[dict, Any]:
        """Returns new parameters and optimizer state, sharded for the step."""
        key = jax.random.key(seed)
        with jax.set_mesh(self.mesh):
            return self.init(key)

    def batch_of(self, num_rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a batch of so many rows, with their shardings."""
        return {
            name: x.update(shape=(num_rows, *x.shape[1:]))
            for name, x in self.batch.items()
        }

    def lower(self, num_rows: int | None = None) -> jax.stages.Lowered:
        """Returns the step, lowered for the devices of the mesh.

        Args:
          num_rows: rows of the batch; None: those of `batch`.
        """
        batch = self.batch if num_rows is None else self.batch_of(num_rows)
        with jax.set_mesh(self.mesh):
            return self.step.lower(self.params, self.opt_state, batch)

    def compile(
        self, num_rows: int, beside: Callable[[], None] = lambda: None
    ) -> Callable[[Any, Any, Any], tuple]:
        """Returns the step, compiled for batches of so many rows; it takes others too.

        Episodes that forked make a batch with more rows.

        Args:
          num_rows: rows of a batch.
          beside: called while a thread compiles; XLA uses one core for most of it.
        """
        lowered = self.lower(num_rows)
        with futures.ThreadPoolExecutor(1, "compile") as thread:
            compiling = thread.submit(lowered.compile)
            beside()
            compiled = compiling.result()
        shape = self.batch_of(num_rows)["tokens"].shape

        def step(params: Any, opt_state: Any, batch: Any) -> tuple:
            fits = batch["tokens"].shape == shape
            return (compiled if fits else self.step)(params, opt_state, batch)

        return step


def make_program(config: config_lib.TrainConfig, mesh: Mesh | AbstractMesh) -> Program:
    """Returns the program of a stage; outputs are sharded as the inputs are."""
    optimizer = step_lib.make_optimizer(config)
    param_places = sharding.shardings(transformer.param_dims(config.model), mesh)
    params = placed(transformer.abstract_params(config.model), param_places)
    opt_state = jax.eval_shape(optimizer.init, params)
    opt_places = sharding.shardings(optimizer.state_dims(opt_state, params), mesh)
    opt_places = optimizer.kept(opt_state, opt_places)
    step = jax.jit(
        STEPS[config.stage_record.update](config, optimizer),
        donate_argnums=(0, 1),
        keep_unused=True,  # dropped, forgotten moments would stay beside new ones
        out_shardings=(param_places, opt_places, None),
        compiler_options=invariance.compiler_options(config.model),
    )

    def init(key: jax.Array) -> tuple[dict, Any]:
        params = transformer.init_params(config.model, key)
        return params, optimizer.init(params)

    shapes = batch_shapes(config)
    return Program(
        mesh=mesh,
        optimizer=optimizer,
        init=jax.jit(init, out_shardings=(param_places, opt_places)),
        step=step,
        params=params,
        opt_state=placed(opt_state, opt_places),
        batch=placed(shapes, dict.fromkeys(shapes, batch_place(mesh))),
    )


def places(tree: Any) -> Any:
    """Returns the shardings of a tree of shapes."""
    return jax.tree.map(lambda x: x.sharding, tree)


def batch_place(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of a batch: rows over batch axes, tokens over context."""
    return NamedSharding(mesh, sharding.spec(BATCH_DIMS))


def batch_shapes(config: config_lib.TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape of every array of a stage's batch."""
    shape, stage = (config.num_rows, config.data.sequence_length), config.stage_record
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in stage.integers}
    batch |= {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in stage.floats}
    if config.reference:
        batch[policy.REFERENCE] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if config.teachers:
        batch[policy.TEACHER] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if len(config.teachers) > 1:
        batch[policy.TAUGHT_BY] = jax.ShapeDtypeStruct(shape, jnp.int32)
    if stage.has_critic(config):
        for name in (policy.REWARDS, policy.LAMBDAS):
            batch[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    if config.replays_routing:
        groups = depth.layer_groups(config.model)
        num_expert_layers = sum(group.num_expert_layers for group in groups)
        chosen = config.model.num_experts_per_tok
        replayed = (*shape, num_expert_layers, chosen)
        batch["experts"] = jax.ShapeDtypeStruct(replayed, jnp.int32)
    return batch


def placed(shapes: Any, shardings: Any) -> Any:
    """Returns a tree of shapes with these shardings."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        shardings,
    )
