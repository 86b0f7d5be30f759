"""RL with the rollouts of the policy itself (arXiv 2602.15763, section 3.2).

The indexers are frozen, as in the paper. MTP has no term in the loss and stays, unless
rl.trains_mtp trains it beside the policy.
"""

import dataclasses

from glm5_jax.config.model import ModelConfig
from glm5_jax.config.stages import record


def _is_trained(path: record.Path) -> bool:
    return "indexer" not in path and "mtp" not in path


def episode_rules(config: record.Config) -> list[record.Rule]:
    """Returns rules: an episode fits a row; all that a term needs is there."""
    kl_weight, warmup = config.rl.kl_weight, config.rl.critic_warmup_steps
    length, new = config.data.sequence_length, config.rl.max_new_tokens
    modules = config.model.num_nextn_predict_layers
    return [
        (
            not config.rl.trains_mtp or modules > 0,
            "rl.trains_mtp needs a model with multi-token prediction; "
            "model.num_nextn_predict_layers is 0.",
        ),
        (
            kl_weight == 0 or bool(config.rl.reference or config.init_from),
            f"rl.kl_weight={kl_weight:g} needs the policy to stay near: set init_from "
            f"or rl.reference to its folder.",
        ),
        (
            not config.rl.critic or warmup < config.num_steps,
            f"rl.critic_warmup_steps must be smaller than num_steps, got {warmup} of "
            f"{config.num_steps}: the policy would not learn.",
        ),
        (
            new < length,
            f"rl.max_new_tokens must be smaller than data.sequence_length, which has "
            f"to hold prompt and answers, got {new} >= {length}.",
        ),
    ]


def reward_rules(config: record.Config) -> list[record.Rule]:
    """Returns the rule that rewards teach, not other policies."""
    return [
        (
            not config.rl.teachers,
            f"rl.teachers must be empty in stage {config.stage!r}, in which rewards "
            f"teach. Set stage='distill'.",
        ),
    ]


def own_engine_rules(config: record.Config) -> list[record.Rule]:
    """Returns the rule that the trainer's own engine plays."""
    number, servers = config.rl.num_engines, config.rl.servers
    name, got = ("servers", servers) if servers else ("num_engines", number)
    return [
        (
            not config.rl.has_servers,
            f"rl.{name} must not be set in stage {config.stage!r}, got {got!r}: its "
            f"episodes are played by the trainer's own engine. Set stage='async_rl'.",
        ),
        (
            not config.rl.clears_cache,
            f"rl.clears_cache must be false in stage {config.stage!r}, got true: no "
            f"episode is under way when weights change. Set stage='async_rl'.",
        ),
        (
            not config.rl.evaluates_beside,
            f"rl.evaluates_beside must be false in stage {config.stage!r}, got true: "
            f"its engine plays for one purpose at a time. Set stage='async_rl'.",
        ),
        (
            config.rl.quarantine != "end",
            f"rl.quarantine='end' would end nothing in stage {config.stage!r}, which "
            f"plays no answers that must earn nothing. Set stage='async_rl'.",
        ),
    ]


def _rules(config: record.Config) -> list[record.Rule]:
    return [*episode_rules(config), *reward_rules(config), *own_engine_rules(config)]


def _batch_invariant(model: ModelConfig) -> ModelConfig:
    """Makes trainer and engine agree in bfloat16; in float32 they nearly do."""
    can_be = model.attention == "sparse" and not model.layer_types
    can_be &= model.kv_cache_dtype == "auto" and model.dtype == "bfloat16"
    if model.batch_invariant is None and can_be:
        return dataclasses.replace(model, batch_invariant=True)
    return model


STAGE = record.Stage(
    name="rl",
    feed="rollouts",
    rows=("rl.prompts_per_step", "rl.group_size"),
    packed_rows="rl.rows_per_step",
    updates="rl.updates_per_rollout",
    floats=("loss_mask", "rollout_logprobs", "advantages", "weights"),
    can_replay_routing=True,
    plays_episodes=True,
    update="policy",
    losses=("policy",),
    trains=_is_trained,
    moves_router_bias=False,
    measures=(record.SUCCESS,),
    best=record.SUCCESS,
    rules=_rules,
    model_defaults=_batch_invariant,
)
