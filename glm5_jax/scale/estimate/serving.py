"""Estimates what serving takes on chips, from one compiled decoding step.

The compiler counts the bytes of a step that draws a token for each of some sequences.
From these follow, by arithmetic on shapes, the steps of other formats of the weights,
of as many sequences as fit, and of speculation: weights are read once a step, a cache
once a sequence, and everything else grows with the tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from glm5_jax import config as config_lib
from glm5_jax.model.attention import cache_rows
from glm5_jax.quantization import schemes
from glm5_jax.scale import slice_devices
from glm5_jax.training.reporting import accounting

_GROUP = 8  # rows that a kernel fetches to read one (pallas_kernels/decode)
GIB = slice_devices.GIB


@dataclasses.dataclass(frozen=True)
class Format:
    """Bytes of a weight, scales included, and the dtype of the cache."""

    name: str
    experts: float
    matrices: float  # of attention, dense layers and shared experts
    kv_cache_dtype: config_lib.CacheDtype = "auto"  # of the model's config


_BLOCK_SCALE = 4 / schemes.FP8_BLOCK**2  # a float32 for the codes of a block
_GROUP_SCALE = 4 / schemes.GROUP  # of INT4
FORMATS = (
    Format("bfloat16", 2.0, 2.0),
    Format("FP8", 1 + _BLOCK_SCALE, 1 + _BLOCK_SCALE),
    Format("W4A8", 0.5 + _GROUP_SCALE, 1.0),
    Format("W4A8, cache in FP8", 0.5 + _GROUP_SCALE, 1.0, "fp8"),
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A decoding step as compiled, of one device; bytes, seconds, in bfloat16."""

    sequences: float  # of the device
    length: int  # tokens of each in the cache
    devices: int
    caches: int  # devices with different sequences
    hbm_bytes: float
    flop_seconds: float
    link_seconds: float
    hbm_rate: float  # bytes a second
    limit: float  # bytes of memory
    besides: float  # temporaries and program
    experts: float  # bytes of weights, MTP's included
    matrices: float
    head: float
    others: float  # norms, biases and words: stored, and hardly read

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> "Compiled":
        """Reads what `aot --program=decode --out=STEM` writes as STEM.json."""
        sizes = {k: v * GIB for k, v in report["arguments_gib"].items()}
        words = sizes["parameters: embeddings"]
        mesh, seconds = report["mesh"], report["roofline_seconds"]
        caches = report["devices"] // mesh["tensor"]
        return cls(
            sequences=report["tokens"] / caches,
            length=report["sequence_length"],
            devices=report["devices"],
            caches=caches,
            hbm_bytes=report["hbm_traffic_gib"] * GIB,
            flop_seconds=seconds["FLOPs"],
            link_seconds=seconds["ICI"],
            hbm_rate=report["device"]["hbm_tbps"] * 1e12,
            limit=report["hbm_limit_gib"] * GIB,
            besides=(report["hbm_temp_gib"] + report["hbm_code_gib"]) * GIB,
            experts=sizes["parameters: experts"],
            matrices=sizes["parameters: attention"] + sizes["parameters: dense"],
            head=words / 2,
            others=sizes["parameters: norms and biases"] + words / 2,
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """The figures of a compiled program that decodes, by its roofline."""

    seconds: float  # of a step, or of a round with drafts
    num_drafts: int
    sequences: int  # of all devices
    devices: int
    cache_tokens: int  # that a chip has room for; those that share slots have the same

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> "Measured":
        """Reads what `aot --program=decode --out=STEM` writes as STEM.json."""
        sizes, sequences = dict(report["arguments_gib"]), report["tokens"]
        cache = sizes.pop("cache")
        shares = report["devices"] // report["mesh"]["tensor"]
        of_token = cache / (sequences // shares * report["sequence_length"])
        taken = report["hbm_temp_gib"] + report["hbm_code_gib"] + sum(sizes.values())
        return cls(
            seconds=max(report["roofline_seconds"].values()),
            num_drafts=report.get("num_drafts", 0),
            sequences=sequences,
            devices=report["devices"],
            cache_tokens=max(0, int((report["hbm_limit_gib"] - taken) / of_token)),
        )

    def tokens_a_second(self, acceptance: Sequence[float]) -> float:
        """Returns the tokens that a chip draws in a second, at best.

        Args:
          acceptance: probability that a round keeps the first, second, ... draft.
        """
        tokens = 1 + math.fsum(acceptance[: self.num_drafts])
        return self.sequences * tokens / (self.devices * self.seconds)

    def break_even(self, plain: "Measured") -> float:
        """Returns the kept drafts of a round from which on drafts pay.

        Args:
          plain: the step without drafts, with as many sequences.
        """
        return self.seconds / plain.seconds - 1


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of decoding with as many sequences as fit, of one device."""

    sequences: int
    hbm: float  # seconds
    links: float
    flops: float
    tokens: float  # that a step adds to a sequence, in the mean
    cache_tokens: int  # that all devices have room for

    @property
    def seconds(self) -> float:
        """Returns the time of what binds."""
        return max(self.hbm, self.links, self.flops)

    def tokens_a_second(self, compiled: Compiled) -> float:
        """Returns the tokens that a chip draws in a second, at best."""
        share = compiled.caches / compiled.devices
        return self.sequences * self.tokens * share / self.seconds


def step(
    config: config_lib.ModelConfig,
    compiled: Compiled,
    form: Format,
    acceptance: Sequence[float] = (),
    length: int | None = None,
    sequences: int | None = None,
) -> Step:
    """Estimates a step.

    Args:
      config: of the model that was compiled, with MTP.
      compiled: the step in bfloat16.
      form: of the weights and the cache.
      acceptance: probability that a step keeps the first, second, ... drafted token;
        () for no speculation.
      length: tokens of a sequence in the cache; None: as compiled.
      sequences: of a device; None: as many as fit.
    """
    length, num_drafts = length or compiled.length, len(acceptance)
    layers, indexers = config.num_hidden_layers, _num_indexers(config)
    token_bytes = _token_bytes(config, form, layers, indexers)
    if num_drafts:
        token_bytes += _token_bytes(config, form, 1, bool(indexers))  # MTP's layer
    room = compiled.limit - compiled.besides - compiled.others - compiled.head
    mtp, others = _weights(config, compiled, form)
    room -= mtp + others
    cache_tokens = max(0, int(room / token_bytes))
    if sequences is None:
        sequences = cache_tokens // length
    drawn = sequences * (1 + num_drafts)  # tokens that a pass of the model reads
    # A drafting step reads MTP's layer and the head, for one token of each sequence.
    hbm = others + mtp * num_drafts + compiled.head * (1 + num_drafts)
    keys, latents = _keys(config, length, form), _latents(config, length, form)
    hbm += sequences * keys * (indexers + num_drafts * bool(indexers))
    hbm += drawn * latents * layers
    hbm += sequences * latents * num_drafts
    of_model = drawn + sequences * num_drafts / layers
    hbm += of_model * _rest(config, compiled)
    passes = of_model / compiled.sequences
    return Step(
        sequences=sequences,
        hbm=hbm / compiled.hbm_rate,
        links=passes * compiled.link_seconds,
        flops=passes * compiled.flop_seconds * _longer(config, compiled, length),
        tokens=1 + math.fsum(acceptance),
        cache_tokens=cache_tokens * compiled.caches,
    )


def cached_bytes(config: config_lib.ModelConfig, length: int) -> int:
    """Returns the bytes of all layers' caches that a step reads for a sequence."""
    keys = _num_indexers(config) * _keys(config, length, FORMATS[0])
    latents = _latents(config, length, FORMATS[0])
    return keys + config.num_hidden_layers * latents


def attention_flops(
    config: config_lib.ModelConfig, length: int, shared: int = 1
) -> float:
    """Returns the products of a token with the caches of all layers, on a device.

    Args:
      config: of the model.
      length: tokens in the cache.
      shared: devices among which the heads are split; each scores all keys.
    """
    rows = min(length, config.index_topk) if config.has_indexer else length
    row = 2 * config.kv_lora_rank + config.qk_rope_head_dim
    attended = rows * row * config.num_attention_heads / shared
    scored = length * config.index_n_heads * config.index_head_dim
    both = config.num_hidden_layers * attended + _num_indexers(config) * scored
    return 2.0 * both


@functools.lru_cache(maxsize=16)
def _active(config: config_lib.ModelConfig) -> int:
    return accounting.count_parameters(config)["active"]


def _longer(config: config_lib.ModelConfig, compiled: Compiled, length: int) -> float:
    """Returns the products of a step of this length, in those of the compiled one."""
    shared = compiled.devices // compiled.caches
    found, of_compiled = (
        2 * _active(config) / shared + attention_flops(config, n, shared)
        for n in (length, compiled.length)
    )
    return found / of_compiled


def _rest(config: config_lib.ModelConfig, compiled: Compiled) -> float:
    """Returns the bytes for each token of what is neither weights nor cache."""
    known = _weights(config, compiled, FORMATS[0])[1] + compiled.head
    known += compiled.sequences * cached_bytes(config, compiled.length)
    return max(0.0, compiled.hbm_bytes - known) / compiled.sequences


def _weights(
    config: config_lib.ModelConfig, compiled: Compiled, form: Format
) -> tuple[float, float]:
    """Returns the bytes of MTP's matrices, and of all layers'."""
    layers = config.num_hidden_layers
    experts = compiled.experts * form.experts / 2
    matrices = compiled.matrices * form.matrices / 2
    mtp = experts / (layers - config.first_k_dense_replace + 1)
    mtp += matrices / (layers + 1)
    return mtp, experts + matrices - mtp


def _num_indexers(config: config_lib.ModelConfig) -> int:
    """Returns the layers that cache keys of an indexer, without MTP's."""
    return sum(config.is_full_index_layer) if config.has_indexer else 0


def _keys(config: config_lib.ModelConfig, length: int, form: Format) -> int:
    """Returns the bytes of an indexer's keys of a sequence."""
    return length * _index_bytes(_cached(config, form))


def _latents(config: config_lib.ModelConfig, length: int, form: Format) -> int:
    """Returns the bytes that a query of a layer reads: selected rows, or all."""
    selects = config.has_indexer and length > config.index_topk
    rows = config.index_topk * _GROUP if selects else length
    return rows * _latent_bytes(_cached(config, form))


def _token_bytes(
    config: config_lib.ModelConfig, form: Format, layers: int, indexers: int
) -> int:
    """Returns what a token takes in the caches of so many layers and indexers."""
    cached = _cached(config, form)
    return layers * _latent_bytes(cached) + indexers * _index_bytes(cached)


def _cached(config: config_lib.ModelConfig, form: Format) -> config_lib.ModelConfig:
    """Returns the model with the format's cache, or its own if that is rounded."""
    if config.kv_cache_dtype != "auto":
        return config
    return dataclasses.replace(config, kv_cache_dtype=form.kv_cache_dtype)


def _latent_bytes(config: config_lib.ModelConfig) -> int:
    """Returns the bytes of a token's latent in a layer's cache on a TPU."""
    return _size(cache_rows.of_latents(config).entry(1, "tpu"))


def _index_bytes(config: config_lib.ModelConfig) -> int:
    """Returns the bytes of a token's key of a layer's indexer in the cache."""
    return sum(map(_size, cache_rows.index_entries(config, 1).values()))


def _size(rows: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of rows."""
    return math.prod(rows.shape) * rows.dtype.itemsize
