"""The scripts that run a package's tests in a box, by runner.

A driver runs each file of tests in a process of its own and says with what code it
ended; the last file is the canary, which must fail. Lines of its own begin with a token
that is removed before anything of the package runs. Java's and Go's tests are compiled
once and run together, as if they were one file.
"""

import functools
import hashlib
import pathlib
import re
import shlex
import shutil
from collections.abc import Mapping

from glm5_jax import config
from glm5_jax.environments.worlds.swe import (
    guarded_run,
    parsers,
    records,
    runners,
)

ROOT = "repo"  # folder of the package below /work
CANARY = parsers.CANARY
GUARDED = ("pytest", "unittest")  # guarded_run.py runs them
COMMAND = "command"  # the runner that runs what the recipe says
# Nothing steers Python, and sets have one order: tests of what is in a set are named by
# it. With -I Python would take neither.
_PLAIN = "env -u PYTHONPATH -u PYTHONHOME PYTHONHASHSEED=0"
HOME = "/work/runner"
_TOKEN = f"{HOME}/token"
_TESTS = "tests"  # the file that all tests of a runner of _TOGETHER are
_TOGETHER = ("junit", "go")
_JARS = ("/usr/share/java/junit4.jar", "/usr/share/java/hamcrest-core.jar")
# JUnit before the package, what else is installed behind it.
_CLASS_PATH = f"-cp {':'.join(_JARS)}:/tmp/classes:'/usr/share/java/*'"

# What TypeScript is loaded by.
_HOOKS = "--import file://$tools/node_modules/tsx/dist/loader.mjs"
# One test file; $file is its path, and the shell is in the package's folder.
_STEPS = {
    "perl": "perl $roots $file",
    "node": "node $hooks $file",
    "tape": "NODE_PATH=$tools/node_modules node $hooks $file",
    "node-test": "node $hooks --test --test-reporter=tap $file",
    "mocha": "node $hooks $tools/node_modules/mocha/bin/_mocha --exit --no-config "
    "--no-package --ui $home/mocha_ui.cjs --reporter $home/mocha_tap.cjs "
    "$file",
    "ruby": "ruby $roots $file -v",
    "phpunit": "phpunit --no-configuration --colors=never --testdox "
    "--bootstrap $home/autoload.php $file",
    "junit": f"case $file in ({_TESTS}) c='$classes';; (*) c={CANARY};; esac\n"
    "java -Xmx512m -Xss1m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 "
    f"{_CLASS_PATH} ListedRun $c",
    "go": f"case $file in ({_TESTS}) cd /tmp/go/src/$module;; "
    f"(*) cd /tmp/go/src/{CANARY};; esac\ngo test -v -vet=off -p 1 ./...",
    COMMAND: 'file=$file bash -c "$given"',
    "c": "cc -w -g -O0 $roots $file $link -lm -o /tmp/t && /tmp/t",
    "c++": "c++ -w -g -O0 $roots $file $link -lm -o /tmp/t && /tmp/t",
}
_OBJECTS = """mkdir -p /tmp/objects; n=0
for s in $sources; do n=$((n+1)); $compiler -w -g -O0 $roots -c $s \
-o /tmp/objects/$n.o || exit 1; done; ar rcs /tmp/objects/all.a /tmp/objects/*.o"""
# Packages are looked for above the package's folder too, also by `import`.
_LINK = "ln -sfn $tools/node_modules /work/node_modules"
_PREPARE = {
    COMMAND: "given=$(cat $home/command.sh)",
    "mocha": _LINK,
    "junit": f"""mkdir -p /tmp/classes
find $folders $home -name '*.java' ! -name '*-info.java' > /tmp/sources
javac -J-Xmx512m -J-XX:+UseSerialGC -J-XX:TieredStopAtLevel=1 \
-proc:none -nowarn -encoding UTF-8 {_CLASS_PATH} -d /tmp/classes @/tmp/sources \
2>&1 || exit 1
for d in $folders $resources; do test -d $d && ( cd $d && find . -type f \
! -name '*.java' -exec cp --parents {{}} /tmp/classes/ ';' ); done""",
    "go": f"""export GOPATH=/tmp/go:/usr/share/gocode GO111MODULE=off GOPROXY=off \
GOCACHE=/tmp/gocache CGO_ENABLED=0
mkdir -p /tmp/go/src/$module /tmp/go/src/{CANARY}
cp -r . /tmp/go/src/$module; cp $home/*_test.go /tmp/go/src/{CANARY}""",
}
# A recipe's own commands before the tests, which they must leave as they are; what they
# print is told if they fail.
_SETUP = """tests=$(cat "$@" | sha256sum)
bash $home/setup.sh </dev/null >/tmp/setup 2>&1 || { cat /tmp/setup; exit 1; }
[ "$tests" = "$(cat "$@" | sha256sum)" ] || exit 1"""
_ENDINGS = {
    "perl": ".t",
    "node": ".js",
    "tape": ".js",
    "node-test": ".js",
    "mocha": ".mjs",
    "ruby": ".rb",
    "phpunit": ".php",
    "junit": ".java",
    "go": "_test.go",
    "c": ".c",
    "c++": ".cpp",
}
RUNNERS = (*GUARDED, *_STEPS)
# Files of runner/ that a box gets, folders of the host that it sees, and what Debian
# calls the package of a program.
_FILES = {
    "junit": ("ListedRun.java",),
    "phpunit": ("autoload.php",),
    "mocha": ("mocha_ui.cjs", "mocha_tap.cjs"),
}
_INSTALLED = {"junit": _JARS}  # files of the host, besides the program
_HOST = {"junit": "java-*-openjdk", "phpunit": "php"}  # in /etc
_PYTHON = ("python3", "python3")
_PROGRAMS = {
    COMMAND: ("bash", "bash"),
    "perl": ("perl", "perl"),
    "node": ("node", "nodejs"),
    "tape": ("node", "nodejs"),
    "node-test": ("node", "nodejs"),
    "mocha": ("node", "nodejs"),
    "ruby": ("ruby", "ruby ruby-minitest ruby-test-unit"),
    "phpunit": ("phpunit", "phpunit"),
    "junit": ("javac", "default-jdk-headless junit4"),
    "go": ("go", "golang-go"),
    "c": ("cc", "gcc libc6-dev"),
    "c++": ("c++", "g++"),
}
# Everything is read before anything runs, so that no test can change the rest.
_DRIVER = """main() {
token=$(cat $token_file); rm -f $token_file
$prepare
for file in "$@"; do
printf '%s FILE %s\\n' "$token" "$file"
( $step ) 2>&1 </dev/null
printf '\\n%s EXIT %s\\n' "$token" "$?"
done
printf '%s DONE\\n' "$token"
}; main "$@"; exit
"""


