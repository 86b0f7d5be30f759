"""Proves the tasks of a world, plays one by hand, or serves them over HTTP.

python -m glm5_jax.environments validate NAME [--num_tasks=N] [--out=FILE.jsonl]
python -m glm5_jax.environments play NAME [--index=N] [--solution]
python -m glm5_jax.environments serve NAME [--port=N] [--api_key=KEY]
python -m glm5_jax.environments mine PACKAGES --out=FOLDER [--num_tasks=N]
python -m glm5_jax.environments export NAME --out=FOLDER [--num_tasks=N]
python -m glm5_jax.environments draft TOPICS --base_url=URL --model=NAME --out=FOLDER

NAME is what rl.environment takes: reverse:3-6, swe:FOLDER, module:Class, ...

`validate` plays each task's solution ten times, wrong attempts and doing nothing, and
prints one JSON object; the exit code is 1 if a task fails. Its --out resumes; that of
swe:, swe_chain: and harbor:FOLDER is FOLDER/proofs.jsonl, whose failed tasks are served
to nobody. `play` reads a turn a line: "/NAME ARGUMENT" calls a tool, all else is a
text. `serve` needs the extra serve; its address, http://HOST:PORT, is a NAME. `mine`
makes tasks of software engineering from NAME==VERSION of PyPI, NAME==OLD->NEW for two
releases, with more of them for a chain, debian:NAME, patches:NAME for Debian's patches,
npm:NAME@VERSION or folders, and prints what became of every candidate; --base_url and
--model name a model that is asked how a package is tested where no rule finds it.
`export` writes Harbor's format. `draft` lets a model write terminal tasks and keeps the
proven. Lists have ",", or are a file's lines.
"""

from absl import flags, logging

from glm5_jax import command_line, config
from glm5_jax.environments import actions, author_flags, serve_flags
from glm5_jax.http_server import reach

for module in (actions, author_flags, serve_flags, reach):  # --help shows them
    flags.adopt_module_key_flags(module)


def main(arguments: command_line.Arguments) -> int:
    """Runs an action; returns 1 if a task is not proven."""
    known = actions.ALL
    if len(arguments.words) != 2 or arguments.words[0] not in known:
        raise config.InputError(
            f"Give an action and a name: python -m glm5_jax.environments "
            f"{'|'.join(known)} NAME; got {' '.join(arguments.words) or 'nothing'}."
        )
    action, name = arguments.words
    logging.set_verbosity(logging.INFO)
    return known[action](name)


if __name__ == "__main__":
    command_line.run(main, takes_config=False, num_words=2)
