"""Multi-token prediction: none, one step, three steps of one module, three modules.

python -m glm5_jax.ablate --study=mtp --scale=tiny

Four tokens are drafted, one more than training has steps: the last module drafts again.
"""

import dataclasses

from glm5_jax.ablations import measures, scales
from glm5_jax.ablations.study import Arm, Claim, Metric, Study

_STEPS = "model.mtp_num_steps"


def get_study(scale: str) -> Study:
    """Returns an untrained module, one for one step or three, and three modules."""
    base = scales.pretrain(scale)
    model = dataclasses.replace(base.model, num_nextn_predict_layers=1)
    return Study(
        question="How many of 4 drafted tokens does the main model accept?",
        base=dataclasses.replace(base, model=model),
        arms=(
            Arm(name="one step", changes={_STEPS: 1}),
            Arm(name="three shared steps", changes={_STEPS: 3}),
            Arm(
                name="three separate modules",
                changes={_STEPS: 3, "model.num_nextn_predict_layers": 3},
            ),
            # The module is there, so that it is measured as drawn: nothing trains it.
            Arm(name="no MTP", changes={_STEPS: 0}),
        ),
        metrics=(
            Metric(
                label="accepted length",
                key="mtp/sampled/length",
                unit="tokens",
                better="higher",
                plot="arms",
            ),
            measures.held_out("curve"),
            measures.SPEED,
        ),
        measure=measures.Suites(names=("mtp",), length=base.data.sequence_length),
        claims=(
            Claim(
                better="three shared steps", worse="one step", source="GLM-5, Table 2"
            ),
        ),
        paper={
            "one step": {"accepted length": "2.55 (DeepSeek-V3.2)"},
            "three shared steps": {"accepted length": "2.76 (GLM-5)"},
        },
        paper_says="at 4 drafts GLM-5, with three shared steps, has 2.76 accepted "
        "tokens, DeepSeek-V3.2, trained with one step, 2.55 (Table 2); it shares one "
        "module because three take three times the memory.",
    )