def command(recipe: records.Recipe, tools: str = "") -> str:
    """Returns the shell command that runs the tests and the canary.

    Args:
        recipe: how the tests run.
        tools: folder of the test runner; "": that of this process.
    """
    files = " ".join(map(shlex.quote, recipe.files))
    if recipe.runner in GUARDED:
        tools = _tools(recipe, tools)
        return (
            f"cd /work/{ROOT} && {_PLAIN} {python()} -s {HOME}/guarded_run.py "
            f"{recipe.runner} {_TOKEN} {tools} {':'.join(recipe.roots)} {files} 2>&1"
        )
    if recipe.runner in _TOGETHER:
        files = _TESTS
    canary = f"{HOME}/{CANARY}{_ending(recipe)}"
    return f"cd /work/{ROOT} && bash {HOME}/driver.sh {files} {canary} 2>&1"


def files(recipe: records.Recipe, token: str, tools: str = "") -> Mapping[str, bytes]:
    """Returns the files that a run needs besides the package's, by path below /work.

    Args:
        recipe: how the tests run.
        token: that begins the lines of the driver.
        tools: folder of the test runner; "": that of this process.
    """
    found = {"token": token.encode()}
    if recipe.runner in GUARDED:
        found["guarded_run.py"] = pathlib.Path(guarded_run.__file__).read_bytes()
    else:
        found["driver.sh"] = _driver(recipe, tools).encode()
        found[f"{CANARY}{_ending(recipe)}"] = recipe.canary.encode()
    for name in ("setup", COMMAND):
        if text := getattr(recipe, name):
            found[f"{name}.sh"] = text.encode()
    for name in _FILES.get(recipe.runner, ()):
        path = pathlib.Path(__file__).parent / "runner" / name
        found[name] = path.read_bytes()
    return {f"{HOME.removeprefix('/work/')}/{k}": v for k, v in found.items()}


