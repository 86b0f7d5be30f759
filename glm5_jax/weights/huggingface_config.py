"""config.json of a Hugging Face folder, to and from ModelConfig."""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging

from glm5_jax import config as config_lib
from glm5_jax.config import fields
from glm5_jax.weights import coded_folder, huggingface_names

MODEL_TYPE = "glm_moe_dsa"
# Fields of ModelConfig that say how to compute or train. Other programs do not know
# them, so they are neither written nor read.
OURS = {
    *("attention", "dtype", "param_dtype", "remat_policy", "batch_invariant"),
    *("expert_transport", "expert_chunks", "mtp_num_steps", "kv_cache_dtype"),
    "index_dtype",
}
# Fields that config.json spells differently, or has only for unusual values.
_SPELT = {"rope_theta", "rope_scaling", "latent_norm_eps"}
# Fields of other models than GLM-5, which have no config.json: `require_writable`.
_VARIANTS = {"layer_types", "variants"}
SAME = {f.name for f in dataclasses.fields(config_lib.ModelConfig)}
SAME -= OURS | _SPELT | _VARIANTS
# transformers builds the latent norms with eps 1e-6, whatever the config says. This
# key holds the eps of a model that was trained with another one.
LATENT_NORM_EPS = "latent_norm_eps"
# transformers' defaults of absent keys, where ModelConfig has others.
DEFAULTS: dict[str, Any] = {
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
    "pad_token_id": None,
}
DEFAULT_THETA = 1e4
_DEFAULTS = {
    f.name: f.default
    for f in dataclasses.fields(config_lib.ModelConfig)
    if f.name in SAME
}
# Keys of config.json that allow one value only.
FIXED = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "indexer_rope_interleave": True,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "n_group": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
# Keys of other models' mathematics: refused unless null, false, zero or empty.
FOREIGN = (
    *("attention_chunk_size", "attn_logit_softcapping", "final_logit_softcapping"),
    *("hc_mult", "index_kpool", "linear_attn_config", "logits_scaling"),
    *("per_layer_config", "sliding_window", "swiglu_limit", "use_qk_norm"),
)
LAYER_TYPES = {"indexed_attention", "deepseek_sparse_attention", "full_attention"}
# Other spellings of keys that `write_config` writes.
SUPERSEDED = {
    *("rope_scaling", "rope_theta", "partial_rotary_factor"),
    *("original_max_position_embeddings", "num_experts", "num_local_experts"),
    *("torch_dtype", LATENT_NORM_EPS),
}
# Keys that change no logits; other unknown keys cause a warning.
HARMLESS = {
    *("architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype"),
    *("ep_size", "head_dim", "id2label", "indexer_types", "is_encoder_decoder"),
    *("label2id", "layer_types", "mlp_layer_types", "model_type", "moe_router_dtype"),
    *("mtp_num_steps", "name_or_path", "num_key_value_heads", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "pretraining_tp"),
    *("problem_type", "qk_head_dim", "quantization_config", "return_dict"),
    *("rope_parameters", "router_aux_loss_coef", "transformers_version", "use_cache"),
}
KNOWN = SAME | OURS | set(FIXED) | set(FOREIGN) | SUPERSEDED | HARMLESS
_CONTEXT = "original_max_position_embeddings"
# Keys of rope_parameters that ModelConfig keeps in rope_scaling.
_YARN = {f.name for f in dataclasses.fields(config_lib.RopeScaling)} - {"rope_type"}


