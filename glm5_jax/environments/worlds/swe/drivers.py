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
from glm5_jax.environments.worlds.swe import guarded_run, records, runners

ROOT = "repo"  # folder of the package below /work
CANARY = "canary_of_the_runner"
GUARDED = ("pytest", "unittest")  # guarded_run.py runs them
COMMAND = "command"  # the runner that runs what the recipe says
# Nothing steers Python, and sets have one order: tests of what is in a set are named by
# it. With -I Python would take neither.
_PLAIN = "env -u PYTHONPATH -u PYTHONHOME PYTHONHASHSEED=0"
_HOME = "/work/runner"
_TOKEN = f"{_HOME}/token"
_TESTS = "tests"  # the file that all tests of a runner of _TOGETHER are
_TOGETHER = ("junit", "go")
_JARS = "/usr/share/java/junit4.jar:/usr/share/java/hamcrest-core.jar"
# JUnit before the package, what else is installed behind it.
_CLASS_PATH = f"-cp {_JARS}:/tmp/classes:'/usr/share/java/*'"

# One test file; $file is its path, and the shell is in the package's folder.
_STEPS = {
    "perl": "perl $roots $file",
    "node": "node $file",
    "tape": "NODE_PATH=$tools/node_modules node $file",
    "node-test": "node --test --test-reporter=tap $file",
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
_PREPARE = {
    COMMAND: "given=$(cat $home/command.sh)",
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
_FILES = {"junit": "ListedRun.java", "phpunit": "autoload.php"}
_HOST = {"junit": "java-*-openjdk", "phpunit": "php"}  # in /etc
_PROGRAMS = {
    COMMAND: ("bash", "bash"),
    "perl": ("perl", "perl"),
    "node": ("node", "nodejs"),
    "tape": ("node", "nodejs"),
    "node-test": ("node", "nodejs"),
    "ruby": ("ruby", "ruby ruby-minitest ruby-test-unit"),
    "phpunit": ("phpunit", "phpunit"),
    "junit": ("javac", "default-jdk-headless junit4"),
    "go": ("go", "golang-go"),
    "c": ("cc", "gcc"),
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


def command(recipe: records.Recipe) -> str:
    """Returns the shell command that runs the tests and the canary."""
    files = " ".join(map(shlex.quote, recipe.files))
    if recipe.runner in GUARDED:
        tools = runners.folder("pytest") if recipe.runner == "pytest" else "-"
        return (
            f"cd /work/{ROOT} && {_PLAIN} {python()} -s {_HOME}/guarded_run.py "
            f"{recipe.runner} {_TOKEN} {tools} {':'.join(recipe.roots)} {files} 2>&1"
        )
    if recipe.runner in _TOGETHER:
        files = _TESTS
    canary = f"{_HOME}/{CANARY}{_ending(recipe)}"
    return f"cd /work/{ROOT} && bash {_HOME}/driver.sh {files} {canary} 2>&1"


def files(recipe: records.Recipe, token: str) -> Mapping[str, bytes]:
    """Returns the files that a run needs besides the package's, by path below /work.

    Args:
        recipe: how the tests run.
        token: that begins the lines of the driver.
    """
    found = {"token": token.encode()}
    if recipe.runner in GUARDED:
        found["guarded_run.py"] = pathlib.Path(guarded_run.__file__).read_bytes()
    else:
        found["driver.sh"] = _driver(recipe).encode()
        found[f"{CANARY}{_ending(recipe)}"] = recipe.canary.encode()
    for name in ("setup", COMMAND):
        if text := getattr(recipe, name):
            found[f"{name}.sh"] = text.encode()
    if name := _FILES.get(recipe.runner):
        path = pathlib.Path(__file__).parent / "runner" / name
        found[name] = path.read_bytes()
    return {f"{_HOME.removeprefix('/work/')}/{k}": v for k, v in found.items()}


@functools.cache
def edition() -> str:
    """Returns a digest of the programs that run tests and read their logs."""
    here = pathlib.Path(__file__).parent
    names = ("drivers.py", "guarded_run.py", "parsers.py", "runners.py", "trials.py")
    paths = [*(here / name for name in names), *sorted((here / "runner").iterdir())]
    texts = b"".join(path.read_bytes() for path in paths if path.is_file())
    return hashlib.sha256(texts).hexdigest()


def _driver(recipe: records.Recipe) -> str:
    prepare = [_PREPARE.get(recipe.runner, ":"), *([_SETUP] if recipe.setup else [])]
    prepare += [_OBJECTS] if recipe.sources else []
    words = {
        "token_file": _TOKEN,
        "home": _HOME,
        "step": _STEPS[recipe.runner],
        "prepare": "\n".join(prepare),
        "sources": " ".join(map(shlex.quote, recipe.sources)),
        "compiler": "cc" if recipe.runner == "c" else "c++",
        "roots": " ".join(f"-I{root}" for root in recipe.roots),
        "tools": str(runners.folder("tape")) if recipe.runner == "tape" else "",
        "module": recipe.roots[0],
        "folders": " ".join(map(shlex.quote, recipe.roots)),
        "resources": "src/main/resources src/test/resources",
        "classes": " ".join(_classes(recipe)),
        # A test may include a source file: its own definitions come first.
        "link": "-Wl,-z,muldefs /tmp/objects/all.a" if recipe.sources else "",
    }
    driver = _DRIVER
    for _ in range(2):  # steps have words too
        driver = re.sub(r"\$(\w+)", lambda match: words.get(match[1], match[0]), driver)
    return driver


def _ending(recipe: records.Recipe) -> str:
    """Returns the ending of a canary's name."""
    of_tests = pathlib.PurePosixPath(recipe.files[0]).suffix
    return _ENDINGS.get(recipe.runner, of_tests)


def _classes(recipe: records.Recipe) -> list[str]:
    """Returns the names of Java's test classes."""
    root = f"{recipe.roots[-1]}/"
    paths = [path.removeprefix(root).removesuffix(".java") for path in recipe.files]
    return [path.replace("/", ".") for path in paths]


def missing(recipe: records.Recipe) -> str:
    """Returns what this machine lacks to run a recipe's tests, "" if nothing."""
    program, package = _PROGRAMS.get(recipe.runner, ("python3", "python3"))
    if shutil.which(program, path="/usr/bin:/usr/local/bin"):
        return ""
    return f"{program} is not in /usr/bin; install {package}"


def binds(recipe: records.Recipe) -> tuple[pathlib.Path, ...]:
    """Returns the host's folders that a box reads besides /usr."""
    if recipe.runner in runners.PATHS:
        return (runners.folder(recipe.runner),)
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
