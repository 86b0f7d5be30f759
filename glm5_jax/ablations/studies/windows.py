"""Windows without training: every second layer, or the layers that a search chooses.

python -m glm5_jax.ablate --study=windows --scale=tiny

All arms have the parameters of one dense model (Table 4). A beam search compares which
half of the layers become windows; study `efficient` trains such models further.
"""

from glm5_jax.ablations import measures, scales, searches
from glm5_jax.ablations.study import Arm, Claim, Study

_ALL = "all keys"


def get_study(scale: str) -> Study:
    """Returns a dense model, measured as it is and with windows."""
    base = scales.with_windows(scales.pretrain(scale))
    length, layers = base.data.sequence_length, base.model.num_hidden_layers
    every_second = (("latent_sliding", "latent") * layers)[:layers]
    suites = measures.TEXT if scale == "tiny" else measures.TEXT_AND_NEEDLE
    return Study(
        question="Which layers lose least with a window of an eighth of the keys?",
        base=base,
        arms=(
            Arm(name=_ALL),
            Arm(
                name="every second layer",
                after=_ALL,
                is_trained=False,
                measured_with={"model.layer_types": every_second},
            ),
            Arm(
                name="searched layers",
                after=_ALL,
                is_trained=False,
                search=searches.half_windows(base, scale),
            ),
        ),
        metrics=(measures.BITS_PER_BYTE, measures.NEEDLE),
        measure=measures.Suites(names=suites, length=length, num_tasks=100),
        claims=(
            Claim(
                better="searched layers",
                worse="every second layer",
                source="GLM-5, Table 4",
            ),
        ),
        paper={
            _ALL: {"RULER 64K": "85.35"},
            "every second layer": {"RULER 64K": "8.32"},
            "searched layers": {"RULER 64K": "70.23"},
        },
        paper_says="without training, GLM-9B with windows in every second layer loses "
        "nearly all of RULER at 64K, with windows in the layers that a beam search "
        "chooses a sixth of it (GLM-5, Table 4).",
    )