def read_json(path: pathlib.Path) -> Any:
    """Reads an untrusted JSON file.

    Raises:
      ValueError: it is no JSON, or nested deeper than Python can follow.
      OSError: it cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_config(folder: str | os.PathLike) -> config_lib.ModelConfig:
    """Reads a folder's config.json as transformers reads it.

    Raises:
      InputError: it describes no GLM-5, or a variant that this code does not compute.
    """
    path = pathlib.Path(folder) / "config.json"
    try:
        given = read_json(path)
    except (OSError, ValueError) as error:
        raise config_lib.InputError(
            f"Cannot read {path}: {error}. Give a folder with a config.json and "
            f"*.safetensors files."
        ) from error
    kind = given.get("model_type") if isinstance(given, dict) else None
    if kind != MODEL_TYPE:
        raise config_lib.InputError(
            f"{path}: model_type must be {MODEL_TYPE!r} (GLM-5, 5.1, 5.2, 5.3), got "
            f"{kind!r}."
        )
    if given.get("eos_token_id", "absent") is None:
        given["eos_token_id"] = []  # null means none; an absent key means the default
    given = {name: value for name, value in given.items() if value is not None}
    try:
        _check_variant(given)
        config = _config(given)
    except config_lib.InputError as error:
        lines = str(error).splitlines()
        raise config_lib.InputError(
            "\n".join(f"{path}: {line}" for line in lines)
        ) from error
    _warn(path, tuple(sorted(set(given) - KNOWN)))
    return config


def _rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling by transformers' rules.

    A rope_scaling that is not empty replaces rope_parameters as a whole. A rope_theta
    beside them counts if they contain none.
    """
    name = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    rope = given.get(name, {})
    if not isinstance(rope, dict):
        raise config_lib.InputError(f"{name} must be an object, got {rope!r:.100}.")
    theta = rope.get("rope_theta", given.get("rope_theta", DEFAULT_THETA))
    kind = rope.get("rope_type", rope.get("type", "default"))
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested or kind not in ("default", "yarn"):
        got = f"parameters for {nested}" if nested else f"rope_type {kind!r}"
        raise config_lib.InputError(
            f"{name} has {got}; only the types 'default' and 'yarn' are supported, for "
            f"all layers."
        )
    if kind == "default":
        return {"rope_theta": theta}
    outer = given.get("partial_rotary_factor", 1.0)
    if rope.get("partial_rotary_factor", outer) != 1.0:
        raise config_lib.InputError(f"{name}: partial_rotary_factor must be 1.0.")
    if "factor" not in rope:
        raise config_lib.InputError(f"{name} of rope_type 'yarn' needs a factor.")
    # The outer original_max_position_embeddings takes precedence.
    whole = given.get("max_position_embeddings")
    context = given.get(_CONTEXT, rope.get(_CONTEXT, whole))
    scaling = {k: v for k, v in rope.items() if k in _YARN and v is not None}
    scaling |= {"rope_type": "yarn", _CONTEXT: context}
    are_counts = isinstance(whole, int) and isinstance(context, int) and context > 0
    if rope["factor"] is None and are_counts:
        scaling["factor"] = max(whole / context, 1.0)
    for beta, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        scaling[beta] = rope.get(beta) or default
    return {"rope_theta": theta, "rope_scaling": scaling}


def _check_ids(given: Mapping[str, Any], vocab_size: Any) -> None:
    """Checks that the ids which a config.json names are in the vocabulary."""
    if not isinstance(vocab_size, int):
        return  # ModelConfig refuses it
    for name in ("eos_token_id", "pad_token_id"):
        ids = given.get(name, [])
        ids = ids if isinstance(ids, list) else [ids]
        wrong = [i for i in ids if isinstance(i, int) and not 0 <= i < vocab_size]
        if wrong:
            raise config_lib.InputError(
                f"{name} must lie in 0..{vocab_size - 1} (vocab_size is {vocab_size}), "
                f"got {', '.join(map(str, wrong))}; correct {name} or vocab_size."
            )


def _config(given: Mapping[str, Any]) -> config_lib.ModelConfig:
    """Builds the model's config from the keys of a config.json."""
    values: dict[str, Any] = _DEFAULTS | DEFAULTS
    values |= {k: v for k, v in given.items() if k in SAME}
    for name in ("num_experts", "num_local_experts"):  # the latter wins
        if name in given:
            values["n_routed_experts"] = given[name]
    if LATENT_NORM_EPS in given:
        values[LATENT_NORM_EPS] = given[LATENT_NORM_EPS]
    eos = values["eos_token_id"]
    values["eos_token_id"] = eos if isinstance(eos, list) else [eos]
    _check_ids(given, values["vocab_size"])
    if values.get("index_topk_freq") == 0:
        values["index_topk_freq"] = 1
    if pattern := _index_pattern_of(given, values["num_hidden_layers"]):
        values["index_topk_pattern"] = pattern
    num_layers = values["num_hidden_layers"]
    num_dense = values["first_k_dense_replace"]
    if isinstance(num_dense, int) and isinstance(num_layers, int):
        values["first_k_dense_replace"] = min(num_dense, num_layers)
        if (mlp_types := given.get("mlp_layer_types")) is not None:
            values["first_k_dense_replace"] = _num_dense(mlp_types, num_layers)
    values |= _rope(given)
    config = fields.build(config_lib.ModelConfig, dict(fields.flatten(values)))
    return _without_needless_pattern(config)


def _index_pattern_of(given: Mapping[str, Any], num_layers: Any) -> Any:
    """Returns the layers' indexer kinds as letters, from either key that lists them."""
    types = given.get("indexer_types") or given.get("index_topk_pattern")
    if isinstance(types, list):
        letters = {"full": "F", "shared": "S"}
        types = "".join(letters.get(str(kind), "?") for kind in types)
    is_cut = isinstance(types, str) and type(num_layers) is int
    return types[:num_layers] if is_cut else types


def _without_needless_pattern(
    config: config_lib.ModelConfig,
) -> config_lib.ModelConfig:
    """Drops index_topk_pattern where index_topk_freq describes the same layers."""
    try:
        regular = dataclasses.replace(config, index_topk_pattern=None)
    except config_lib.InputError:
        return config
    same = regular.is_full_index_layer == config.is_full_index_layer
    return regular if same else config


def _num_dense(types: Any, num_layers: Any) -> int:
    """Counts the leading dense layers of mlp_layer_types."""
    types = types[:num_layers] if isinstance(types, list) else []
    dense = types.count("dense")
    is_in_order = types == ["dense"] * dense + ["sparse"] * (len(types) - dense)
    if len(types) != num_layers or not is_in_order:
        raise config_lib.InputError(
            f"mlp_layer_types must list {num_layers} layers, all 'dense' ones before "
            f"the 'sparse' ones, got {types!r:.500}."
        )
    return dense


