"""Tasks about files as such: archives, digests, codes, links."""

import base64
import hashlib
import random

from glm5_jax.environments.worlds.terminal.draft import Draft, Expect, answer, names


def archive_without_logs(rng: random.Random) -> Draft:
    """Asks for an archive of a folder without some of its files."""
    first, second, third, skipped = names(rng, 4)
    kept = {f"site/{first}.txt": "1\n", f"site/{second}/{third}.txt": "2\n"}
    kept[f"site/{second}/log.txt"] = "not a log\n"
    left = {f"site/{skipped}.log": "a\n", f"site/{second}/{first}.log": "b\n"}
    wanted = "\n".join(sorted(kept))
    pack = "tar --exclude='*.log' -czf backup.tar.gz site"
    listed = "tar -tzf backup.tar.gz | grep -v '/$' | LC_ALL=C sort"
    return Draft(
        instruction=(
            "Pack the folder site into backup.tar.gz, compressed with gzip, without "
            "the files whose names end in .log. Paths in it begin with site/. The "
            "folder itself must stay as it is."
        ),
        files={**kept, **left},
        solution=pack,
        wrong=(
            "tar -czf backup.tar.gz site",
            pack.replace("-czf", "-cf"),
            f"find site -name '*.log' -delete; {pack}",
            "tar --exclude='*log*' -czf backup.tar.gz site",
        ),
        expects=(
            Expect(listed, wanted),
            Expect("gzip -t backup.tar.gz && echo whole", "whole"),
            Expect("find site -type f | wc -l", str(len(kept) + len(left))),
            Expect(f"tar -xzOf backup.tar.gz site/{second}/{third}.txt", "2"),
        ),
    )


def checksum(rng: random.Random) -> Draft:
    """Asks for the file with a given digest among many."""
    folders = names(rng, 4)
    files = {
        f"store/{folder}/{number:02}.dat": f"{rng.randrange(10**9)}\n"
        for folder in folders
        for number in range(8)
    }
    path = rng.choice(sorted(files))
    other = next(name for name in sorted(files) if name != path)
    kind = rng.choice(["sha256", "sha1", "md5"])
    digest = hashlib.new(kind, files[path].encode()).hexdigest()
    found = f"find store -type f -exec {kind}sum {{}} + | grep {digest}"
    return Draft(
        instruction=(
            f"One file below store has the {kind.upper()} digest {digest}. Write its "
            f"path, which begins with store/, into answer.txt."
        ),
        files=files,
        solution=f"{found} | awk '{{print $2}}' > answer.txt",
        wrong=(
            f"{found} > answer.txt",
            f"echo {other} > answer.txt",
            f"{found} | awk '{{print $2}}' | xargs basename > answer.txt",
        ),
        expects=answer(path),
    )


def encoded_message(rng: random.Random) -> Draft:
    """Asks to undo several codes, one after another."""
    secret = " ".join(names(rng, 4))
    data, undo = secret.encode() + b"\n", []
    for step in rng.sample(["base64", "hex", "reverse"], 3):
        if step == "base64":
            data = base64.b64encode(data) + b"\n"
            undo.append("base64 -d")
        elif step == "hex":
            data = data.hex().encode() + b"\n"
            undo.append(
                "python3 -I -c 'print(bytes.fromhex(input()).decode(), end=\"\")'"
            )
        else:
            data = data.rstrip(b"\n")[::-1] + b"\n"
            undo.append("rev")
    steps = " | ".join(reversed(undo))
    order = {"base64 -d": "base64", "rev": "reversal of its line"}
    said = ", then ".join(order.get(step, "hexadecimal") for step in undo)
    return Draft(
        instruction=(
            f"message.txt was made from a text by {said}. Write the text into "
            f"answer.txt."
        ),
        files={"message.txt": data.decode()},
        solution=f"cat message.txt | {steps} > answer.txt",
        wrong=(
            "cp message.txt answer.txt",
            f"cat message.txt | {' | '.join([*reversed(undo)][:2])} > answer.txt",
            f"echo {' '.join(reversed(secret.split()))} > answer.txt",
        ),
        expects=answer(secret),
    )


def symlinks(rng: random.Random) -> Draft:
    """Asks for relative links to the newest of several versions."""
    tools = names(rng, 3)
    files, wanted = {}, {}
    for tool in tools:
        versions = rng.sample(range(2, 30), 3)
        for version in versions:
            files[f"opt/{tool}-{version}/bin/{tool}"] = f"#!/bin/sh\necho {version}\n"
        wanted[tool] = f"../opt/{tool}-{max(versions)}/bin/{tool}"
    link = (
        "mkdir -p bin; for t in {tools}; do v=$(ls -d opt/$t-* | sort {sort} | "
        "tail -1); ln -s{flags} {prefix}$v/bin/$t bin/$t; done"
    )
    given = {"tools": " ".join(tools), "sort": "-V", "flags": "f", "prefix": "../"}
    return Draft(
        instruction=(
            "opt has several versions of each tool, as opt/NAME-VERSION. Make the "
            "folder bin with a symbolic link for each tool, named like it, to its "
            "executable in the newest version. The links must be relative, of the form "
            "../opt/NAME-VERSION/bin/NAME."
        ),
        files=files,
        solution=link.format(**given),
        wrong=(
            link.format(**given | {"prefix": "/work/"}),
            link.format(**given | {"prefix": ""}),
            link.format(**given).replace("tail -1", "head -1"),
            "mkdir bin; cp opt/*/bin/* bin",
        ),
        expects=tuple(
            Expect(f"readlink bin/{tool}; ls bin | wc -l", f"{to}\n{len(tools)}")
            for tool, to in wanted.items()
        ),
    )
