"""index.json of a prepared folder: what its rows are, and which files hold them."""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from glm5_jax import config, files
from glm5_jax.data.preparation import shards

NAME = "index.json"
PLAN = "plan.json"  # of a preparation, finished or not
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Index:
    """A prepared folder.

    Attributes:
        settings: what it was prepared with, but for the source.
        corpus: digest of the source's names and texts.
        tokenizer: digest of the tokenizer.json beside it.
        eos_id: of that.
        train: files with rows to learn from.
        held_out: files with the others.
    """

    settings: dict[str, Any]
    corpus: str
    tokenizer: str
    eos_id: int
    train: tuple[shards.Shard, ...]
    held_out: tuple[shards.Shard, ...]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Returns that by which two folders differ; equal ones hold equal rows."""
        shards_of = (*self.train, *self.held_out)
        contents = "".join(f"{s.sha256} {s.rows} {s.size}\n" for s in shards_of)
        rows = hashlib.sha256(contents.encode()).hexdigest()[:16]
        own = {"corpus": self.corpus, "tokenizer": self.tokenizer, "rows": rows}
        return self.settings | own

    @property
    def kind(self) -> config.DocumentKind:
        """Returns what the rows are of."""
        return self.settings.get("kind", "text")

    def write(self, folder: pathlib.Path) -> None:
        """Writes it whole, with a checksum of itself."""
        tree = dataclasses.asdict(self)
        text = json.dumps({**tree, "checksum": _checksum(tree)}, indent=1)
        files.write_text(folder / NAME, text)


def is_prepared(source: str) -> bool:
    """Returns whether `source` is a folder of `prepare`, finished or not."""
    folder = pathlib.Path(source).expanduser()
    return any((folder / name).is_file() for name in (NAME, PLAN))


def read(folder: pathlib.Path) -> Index:
    """The index of a folder.

    Raises:
        config.InputError: it has none, or one that cannot be read.
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
                f"{folder} is not prepared to the end; run glm5_jax.prepare again, "
                f"which goes on where it stopped."
            )
        raise config.InputError(
            f"{folder} holds no prepared rows (no {NAME}); make them with python -m "
            f"glm5_jax.prepare."
        )
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        checksum = tree.pop("checksum", None)  # an earlier version wrote none
        if checksum not in (None, _checksum(tree)):
            raise ValueError("it has another checksum than it says")
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


def _checksum(tree: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
