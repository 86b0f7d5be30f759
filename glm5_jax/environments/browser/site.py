"""Files that a page is made of, at an address that only the browser knows."""

import dataclasses
import hashlib
import mimetypes
import urllib.parse
from collections.abc import Mapping

ORIGIN = "http://site.test/"  # a name that no network has


@dataclasses.dataclass(frozen=True)
class Site:
    """A folder of files; every other address is refused.

    Attributes:
        files: contents by path, such as "index.html".
        width: of the window, in pixels.
        height: of the window, in pixels.
    """

    files: Mapping[str, bytes]
    width: int = 1280
    height: int = 720

    @property
    def address(self) -> str:
        """Returns an address that tells the files beside index.html from others."""
        digest = hashlib.sha256()
        for path, text in sorted(self.files.items()):
            if path != "index.html":
                digest.update(f"{path} {len(text)} ".encode() + text)
        return f"{ORIGIN}{digest.hexdigest()[:16]}/"

    def find(self, url: str, address: str) -> tuple[bytes, str] | None:
        """Returns content and type of a file below an address; None: there is none."""
        if not url.startswith(address):
            return None
        path = urllib.parse.unquote(urllib.parse.urlsplit(url).path)
        path = path.removeprefix(urllib.parse.urlsplit(address).path) or "index.html"
        if path not in self.files:
            return None
        kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
        if kind.startswith("text/") or kind.endswith("javascript"):
            kind += "; charset=utf-8"
        return self.files[path], kind
