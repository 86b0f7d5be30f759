"""Tasks about histories of files: git, and patches."""

import random

from glm5_jax.environments.worlds.terminal.draft import Draft, Expect, answer, names

_INIT = (
    "git init -q -b main . && git config user.name a && git config user.email a@b.c && "
)


def _commit(message: str, day: int) -> str:
    clock = f"2026-01-{day:02}T12:00:00"
    return (
        f"git add -A && GIT_AUTHOR_DATE={clock} GIT_COMMITTER_DATE={clock} "
        f"git commit -q -m '{message}'"
    )


def git_bisect(rng: random.Random) -> Draft:
    """Asks for the commit that changed a setting to its value of today."""
    key, *words = names(rng, 8)
    culprit, values = rng.randrange(2, 6), [3] * 8
    values[culprit:] = [rng.randrange(10, 99)] * (8 - culprit)
    steps = [
        f"printf '{key}={value}\\nstep={n}\\n' > settings && "
        + _commit(f"Change {words[n - 1]} {n}", n + 1)
        for n, value in enumerate(values)
    ]
    wanted = f"Change {words[culprit - 1]} {culprit}"
    find = f"git log -S{key}={values[-1]} --format=%s"
    return Draft(
        instruction=(
            f"This folder is a git repository. Write into answer.txt the subject of "
            f"the commit that gave {key} in the file settings its present value."
        ),
        setup=_INIT + " && ".join(steps),
        solution=f"{find} -- settings > answer.txt",
        wrong=(
            "git log -1 --format=%s > answer.txt",
            "git log --format=%s -- settings > answer.txt",
            f"git log -S{key}=3 --format=%s -- settings | tail -1 > answer.txt",
        ),
        expects=answer(wanted),
    )


def git_revert(rng: random.Random) -> Draft:
    """Asks to take back one commit of several with a new commit."""
    words = names(rng, 5)
    bad = rng.randrange(1, 4)
    steps = []
    for number, word in enumerate(words):
        write = f"echo {word} > {word}.txt"
        if number == bad:
            write += f" && echo broken > {words[0]}.txt"
        steps.append(f"{write} && " + _commit(f"Add {word}", number + 1))
    revert = f"git revert --no-edit $(git log --format=%h --grep='Add {words[bad]}')"
    kept = [word for number, word in enumerate(words) if number != bad]
    files = "\n".join(sorted(f"{word}.txt" for word in kept))
    return Draft(
        instruction=(
            f"This folder is a git repository. Take back the commit 'Add {words[bad]}' "
            f"with one new commit on main; the commits that are there must stay."
        ),
        setup=_INIT + " && ".join(steps),
        solution=revert,
        wrong=(
            f"git reset -q --hard $(git log --format=%h --grep='Add {words[bad]}')~1",
            f"git rm -q {words[bad]}.txt && git commit -q -m 'Take back'",
            revert.replace("--no-edit", "--no-commit"),
        ),
        expects=(
            Expect("git rev-list --count main", str(len(words) + 1)),
            Expect("git ls-tree --name-only main | LC_ALL=C sort", files),
            Expect(f"git show main:{words[0]}.txt", words[0]),
            Expect("git status --porcelain -uno", ""),
        ),
    )


def git_merge(rng: random.Random) -> Draft:
    """Asks to merge a branch that changes the same line."""
    ours, theirs, other, branch = names(rng, 4)
    steps = (
        f"printf 'top\\nlist\\nend\\n' > list.txt && {_commit('Begin', 1)}",
        f"git checkout -q -b {branch} && printf 'top\\nlist\\n{theirs}\\nend\\n' > "
        f"list.txt && echo 1 > {other}.txt && {_commit('Add theirs', 2)}",
        f"git checkout -q main && printf 'top\\nlist\\n{ours}\\nend\\n' > list.txt && "
        f"{_commit('Add ours', 3)}",
    )
    both = f"printf 'top\\nlist\\n{ours}\\n{theirs}\\nend\\n' > list.txt"
    merge = f"git merge -q {branch}; {{text}}; git add -A; git commit -q -m Merge"
    return Draft(
        instruction=(
            f"This folder is a git repository. Merge the branch {branch} into main. "
            f"Where both added a line to list.txt, keep both, that of main first."
        ),
        setup=_INIT + " && ".join(steps),
        solution=merge.replace("{text}", both),
        wrong=(
            f"git merge -q -X ours -m Merge {branch}",
            f"{both}; git add -A; git commit -q -m Merge",
            f"git merge -q {branch}; git add -A; git commit -q -m Merge",
        ),
        expects=(
            Expect("git show main:list.txt", f"top\nlist\n{ours}\n{theirs}\nend"),
            Expect("git rev-list --count --merges main", "1"),
            Expect(f"git show main:{other}.txt", "1"),
            Expect(f"git merge-base --is-ancestor {branch} main && echo in", "in"),
        ),
    )


def patch_level(rng: random.Random) -> Draft:
    """Asks to apply a patch whose paths have folders that are not here."""
    name, folder, *words = names(rng, 8)
    old = list(words)
    place = rng.randrange(1, 5)
    new = [*old[:place], f"new {rng.randrange(99)}", *old[place + 1 :]]
    hunk = [" " + x for x in old[:place]] + [f"-{old[place]}", f"+{new[place]}"]
    hunk += [" " + x for x in old[place + 1 :]]
    deep = f"build/{folder}"
    patch = [
        f"--- {deep}/old/src/{name}.txt",
        f"+++ {deep}/new/src/{name}.txt",
        f"@@ -1,{len(old)} +1,{len(new)} @@",
        *hunk,
    ]
    return Draft(
        instruction=(
            f"Apply change.patch to src/{name}.txt. It was made in another folder. No "
            f"other file may be left behind."
        ),
        files={
            f"src/{name}.txt": "\n".join(old) + "\n",
            "change.patch": "\n".join(patch) + "\n",
        },
        solution="patch -p3 < change.patch",
        wrong=(
            "patch -p1 < change.patch",
            "patch -R -p3 -f < change.patch",
            "patch -b -p3 < change.patch",
            f"cp change.patch src/{name}.txt",
        ),
        expects=(
            Expect(f"cat src/{name}.txt", "\n".join(new)),
            Expect(
                "find . -type f | LC_ALL=C sort", f"./change.patch\n./src/{name}.txt"
            ),
        ),
    )
