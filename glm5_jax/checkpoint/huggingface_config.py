"""config.json of a Hugging Face folder, to and from ModelConfig."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import quantized

MODEL_TYPE = "glm_moe_dsa"
# Fields of ModelConfig that say how to compute, not what: no business of a checkpoint.
COMPUTATION = {"attention", "dtype", "param_dtype", "remat_policy"}
ARCHITECTURE = {
    f.name for f in dataclasses.fields(config_lib.ModelConfig)
} - COMPUTATION
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
# Older spellings of what `write_config` says in newer ones.
SUPERSEDED = ("rope_scaling", "rope_theta", "torch_dtype")


def read_config(folder: str | os.PathLike) -> config_lib.ModelConfig:
    """Reads a folder's config.json.

    Where it has no latent_norm_eps, that is transformers' 1e-6.

    Raises:
      InputError: no GLM-5, or a variant that this code does not compute.
    """
    path = pathlib.Path(folder) / "config.json"
    try:
        given = json.loads(path.read_text())
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
    given = {name: value for name, value in given.items() if value is not None}
    rope = given.get("rope_scaling", {}) | given.get("rope_parameters", {})
    values: dict[str, Any] = {"latent_norm_eps": 1e-6, "num_nextn_predict_layers": 0}
    values |= {name: given[name] for name in ARCHITECTURE if name in given}
    if "rope_theta" in rope:
        values["rope_theta"] = rope["rope_theta"]
    _check_variant(path, given, rope)
    if "eos_token_id" in given:
        eos = given["eos_token_id"]
        values["eos_token_id"] = tuple(eos) if isinstance(eos, list) else (eos,)
    if isinstance(given.get("index_topk_pattern"), list):
        del values["index_topk_pattern"]  # transformers' older indexer_types
        given.setdefault("indexer_types", given["index_topk_pattern"])
    try:
        return _with_layer_types(config_lib.ModelConfig(**values), path, given)
    except TypeError as error:
        raise config_lib.InputError(
            f"{path}: a value has a wrong type: {error}."
        ) from (error)


def _check_variant(path: pathlib.Path, given: dict, rope: dict) -> None:
    """Refuses what the model does not compute."""
    fixed = FIXED | {"num_key_value_heads": given.get("num_attention_heads")}
    problems = [
        f"{name} is {given[name]!r}, only {value!r} is supported"
        for name, value in fixed.items()
        if name in given and given[name] != value
    ]
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        problems.append(f"rope_type is {kind!r}, only 'default' is supported")
    try:
        quantized.block_size(given.get("quantization_config"))
    except config_lib.InputError as error:
        problems.append(str(error).rstrip("."))
    if problems:
        raise config_lib.InputError(f"{path}: " + "; ".join(problems) + ".")


def _with_layer_types(
    config: config_lib.ModelConfig, path: pathlib.Path, given: dict
) -> config_lib.ModelConfig:
    """Lets the explicit lists win over the rules that they usually repeat."""
    n = config.num_hidden_layers
    if mlp_types := given.get("mlp_layer_types"):
        dense = mlp_types[:n].count("dense")
        if mlp_types[:n] != ["dense"] * dense + ["sparse"] * (n - dense):
            raise config_lib.InputError(
                f"{path}: mlp_layer_types must be some 'dense' and then 'sparse', one "
                f"for each of {n} layers, got {mlp_types}."
            )
        config = dataclasses.replace(config, first_k_dense_replace=dense)
    if index_types := given.get("indexer_types"):
        pattern = "".join({"full": "F", "shared": "S"}.get(t, "?") for t in index_types)
        if pattern[:n] != _index_pattern(config):
            config = dataclasses.replace(config, index_topk_pattern=pattern[:n])
    return config


def _index_pattern(config: config_lib.ModelConfig) -> str:
    return "".join("FS"[not is_full] for is_full in config.is_full_index_layer)


def write_config(
    config: config_lib.ModelConfig,
    folder: str | os.PathLike,
    extra: dict[str, Any] | None = None,
) -> None:
    """Writes a config.json that transformers and `read_config` understand.

    Args:
      config: of the model.
      folder: to write it into.
      extra: more keys; those that the model's config decides are left out.

    Raises:
      InputError: there is one already.
    """
    values = {name: getattr(config, name) for name in sorted(ARCHITECTURE)}
    theta = values.pop("rope_theta")
    n, dense = config.num_hidden_layers, config.first_k_dense_replace
    types = {"F": "full", "S": "shared"}
    values |= {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": MODEL_TYPE,
        "dtype": config.param_dtype,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.qk_rope_head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "indexer_types": [types[letter] for letter in _index_pattern(config)],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (n - dense),
        **FIXED,
    }
    kept = {k: v for k, v in (extra or {}).items() if k not in SUPERSEDED}
    values = kept | values
    path = pathlib.Path(folder) / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise config_lib.InputError(f"{path} exists; choose another folder.")
    path.write_text(json.dumps(values, indent=2) + "\n")
