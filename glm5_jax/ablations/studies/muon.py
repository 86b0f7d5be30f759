"""Optimizer of the matrices: AdamW, Muon on whole matrices, Muon Split.

python -m glm5_jax.ablate --study=muon --scale=tiny

Each arm first tries four learning rates on the first seed and takes the best.
"""

import dataclasses

from glm5_jax.ablations import measures, scales
from glm5_jax.ablations.study import Arm, Claim, Study


def get_study(scale: str) -> Study:
    """Returns the three optimizers, each at the best of four rates."""
    base = scales.pretrain(scale)
    rate = base.optim.learning_rate
    every = base.eval_every
    return Study(
        question="What does Muon Split buy, and what does it do to attention logits?",
        base=dataclasses.replace(
            base, checkpoint_every=every, checkpoints_keep_every=every
        ),
        arms=(
            Arm(name="Muon Split"),
            Arm(name="Muon", changes={"optim.muon_split": False}),
            Arm(name="AdamW", changes={"optim.name": "adamw"}),
        ),
        rates=(rate / 10, rate / 3, rate, rate * 3),
        metrics=(measures.held_out("curve"), measures.ATTENTION_LOGIT),
        measure=measures.Suites(
            names=("attention_logits",), length=base.data.sequence_length
        ),
        claims=(
            Claim(better="Muon Split", worse="Muon", source="GLM-5, Table 1"),
            Claim(
                better="Muon Split",
                worse="Muon",
                source="GLM-5, 2.1",
                label=measures.ATTENTION_LOGIT.label,
            ),
            Claim(better="Muon", worse="AdamW", source="expectation"),
        ),
        paper_says="with MLA, Muon Split raises MMLU from 61.5 to 62.5 and BBH from "
        "48.9 to 51.8 over Muon on whole matrices, and attention logits keep their "
        "scale without clipping (GLM-5, 2.1 and Table 1). It does not compare with "
        "AdamW.",
    )
