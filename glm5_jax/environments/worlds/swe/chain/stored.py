"""Chains as they are stored: FOLDER/chains.jsonl, beside the tasks of single steps.

A link is a record whose tree is that of the first release, changed to what the agent
has if it solved all links before. Its hidden files are the tests of all releases, and
those of its own release score it.
"""

import dataclasses
import json
from collections.abc import Mapping

from glm5_jax import config
from glm5_jax.environments.worlds.swe import records

CHAINS = "chains.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain:
    """Issues of successive releases."""

    chain_id: str
    repo: str
    links: tuple[records.Record, ...]


def read(folder: records.Folder) -> Mapping[str, Chain]:
    """Returns the chains of a folder by their names.

    Raises:
        config.InputError: the folder has no chains, or a line is none.
    """
    file = folder.path / CHAINS
    if not file.is_file():
        raise config.InputError(
            f"swe_chain:{folder.path}: there is no {file}; make chains by `python -m "
            f'glm5_jax.environments mine "NAME==1.0->1.1->1.2" --out={folder.path}`.'
        )
    lines = file.read_text(encoding="utf-8").splitlines()
    chains = [_from_json(line) for line in lines if line]
    return {chain.chain_id: chain for chain in chains}


def add(folder: records.Folder, chain: Chain) -> None:
    """Appends a chain."""
    line = json.dumps(dataclasses.asdict(chain), sort_keys=True)
    with (folder.path / CHAINS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _from_json(line: str) -> Chain:
    try:
        fields = json.loads(line)
        links = [records.from_json(json.dumps(link)) for link in fields.pop("links")]
        return Chain(links=tuple(links), **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise config.InputError(
            f"{CHAINS} has a line that is no chain of this version ({error}); mine the "
            f"releases anew into another folder."
        ) from error