@functools.cache
def edition() -> str:
    """Returns a digest of the programs that run tests and read their logs."""
    here = pathlib.Path(__file__).parent
    names = ("drivers.py", "guarded_run.py", "parsers.py", "runners.py", "trials.py")
    paths = [*(here / name for name in names), *sorted((here / "runner").iterdir())]
    texts = b"".join(path.read_bytes() for path in paths if path.is_file())
    return hashlib.sha256(texts).hexdigest()


def _driver(recipe: records.Recipe, tools: str) -> str:
    is_typed = runners.is_typed(recipe)
    prepare = [_LINK if is_typed else _PREPARE.get(recipe.runner, ":")]
    prepare += [_SETUP] if recipe.setup else []
    prepare += [_OBJECTS] if recipe.sources else []
    words = {
        "token_file": _TOKEN,
        "home": HOME,
        "step": _STEPS[recipe.runner],
        "prepare": "\n".join(prepare),
        "sources": " ".join(map(shlex.quote, recipe.sources)),
        "compiler": "cc" if recipe.runner == "c" else "c++",
        "roots": " ".join(f"-I{root}" for root in recipe.roots),
        "tools": _tools(recipe, tools),
        "hooks": _HOOKS if is_typed else "",
        "module": recipe.roots[0],
        "folders": " ".join(map(shlex.quote, recipe.roots)),
        "resources": "src/main/resources src/test/resources",
        "classes": " ".join(_classes(recipe)),
        # A test may include a source file: its own definitions come first.
        "link": "-Wl,-z,muldefs /tmp/objects/all.a" if recipe.sources else "",
    }
    driver = _DRIVER
    for _ in range(3):  # steps have words too, and words of theirs
        driver = re.sub(r"\$(\w+)", lambda match: words.get(match[1], match[0]), driver)
    return driver


def _tools(recipe: records.Recipe, tools: str) -> str:
    """Returns the folder of the test runner, "-" if it needs none."""
    name = runners.name(recipe)
    return (tools or str(runners.folder(name))) if name else "-"


def _ending(recipe: records.Recipe) -> str:
    """Returns the ending of a canary's name."""
    of_tests = pathlib.PurePosixPath(recipe.files[0]).suffix
    known = ".mts" if runners.is_typed(recipe) else _ENDINGS.get(recipe.runner)
    return known or of_tests


def _classes(recipe: records.Recipe) -> list[str]:
    """Returns the names of Java's test classes."""
    root = f"{recipe.roots[-1]}/"
    paths = [path.removeprefix(root).removesuffix(".java") for path in recipe.files]
    return [path.replace("/", ".") for path in paths]


def missing(recipe: records.Recipe) -> str:
    """Returns what this machine lacks to run a recipe's tests, "" if nothing."""
    program, _ = _PROGRAMS.get(recipe.runner, _PYTHON)
    if not shutil.which(program, path="/usr/bin:/usr/local/bin"):
        return f"{program} is not in /usr/bin; install {packages(recipe)}"
    for path in _INSTALLED.get(recipe.runner, ()):
        if not pathlib.Path(path).exists():
            return f"{path} is missing; install {packages(recipe)}"
    return ""


def packages(recipe: records.Recipe) -> str:
    """Returns the names of Debian's packages that a recipe's tests need."""
    return _PROGRAMS.get(recipe.runner, _PYTHON)[1]


def binds(recipe: records.Recipe) -> tuple[pathlib.Path, ...]:
    """Returns the host's folders that a box reads besides /usr."""
    if name := runners.name(recipe):
        return (runners.folder(name),)
    return _host_folders(recipe.runner)


@functools.cache
def _host_folders(runner: str) -> tuple[pathlib.Path, ...]:
    name = _HOST.get(runner)
    return tuple(sorted(pathlib.Path("/etc").glob(name))) if name else ()


@functools.cache
def python() -> str:
    """Returns the Python that runs in the sandbox.

    Raises:
        config.InputError: there is none in /usr, which is all that a box sees.
    """
    if found := shutil.which("python3", path="/usr/bin:/usr/local/bin"):
        return found
    raise config.InputError("there is no python3 in /usr/bin; install python3.")
