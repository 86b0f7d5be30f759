"""The files that a box starts with."""

import dataclasses
import pathlib
from collections.abc import Mapping

VARIABLES = {  # of a shell that sees nothing of the machine but /usr
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclasses.dataclass(frozen=True)
class Image:
    """Files of a box.

    Attributes:
        files: contents by path below /work. A content that begins with "#!" may be run.
        folder: copied into /work before the files are written.
        binds: folders of this machine that the box sees, read-only, at the same path;
            everyone must be able to read them.
        folders: paths of empty folders of the box beside /work, such as "/logs"; not
            without a sandbox.
        hidden: folders and files of this machine that are empty in the box; not
            without a sandbox.
    """

    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    folder: pathlib.Path | None = None
    binds: tuple[pathlib.Path, ...] = ()
    folders: tuple[str, ...] = ()
    hidden: tuple[pathlib.Path, ...] = ()

    def write(self, folder: pathlib.Path) -> None:
        """Writes the files below a folder, which everyone may read, whatever the umask.

        Raises:
            ValueError: a path leads out of it.
        """
        for name, content in self.files.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"the path {name!r} leads out of the box")
            _make_parents(folder, name)
            path.write_bytes(content)
            path.chmod(0o755 if content.startswith(b"#!") else 0o644)


def _make_parents(folder: pathlib.Path, name: str) -> None:
    for parent in reversed(pathlib.PurePath(name).parents[:-1]):
        if not (path := folder / parent).is_dir():
            path.mkdir()
            path.chmod(0o755)
