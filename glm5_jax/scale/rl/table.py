"""A ranking of splits as tables, for a terminal or as a page."""

from collections.abc import Iterator

from glm5_jax.scale import markdown, slice_devices
from glm5_jax.scale.rl import planner, tasks

HEAD = (
    *("rank", "sample", "train", "unused", "engines", "slots each"),
    *("samples/s", "tokens/s", "step s", "train step s", "push s"),
    *("trainer idle", "engines idle", "slots used", "staleness", "limited by"),
)
EPISODES = (
    *("tasks", "share", "prompt", "turns", "drawn a turn", "observed"),
    *("tool seconds", "where from"),
)
PUSHES = ("weights", "push", "GiB", "seconds to send", "seconds to receive")


def text(ranking: planner.Ranking) -> str:
    """Writes it for a terminal."""
    parts = [
        _title(ranking),
        markdown.aligned([HEAD, *_rows(ranking)]),
        *_refused(ranking),
        _means(ranking),
        markdown.aligned([PUSHES, *_pushes(ranking)]),
        *_notes(ranking),
    ]
    return "\n\n".join(parts)


def page(ranking: planner.Ranking, command: str) -> str:
    """Writes it for a reader, with the command that made it."""
    parts = [
        f"# {_title(ranking)}",
        f"```\n{command}\n```",
        markdown.table(HEAD, _rows(ranking)),
        *_refused(ranking),
        "## What the fastest would do",
        _best(ranking),
        "## Episodes",
        "Sizes are lognormal: MEDIAN:SPREAD, where the spread is the standard "
        "deviation of the logarithm. GLM-5's report gives none of them.",
        markdown.table(EPISODES, _episodes(ranking)),
        _means(ranking),
        "## Pushes of the weights",
        markdown.table(PUSHES, _pushes(ranking)),
        "seconds = max(engines x bytes / (chips that train x network), bytes / (chips "
        "of an engine x network)), for the fastest split. A difference is after a step "
        "at a learning rate of 1e-6 (docs/log.md). Servers take either in bfloat16, "
        "and in FP8 with rl.rollout_weights=fp8.",
        "## What this knows, and what it does not",
        *_notes(ranking),
    ]
    return "\n\n".join(parts) + "\n"


def _title(ranking: planner.Ranking) -> str:
    rl, slices = ranking.config.rl, ranking.num_slices
    times = f"{slices} slices of " if slices > 1 else ""
    first = ranking.plans[0]
    return (
        f"{ranking.config_name} on {times}{ranking.topology}: engines of "
        f"{first.engine.topology}, {rl.prompts_per_step} groups of {rl.group_size} "
        f"episodes a step"
    )


def _rows(ranking: planner.Ranking) -> Iterator[tuple[str, ...]]:
    for rank, plan in enumerate(ranking.plans, start=1):
        split, outcome = plan.split, plan.outcome
        most = max(outcome.staleness, default=0)
        yield (
            str(rank),
            f"{split.sampling:,}",
            f"{split.training:,}" + (" (the same)" if split.takes_turns else ""),
            str(split.unused),
            str(split.num_engines),
            f"{plan.engine.slots:,}",
            f"{outcome.samples_per_second:.3g}",
            f"{outcome.tokens_per_second:,.0f}",
            f"{outcome.step_seconds:.1f}",
            f"{plan.trainer.seconds:.1f}",
            f"{plan.push_seconds:.1f}",
            *(
                f"{100 * share:.0f}%"
                for share in (
                    outcome.train_idle,
                    outcome.engine_idle,
                    outcome.occupancy,
                )
            ),
            f"{outcome.mean_staleness:.1f}, {most}",
            plan.limit,
        )


def _refused(ranking: planner.Ranking) -> Iterator[str]:
    """Yields why the largest trainer that is too small is, and why larger ones are."""
    least = min(plan.split.training for plan in ranking.plans)
    small = [pair for pair in ranking.refused if pair[0].training < least]
    if small:
        sizes = ", ".join(f"{split.training:,}" for split, _ in small)
        yield f"No trainer of {sizes} chips: {small[-1][1]}"
    for split, why in ranking.refused:
        if split.training >= least:
            yield f"No trainer of {split.training:,} chips: {why}"


