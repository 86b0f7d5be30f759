"""Cheaper attention from one dense model: windows, gated delta nets, DSA (Table 5).

python -m glm5_jax.ablate --study=efficient --scale=tiny

Every second layer of a converted arm keeps its attention over all tokens, as in the
paper; all arms train for as many further tokens. The paper's searched pattern is
missing: no command searches patterns of windows yet.
"""

import dataclasses

from glm5_jax import config as config_lib
from glm5_jax.ablations import measures, scales
from glm5_jax.ablations.study import Arm, Claim, Metric, Study

_TYPES = {
    "sliding window": "latent_sliding",
    "GDN": "gated_delta",
    "SimpleGDN": "simple_gated_delta",
}


def _arms(base: config_lib.TrainConfig) -> tuple[Arm, ...]:
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
        Arm(name="pre-training", is_shown=False),
        Arm(name="indexers", after="pre-training", changes=warmup, is_shown=False),
        Arm(name="all keys", after="pre-training", changes=later),
        *(
            Arm(
                name=name,
                after="pre-training",
                changes=later
                | {"model.layer_types": ((kind, "latent") * layers)[:layers]},
            )
            for name, kind in _TYPES.items()
        ),
        Arm(name="DSA", after="indexers", changes=sparse),
    )


def get_study(scale: str) -> Study:
    """Returns each conversion of one dense model of the same seed, trained further."""
    base = scales.pretrain(scale)
    length, layers = base.data.sequence_length, max(base.model.num_hidden_layers, 4)
    model = dataclasses.replace(
        base.model,
        num_hidden_layers=layers,
        attention="dense",
        index_topk=length // 8,
        variants=dataclasses.replace(base.model.variants, sliding_window=length // 8),
    )
    base = dataclasses.replace(base, model=model)
    return Study(
        question="Which cheaper attention loses least, at an eighth of the keys?",
        base=base,
        arms=_arms(base),
        metrics=(
            measures.held_out("arms"),
            Metric(
                label="needle",
                key="needle/accuracy",
                unit="share found",
                better="higher",
                digits=2,
            ),
        ),
        measure=measures.Suites(
            names=("needle",) if scale != "tiny" else (), length=length, num_tasks=100
        ),
        claims=tuple(
            Claim(better=better, worse="sliding window", source="GLM-5, Table 5")
            for better in ("SimpleGDN", "GDN", "DSA")
        ),
        paper={
            "all keys": {"RULER 64K": "85.35"},
            "sliding window": {"RULER 64K": "65.94"},
            "GDN": {"RULER 64K": "76.76"},
            "SimpleGDN": {"RULER 64K": "81.76"},
        },
        paper_says="of GLM-9B's conversions SimpleGDN keeps most of RULER at 64K, then "
        "GDN, then alternating windows; DSA alone selects without loss (GLM-5, 2.1.2 "
        "and Table 5).",
    )
