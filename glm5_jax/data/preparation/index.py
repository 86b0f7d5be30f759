"""index.json of a prepared folder: its settings, digests and files of rows."""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from glm5_jax import config, files
from glm5_jax.data.preparation import shards
from glm5_jax.storage import copies

NAME = "index.json"
PLAN = "plan.json"  # of a preparation, finished or not
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Index:
    """A prepared folder.

    Attributes:
        settings: the settings of the preparation, without the source.
        corpus: digest of the names and texts of the source.
        tokenizer: digest of the tokenizer.json in the same folder.
        eos_id: end-of-text id of this tokenizer.
        train: files with training rows.
        held_out: files with held-out rows.
    """

    settings: dict[str, Any]
    corpus: str
    tokenizer: str
    eos_id: int
    train: tuple[shards.Shard, ...]
    held_out: tuple[shards.Shard, ...]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Returns settings and digests; folders with equal ones have equal rows."""
        shards_of = (*self.train, *self.held_out)
        contents = "".join(f"{s.sha256} {s.rows} {s.size}\n" for s in shards_of)
        rows = hashlib.sha256(contents.encode()).hexdigest()[:16]
        own = {"corpus": self.corpus, "tokenizer": self.tokenizer, "rows": rows}
        return self.settings | own

    @property
    def kind(self) -> config.DocumentKind:
        """Returns the kind of document of the rows."""
        return self.settings.get("kind", "text")

    def write(self, folder: pathlib.Path) -> None:
        """Writes the index atomically, with a checksum of itself."""
        tree = dataclasses.asdict(self)
        text = json.dumps({**tree, "checksum": checksum_of(tree)}, indent=1)
        files.write_text(folder / NAME, text)


def is_prepared(source: str) -> bool:
    """Tells whether `prepare` made the folder `source`, finished or not."""
    folder = copies.local(source)
    return any((folder / name).is_file() for name in (NAME, PLAN))


def read(folder: pathlib.Path) -> Index:
    """Returns the index of a folder.

    Raises:
        config.InputError: it is missing or cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        below = sorted(p.parent.name for p in folder.glob(f"*/{NAME}"))
        if below:
            raise config.InputError(
                f"{folder} holds prepared folders: {', '.join(below)}; name one of "
                f"them as data.source, or several in data.mixture."
            )
        if (folder / PLAN).is_file():
            raise config.InputError(
                f"the preparation of {folder} is not finished; run glm5_jax.prepare "
                f"again to resume it."
            )
        raise config.InputError(
            f"{folder} holds no prepared rows (no {NAME}); make them with python -m "
            f"glm5_jax.prepare."
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        checksum = tree.pop("checksum", None)  # an earlier version wrote none
        if checksum not in (None, checksum_of(tree)):
            raise ValueError("its content does not match its checksum")
        for side in ("train", "held_out"):
            tree[side] = tuple(shards.Shard(**shard) for shard in tree[side])
        index = Index(**tree)
        for shard in (*index.train, *index.held_out):
            shard.require_plain_name()
        return index
    except (*_DAMAGE, RecursionError) as error:
        raise config.InputError(
            f"{path} cannot be read ({error}); run the glm5_jax.prepare of the folder "
            f"again, which keeps its shards."
        ) from error


def checksum_of(tree: dict[str, Any]) -> str:
    """Returns the SHA-256 of the values of a JSON file."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
