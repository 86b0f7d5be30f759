"""Cheaper attention from one dense model: windows, gated delta nets, DSA (Table 5).

python -m glm5_jax.ablate --study=efficient --scale=tiny

Half of the layers of a converted arm keep their attention over all tokens: every second
one, or those that a beam search chooses. All arms train for as many further tokens;
study `windows` has windows without training.
"""

from glm5_jax import config as config_lib
from glm5_jax.ablations import measures, scales, searches
from glm5_jax.ablations.study import Arm, Claim, Study

_START = "pre-training"
_TYPES = {
    "sliding window": "latent_sliding",
    "GDN": "gated_delta",
    "SimpleGDN": "simple_gated_delta",
}


def _arms(base: config_lib.TrainConfig, search: searches.Windows) -> tuple[Arm, ...]:
    """Returns the dense model, its further training, and its conversions."""
    layers = base.model.num_hidden_layers
    later = {
        "num_steps": base.num_steps // 2,
        "optim.warmup_steps": 0,
        "optim.schedule": "linear",
        "optim.learning_rate": base.optim.learning_rate / 4,
        "init_from_changes": ("layer_types",),
    }
    mode = "model.attention"
    warmup = later | {"stage": "dsa_warmup", mode: "dense_with_indexer_loss"}
    sparse = later | {"stage": "dsa_sparse", mode: "sparse"}
    return (
        Arm(name=_START, is_shown=False),
        Arm(name="indexers", after=_START, changes=warmup, is_shown=False),
        Arm(name="all keys", after=_START, changes=later),
        *(
            Arm(
                name=name,
                after=_START,
                changes=later
                | {"model.layer_types": ((kind, "latent") * layers)[:layers]},
            )
            for name, kind in _TYPES.items()
        ),
        Arm(name="searched windows", after=_START, changes=later, search=search),
        Arm(name="DSA", after="indexers", changes=sparse),
    )


def get_study(scale: str) -> Study:
    """Returns each conversion of one dense model of the same seed, trained further."""
    base = scales.with_windows(scales.pretrain(scale))
    length = base.data.sequence_length
    suites = measures.TEXT if scale == "tiny" else measures.TEXT_AND_NEEDLE
    return Study(
        question="Which cheaper attention loses least, at an eighth of the keys?",
        base=base,
        arms=_arms(base, searches.half_windows(base, scale)),
        metrics=(measures.BITS_PER_BYTE, measures.NEEDLE),
        measure=measures.Suites(names=suites, length=length, num_tasks=100),
        claims=tuple(
            Claim(better=better, worse="sliding window", source="GLM-5, Table 5")
            for better in ("searched windows", "SimpleGDN", "GDN", "DSA")
        ),
        paper={
            "all keys": {"RULER 64K": "85.35"},
            "sliding window": {"RULER 64K": "65.94"},
            "searched windows": {"RULER 64K": "83.72"},
            "GDN": {"RULER 64K": "76.76"},
            "SimpleGDN": {"RULER 64K": "81.76"},
        },
        paper_says="of GLM-9B's conversions searched windows keep most of RULER at "
        "64K, then SimpleGDN, then GDN, then alternating windows; DSA alone selects "
        "without loss (GLM-5, 2.1.2 and Table 5).",
    )
