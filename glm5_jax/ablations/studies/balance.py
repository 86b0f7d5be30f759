"""Balance of the experts: the step of the router's bias, and the sequence loss.

python -m glm5_jax.ablate --study=balance --scale=tiny
"""

from glm5_jax.ablations import measures, scales
from glm5_jax.ablations.study import Arm, Claim, Metric, Study

_RATE, _WEIGHT = "loss.router_bias_rate", "loss.balance_weight"


def get_study(scale: str) -> Study:
    """Returns GLM-5's two means, ten times as much of each, and neither."""
    paper = "bias 0.001, loss 0.0001"
    arms = [(0.0, 0.0), (0.01, 0.0), (0.0, 0.01), (0.01, 1e-4)]
    names = ["neither", "bias 0.01", "loss 0.01", "bias 0.01, loss 0.0001"]
    return Study(
        question="What balances the experts, and what does it cost?",
        base=scales.pretrain(scale),
        arms=(
            Arm(name=paper, changes={_RATE: 1e-3, _WEIGHT: 1e-4}),
            *(
                Arm(name=name, changes={_RATE: rate, _WEIGHT: weight})
                for name, (rate, weight) in zip(names, arms, strict=True)
            ),
        ),
        metrics=(
            Metric(
                label="largest load",
                key="moe/max_load",
                unit="times the mean load",
                better="lower",
                value="late",
                plot="curve",
                digits=2,
            ),
            measures.held_out("arms"),
        ),
        claims=(
            Claim(better=paper, worse="neither", source="expectation"),
            Claim(better="bias 0.01", worse=paper, source="expectation"),
        ),
        paper_says="GLM-5 inherits a bias step of 0.001 and a sequence loss of 0.0001 "
        "from GLM-4.5 and prints no study of them. A bias step counts in updates, of "
        "which a small run has few.",
    )