def _check_variant(given: Mapping[str, Any]) -> None:
    """Refuses configs of variants that the model does not compute."""
    num_modules = given.get("num_nextn_predict_layers")
    if type(num_modules) is int:
        huggingface_names.require_one_mtp_module(num_modules)
    fixed = FIXED | {"num_key_value_heads": given.get("num_attention_heads")}
    if given.get("n_group") == given.get("topk_group"):
        fixed = {k: v for k, v in fixed.items() if k not in ("n_group", "topk_group")}
    problems = [
        f"{name} is {given[name]!r:.100}, only {value!r} is supported"
        for name, value in fixed.items()
        if name in given and given[name] != value
    ]
    problems += [
        f"{name} is {given[name]!r:.100}, which glm5_jax does not compute"
        for name in FOREIGN
        if given.get(name)
    ]
    kinds = given.get("layer_types", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    others = [kind for kind in kinds if str(kind) not in LAYER_TYPES]
    if others:
        problems.append(
            f"layer_types has {others[0]!r:.100}, only "
            f"{', '.join(sorted(LAYER_TYPES))} are supported"
        )
    try:
        coded_folder.coding(given.get("quantization_config"))
    except config_lib.InputError as error:
        problems.append(str(error).rstrip("."))
    if problems:
        raise config_lib.InputError("; ".join(problems) + ".")


@functools.cache  # once a folder
def _warn(path: pathlib.Path, unknown: tuple[str, ...]) -> None:
    if unknown:
        logging.warning(
            "%s has keys that glm5_jax does not know: %s. If one of them changes what "
            "a model computes, the results of this model are wrong.",
            path,
            ", ".join(unknown),
        )


def require_writable(config: config_lib.ModelConfig) -> None:
    """Checks that a Hugging Face folder can hold the model.

    Raises:
      InputError: some layers are not GLM-5's, or MTP has several modules.
    """
    huggingface_names.require_one_mtp_module(config.num_nextn_predict_layers)
    others = sorted({*config.layer_types} - {"latent"})
    if others:
        raise config_lib.InputError(
            f"A model with layer_types {', '.join(others)} has no Hugging Face form: "
            f"{MODEL_TYPE} has MLA in every layer, and transformers would compute "
            f"something else or find no weights. Keep it as a run folder."
        )


def write_config(
    config: config_lib.ModelConfig,
    folder: str | os.PathLike,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes a config.json that transformers and `read_config` understand.

    Args:
      config: of the model.
      folder: to write it into.
      extra: more keys; the model's config takes precedence.

    Raises:
      InputError: the folder already has a config.json, or `require_writable`.
    """
    require_writable(config)
    values = {name: getattr(config, name) for name in sorted(SAME)}
    n, dense = config.num_hidden_layers, config.first_k_dense_replace
    kinds = {True: "full", False: "shared"}
    values |= {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": config.param_dtype,
        "eos_token_id": list(config.eos_token_id) or None,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.qk_rope_head_dim,
        "rope_parameters": _rope_parameters(config),
        "indexer_types": [kinds[is_full] for is_full in config.is_full_index_layer],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (n - dense),
        **FIXED,
    }
    eps = config.latent_norm_eps
    if eps != config_lib.ModelConfig.latent_norm_eps:
        values[LATENT_NORM_EPS] = eps
        logging.warning(
            "latent_norm_eps=%g is written, but transformers computes with 1e-6: its "
            "logits will differ by about 1e-4.",
            eps,
        )
    _warn_of_lost(config)
    dropped = SUPERSEDED | OURS
    kept = {k: v for k, v in (extra or {}).items() if k not in dropped}
    values = kept | values
    path = pathlib.Path(folder) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise config_lib.InputError(f"{path} exists; choose another folder.")
    path.write_text(json.dumps(values, indent=2) + "\n")


def _warn_of_lost(config: config_lib.ModelConfig) -> None:
    """Warns of fields that change logits and that config.json has no key for."""
    if config.index_dtype != "auto":
        logging.warning(
            "config.json cannot say index_dtype=%s: give --config.model.index_dtype "
            "where this program reads the folder.",
            config.index_dtype,
        )
    if config.attention != "sparse":
        logging.warning(
            "config.json cannot say attention=%s: give --config.model.attention=dense "
            "where this program reads the folder. Otherwise it selects keys, as "
            "transformers always does, with the indexers as they are, trained or not.",
            config.attention,
        )


def _rope_parameters(config: config_lib.ModelConfig) -> dict[str, Any]:
    """Returns the rope_parameters that give transformers the same frequencies."""
    scaling = config.rope_scaling
    values = {"rope_type": scaling.rope_type, "rope_theta": config.rope_theta}
    if not scaling.is_yarn:
        return values
    given = dataclasses.asdict(scaling)
    context = scaling.original_max_position_embeddings
    given[_CONTEXT] = context or config.max_position_embeddings
    return given | values
