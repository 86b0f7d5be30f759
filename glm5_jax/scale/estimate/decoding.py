"""Estimates the decoding step of an engine that nobody compiled, from shapes.

The weights of a device are exact. What a step reads and sends besides weights and cache
grows with the tokens that meet the same experts; its two constants are fitted to three
compiled steps of GLM-5 (docs/serving_roofline.json), as the tests hold.
"""

import dataclasses
import math

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax.scale import roofline, slice_devices
from glm5_jax.scale.estimate import serving, torus, work
from glm5_jax.scale.estimate import setting as setting_lib
from glm5_jax.scale.hlo import communication

# Hidden states of a layer that a step reads and writes for each token of the devices
# that share experts, and that a device sends for it.
STATES = 50.0
SENT_STATES = 10.0
BESIDES = 1.0 * slice_devices.GIB  # temporaries and program: most seen are 0.9 GiB
BFLOAT16 = 2


def compiled(
    config: config_lib.TrainConfig, topology: str, tensor: int
) -> serving.Compiled:
    """Returns the figures of a step with one sequence on each device with own slots.

    Args:
      config: of a run; its model and length of rows are used.
      topology: of an engine, e.g. "v5p:4x4x4".
      tensor: devices that share slots; the others have slots of their own.

    Raises:
      InputError: there is no such topology, or the mesh does not divide the model.
    """
    s = _setting(config, topology, tensor)
    return serving.Compiled(
        sequences=1.0,
        length=s.keys,
        devices=math.prod(s.sizes.values()),
        caches=s.over("expert"),
        hbm_bytes=_hbm_bytes(s),
        flop_seconds=_flops(s) / s.device.flops,
        link_seconds=_link_seconds(s, topology),
        hbm_rate=s.device.hbm,
        limit=s.device.hbm_limit_gib * slice_devices.GIB,
        besides=BESIDES,
        experts=_experts(s),
        matrices=_matrices(s),
        head=_head(s),
        others=_head(s),  # the embedding; norms are a thousandth of it
    )


def read_seconds(
    config: config_lib.TrainConfig, topology: str, length: float | int
) -> float:
    """Returns the seconds in which an engine reads a token of a prompt.

    They are those of the products of a forward pass on all of its chips. A program that
    was compiled takes six times as long (docs/scaling.md, prefill of 32k).

    Args:
      config: of a run.
      topology: of the engine.
      length: tokens of the prompts, in the mean.
    """
    devices = mesh_lib.num_devices(topology)
    rows = dataclasses.replace(
        config.data, sequence_length=max(math.ceil(length), 1), batch_size=1
    )
    model = dataclasses.replace(config.model, expert_chunks=1)
    plain = config_lib.TrainConfig(
        model=model, data=rows, loss=_no_losses(), mesh=config_lib.MeshConfig(data=1)
    )
    s = setting_lib.Setting(
        plain, dict.fromkeys(mesh_lib.AXES, 1), slice_devices.named(topology)
    )
    return work.forward(s) / s.tokens / (devices * s.device.flops)


def _no_losses() -> config_lib.LossConfig:
    """Returns the losses of a pass that only reads."""
    return config_lib.LossConfig(mtp_weight=0.0, indexer_weight=0.0)


def _setting(
    config: config_lib.TrainConfig, topology: str, tensor: int
) -> setting_lib.Setting:
    """Returns an engine's mesh: experts over all devices that do not share slots."""
    devices = mesh_lib.num_devices(topology)
    if devices % tensor:
        raise config_lib.InputError(
            f"--engine_tensor must divide the {devices} devices of an engine on "
            f"{topology}, got {tensor}."
        )
    mesh = config_lib.MeshConfig(data=1, expert=devices // tensor, tensor=tensor)
    made = config_lib.TrainConfig(
        model=dataclasses.replace(config.model, expert_chunks=1),
        data=dataclasses.replace(config.data, batch_size=mesh.expert),
        loss=_no_losses(),
        mesh=mesh,
    )
    sizes = mesh_lib.axis_sizes(mesh, devices)
    return setting_lib.Setting(made, sizes, slice_devices.named(topology))


def _layers(s: setting_lib.Setting) -> list[tuple[tuple[setting_lib.Weight, ...], int]]:
    """Returns the parameters of each kind of layer and their number, MTP's among them.

    The engine keeps MTP's layer, whether it drafts or not.
    """
    kinds = dict(s.layer_kinds)
    if s.model.has_mtp:
        kinds[s.mtp_kind] = kinds.get(s.mtp_kind, 0) + 1
    return [(s.layer(kind), count) for kind, count in kinds.items()]


def _experts(s: setting_lib.Setting) -> float:
    return float(
        BFLOAT16
        * sum(
            n * sum(s.stored(w) for w in setting_lib.experts(weights))
            for weights, n in _layers(s)
        )
    )


def _matrices(s: setting_lib.Setting) -> float:
    return float(
        BFLOAT16
        * sum(
            n * sum(s.stored(w) for w in setting_lib.dense(weights))
            for weights, n in _layers(s)
        )
    )


def _head(s: setting_lib.Setting) -> float:
    return float(BFLOAT16 * s.stored(s.others["lm_head"]))


def _hbm_bytes(s: setting_lib.Setting) -> float:
    """Returns what a step with one sequence reads and writes."""
    layers = s.model.num_hidden_layers
    of_layers = layers - s.model.first_k_dense_replace
    has_mtp = int(s.model.has_mtp)
    weights = _experts(s) * of_layers / max(of_layers + has_mtp, 1)
    weights += _matrices(s) * layers / (layers + has_mtp)
    return (
        weights
        + _head(s)
        + serving.cached_bytes(s.model, s.keys)
        + layers * STATES * _group_state(s)
    )


def _group_state(s: setting_lib.Setting) -> float:
    """Returns the bytes of a token's hidden state for each device with own slots."""
    return float(BFLOAT16 * s.model.hidden_size * s.over("expert"))


def _flops(s: setting_lib.Setting) -> float:
    """Returns the products of one token; every device scores all of the keys."""
    model, shared = s.model, s.over("tensor")
    matrices = _matrices(s) * s.over("expert") / BFLOAT16
    experts = _experts(s) * s.over("expert") / BFLOAT16
    chosen = model.num_experts_per_tok / max(model.n_routed_experts, 1)
    head = model.hidden_size * model.vocab_size / shared
    attention = serving.attention_flops(model, s.keys, shared)
    return 2.0 * (matrices + experts * chosen + head) + attention


def _link_seconds(s: setting_lib.Setting, topology: str) -> float:
    """Returns the seconds in which a token of each device with own slots is sent."""
    n = s.over("expert")
    if n == 1:
        return 0.0
    wire = s.model.num_hidden_layers * SENT_STATES * _group_state(s) * (n - 1) / n
    sent = communication.Collective(
        "all-gather", ("expert",), "forward", "", "", n, 1, wire
    )
    mesh = torus.mesh(s.config.mesh, topology)
    traffic = communication.Traffic((sent,), ())
    return roofline.roofline(mesh, 0.0, 0.0, traffic).total
