"""Reads generation_config.json: how a model's makers sample from it."""

from glm5_jax import config as config_lib
from glm5_jax.weights import huggingface_config, loading

_SAMPLING = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), float),
    "top_k": int,
}


def sampling_defaults(path: loading.Path) -> tuple[float, float]:
    """Returns temperature and top_p of generation_config.json; 1 and 1 without one.

    Raises:
      InputError: it cannot be read, or holds something else.
    """
    found = sampling_settings(path)
    return found.get("temperature", 1.0), found.get("top_p", 1.0)


def sampling_settings(path: loading.Path) -> dict[str, float]:
    """Returns the settings of generation_config.json that a request may have.

    Raises:
      InputError: it cannot be read, or holds something else.
    """
    file = loading.find(path).folder / "generation_config.json"
    try:
        given = huggingface_config.read_json(file) if file.exists() else {}
        if given.get("do_sample") is False:
            given = {"temperature": 0.0}
        return {
            name: kind(given[name])
            for name, kind in _SAMPLING.items()
            if given.get(name) is not None
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise config_lib.InputError(
            f"{file} cannot be used ({error}); delete it, or give --temperature and "
            f"--top_p."
        ) from error