def _best(ranking: planner.Ranking) -> str:
    plan = ranking.plans[0]
    split, trainer = plan.split, plan.trainer
    mesh = " x ".join(f"{a} {n}" for a, n in trainer.setting.sizes.items() if n > 1)
    gains = ", ".join(f"{name} {factor:.2f}" for name, factor in plan.limits)
    optim, model = trainer.config.optim, trainer.setting.model
    return (
        f"{split.num_engines} engines of {plan.engine.topology} draw "
        f"{plan.engine.tokens_per_second:,.0f} tokens a second each when all "
        f"{plan.engine.slots:,} slots are in use, at {plan.engine.context:,} tokens of "
        f"context. The trainer has {split.num_slices} x {split.topology}, mesh {mesh}, "
        f"optim.accumulation_steps {optim.accumulation_steps}, model.expert_chunks "
        f"{model.expert_chunks}, moments in {optim.moment_dtype}: "
        f"{trainer.memory.total / slice_devices.GIB:.1f} GiB a chip, "
        f"{trainer.seconds:.1f} s a step ({trainer.roofline.binding}). Times as fast "
        f"without each cost alone: {gains}."
    )


def _episodes(ranking: planner.Ranking) -> Iterator[tuple[str, ...]]:
    mixture = ranking.mixture
    total = sum(share for _, share in mixture.shares)
    for name, share in mixture.shares:
        kind = mixture.kinds[name]
        is_default = kind == tasks.KINDS[name]
        yield (
            name,
            f"{100 * share / total:.0f}%",
            str(kind.prompt),
            str(kind.turns),
            str(kind.drawn),
            str(kind.observed),
            str(kind.tool_seconds),
            tasks.SOURCES[name] if is_default else "given by flags",
        )


def _means(ranking: planner.Ranking) -> str:
    found = ranking.mixture.summary
    limits = ranking.mixture.limits
    return (
        f"Mean of {tasks.NUM_DRAWN} episodes within the config's limits "
        f"({limits.turns} turns, {limits.turn_tokens:,} tokens drawn in a turn, "
        f"{limits.row_tokens:,} of a row): {found.turns:.1f} turns, {found.drawn:,.0f} "
        f"tokens drawn of {found.length:,.0f}, {found.tool_seconds:.0f} s of tools; a "
        f"token is drawn at {found.context:,.0f} tokens of context, and "
        f"{found.read:.2f} are read for it."
    )


def _pushes(ranking: planner.Ranking) -> Iterator[tuple[str, ...]]:
    plan = ranking.plans[0]
    split, device = plan.split, plan.trainer.setting.device
    for push in ranking.pushes:
        sent = split.num_engines * push.num_bytes / (split.training * device.dcn)
        received = push.num_bytes / (split.engine * device.dcn)
        yield (
            push.weights,
            push.kind,
            f"{push.num_bytes / slice_devices.GIB:,.1f}",
            "on the same chips" if split.takes_turns else f"{sent:.2f}",
            "on the same chips" if split.takes_turns else f"{received:.2f}",
        )


def _notes(ranking: planner.Ranking) -> tuple[str, ...]:
    return (
        f"Simulated, not run: {ranking.num_steps} steps after the first "
        f"{planner.SKIPPED}; where staleness limits, so few scatter by a fifth "
        f"(--simulated_steps). Tokens are those that the model draws and the trainer "
        f"learns from. Staleness: the versions by which a group's oldest token is "
        f"older than the weights that learn from it, mean and most. Limited by: what, "
        f"taken away alone, makes the run fastest. Seconds of decoding and training "
        f"are rooflines, so rates are upper bounds. Engines stand still during a push, "
        f"though servers read it beside their work. Reading of prompts and of tools' "
        f"answers is counted at the rate of its products. Drafts, groups that are "
        f"dropped, failures, evaluations, checkpoints and uneven loads of experts are "
        f"left out.",
    )
