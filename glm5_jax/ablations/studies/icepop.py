"""IcePop's band, where the rollouts' weights are rounded and updates lag behind them.

python -m glm5_jax.ablate --study=icepop --scale=tiny

The task is reversing words (docs/rl.md). The engine samples with weights rounded to
int8, which makes it differ from the trainer; with several updates for each batch of
rollouts, the later ones learn from samples of older weights.
"""

import dataclasses

from glm5_jax import command_line
from glm5_jax.ablations import study
from glm5_jax.ablations.study import Arm, Claim, Metric, Study
from glm5_jax.config import files

_STEPS = {"tiny": 60, "small": 300, "base": 600}
_BANDS = {
    "no band": ("grpo", 2.0),
    "band 2": ("icepop", 2.0),
    "band 1.1": ("icepop", 1.1),
}


def get_study(scale: str) -> Study:
    """Returns three bands, each with one and with four updates of a rollout."""
    sft = command_line.resolve(files.load("small_sft_reverse"))
    rl = command_line.resolve(files.load("small_rl_reverse"))
    base = dataclasses.replace(
        rl,
        num_steps=_STEPS[scale],
        eval_every=_STEPS[scale] // 4,
        rl=dataclasses.replace(
            rl.rl, rollout_weights="int8", max_logprob_gap=10.0, min_used_groups=0.0
        ),
    )
    arms = [
        Arm(
            name=f"{name}, {count} updates",
            after="SFT",
            changes={
                "rl.objective": objective,
                "rl.pop_beta": beta,
                "rl.updates_per_rollout": count,
            },
        )
        for count in (1, 4)
        for name, (objective, beta) in _BANDS.items()
    ]
    return Study(
        question="Does IcePop's band help where trainer and engine differ?",
        base=base,
        arms=(Arm(name="SFT", changes=study.changes(base, sft), is_shown=False), *arms),
        metrics=(
            Metric(
                label="success",
                key="eval/success",
                unit="share of held-out words",
                better="higher",
                plot="arms",
            ),
            Metric(
                label="masked",
                key="rl/masked_fraction",
                unit="share of tokens",
                value="late",
                digits=4,
            ),
        ),
        claims=tuple(
            Claim(
                better=f"band 2, {n} updates",
                worse=f"no band, {n} updates",
                source="GLM-5, 3.2",
            )
            for n in (1, 4)
        ),
        paper_says="GLM-5 uses a band of 2 (3.2); Ring reports that without a band "
        "training of large mixtures of experts collapses.",
    )
