"""Environments behind HTTP: a service that plays episodes, and a taskset that asks it.

    python -m glm5_jax.environments serve terminal --port=8010
    rl.environment="http://127.0.0.1:8010"

wire.py has what both sides say to each other. live.py keeps the episodes of a service,
app.py its routes, command.py listens. remote.py is the taskset of a client, through.py
proves a service with the attempts of a taskset that is here, too. docs/worlds.md lists
the routes.
"""
