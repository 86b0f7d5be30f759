"""Tasks about packages, built and read by Debian's own tools."""

import random
from collections.abc import Sequence

from glm5_jax.environments.worlds.terminal.draft import Draft, Expect, names


def deb_package(rng: random.Random) -> Draft:
    """Asks for a Debian package with a program, its settings and dependencies."""
    name, one, other, maker = names(rng, 4)
    version = f"{rng.randrange(1, 9)}.{rng.randrange(20)}-{rng.randrange(1, 5)}"
    needs = [f"{one} (>= {rng.randrange(2, 9)}.{rng.randrange(9)})", other]
    program = f"#!/bin/sh\necho {name} $(cat /etc/{name}.conf)\n"
    control = [
        f"Package: {name}",
        f"Version: {version}",
        "Architecture: all",
        f"Maintainer: {maker} <{maker}@example.org>",
        f"Depends: {', '.join(needs)}",
        f"Description: says {name}",
    ]
    build = _build(name, control)
    fields = f"dpkg-deb -f {name}.deb Package Version Architecture Depends"
    told = sorted(line.replace(" ", "") for line in (*control[:3], control[4]))
    listed = (
        f"-rw-r--r-- root/root ./etc/{name}.conf\n-rwxr-xr-x root/root ./usr/bin/{name}"
    )
    return Draft(
        instruction=(
            f"Build the Debian package {name}.deb by dpkg-deb: {name} in version "
            f"{version}, for all architectures, depending on {' and '.join(needs)}; "
            f"{maker} <{maker}@example.org> maintains it. It installs program.sh as "
            f"/usr/bin/{name}, which everyone may run, and settings as "
            f"/etc/{name}.conf, which everyone may read and only root write. The "
            f"latter is a conffile. All files belong to root; there are no others."
        ),
        files={"program.sh": program, "settings": f"{other}\n"},
        solution=build,
        wrong=(
            build.replace("--root-owner-group ", ""),
            build.replace("install -m 755", "install -m 644"),
            build.replace(f"echo /etc/{name}.conf > p/DEBIAN/conffiles && ", ""),
            build.replace(f"Depends: {needs[0]}, {other}", f"Depends: {one}, {other}"),
            build.replace(f"Version: {version}", f"Version: {version}1"),
        ),
        expects=(
            Expect(f"{fields} | tr -d ' ' | LC_ALL=C sort", "\n".join(told)),
            Expect(
                f"dpkg-deb -c {name}.deb | awk '$1 !~ /^d/ {{print $1, $2, $6}}' "
                f"| LC_ALL=C sort",
                listed,
            ),
            Expect(f"dpkg-deb -I {name}.deb conffiles", f"/etc/{name}.conf"),
            Expect(
                f"dpkg-deb --fsys-tarfile {name}.deb | tar -xO ./usr/bin/{name}",
                program,
            ),
            Expect(
                f"dpkg-deb --fsys-tarfile {name}.deb | tar -xO ./etc/{name}.conf",
                other,
            ),
        ),
    )


def _build(name: str, control: Sequence[str]) -> str:
    """Returns the commands that build the package.

    Args:
        name: of the package, its program and its settings.
        control: lines of its file control.
    """
    lines = " ".join(f"'{line}'" for line in control)
    return (
        "mkdir -p p/DEBIAN p/usr/bin p/etc && "
        f"install -m 755 program.sh p/usr/bin/{name} && "
        f"install -m 644 settings p/etc/{name}.conf && "
        f"printf '%s\\n' {lines} > p/DEBIAN/control && "
        f"echo /etc/{name}.conf > p/DEBIAN/conffiles && "
        f"dpkg-deb --root-owner-group -b p {name}.deb"
    )
