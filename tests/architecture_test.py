"""The shape of the code base, checked like any other behaviour."""

import ast
import functools
import graphlib
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

import jaxtyping
from absl.testing import absltest

from glm5_jax import shapes
from glm5_jax.config import stages
from tests import environment

ROOT = pathlib.Path(__file__).parent.parent
ENTRY_POINTS = {
    "train",
    "generate",
    "evaluate",
    "convert",
    "chat",
    "aot",
    "plan",
    "prepare",
    "ablate",
    "pipeline",
    "serve",
    "serve_weights",
    "route",
    "quantize",
    "orchestrate",
    "episodes",
    "compare",
}
# Imports point downwards; names of one row never import each other.
LAYERS = (
    {"__main__"},
    ENTRY_POINTS | {"api"},
    {"scale", "ablations", "recipes"},
    {"training", "serving"},
    {"rl", "evals"},
    {"inference"},
    {"weights"},
    {"model", "optim", "data", "losses", "checkpoint"},
    {"quantization"},
    {"collectives", "environments", "storage"},
    {"sharding", "processes", "messages", "anthropic_form", "http_server"},
    {
        "api_key",
        "command_line",
        "compile_cache",
        "quantize_flag",
        "depth",
        "mesh",
        "presets",
        "shapes",
    },
    {"config", "backends", "files", "intervals"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
KERNEL_IMPORTS = {"jax", "jaxtyping", "ml_dtypes", "numpy", "pallas_kernels"}
TRITON_IMPORTS = {"jax_triton", "torch", "triton"}  # of files for GPUs alone
TRITON_FILES = {"aot", "gpu", "triton"}  # by the first word of their names
# An environment knows messages, and neither tokens nor models; some answer by HTTP.
ENVIRONMENT_IMPORTS = {"messages", "config", "environments", "api_key", "http_server"}
_TOKENS = ({"sources", "tokenizer"}, {"lossless"})
DATA_LAYERS = ({"preparation"}, {"rows"}, {"chat"}, *_TOKENS)
DATA_RANK = {name: rank for rank, layer in enumerate(DATA_LAYERS) for name in layer}
CONFIG_IMPORTS = {"glm5_jax.config", "glm5_jax.presets", "glm5_jax.command_line"}

MAX_FILE_LINES = {
    "glm5_jax": 400,
    "pallas_kernels": 450,
    "configs": 60,
    "benchmarks": 400,
    "launch": 400,
}
MAX_ENTRY_POINT_LINES = 90
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 10
MAX_TRITON_POINTERS = 13  # a Triton kernel gets every array by itself: no tuples
MAX_COLUMNS = 88
# 170 of a run and 15 of prepare, of which 49 are the model's, as Hugging Face has them,
# 5 choose attention variants and their sizes, and
# 5 follow the tokens of a run.
# The suites of evaluations take 3, quantization-aware training takes 1.
# The objective of multi-token prediction takes 1, its training and use in RL take 2;
# pages of rollouts 1. Asynchronous RL takes 2. The cache's number type takes 1.
# The episodes that a run keeps take 1, forgetting the moments of a step takes 1.
# The terms that keep a policy near another one or random take 3, packed episodes 1.
# Servers of others take 2, with the folder of their weights. A critic takes 6,
# teachers 1. Copies on hosts take 2. Limits of an answer and of an episode take 2, and
# reading again what older weights have read 1, an evaluation beside the training 2,
# the bounds of a mixture's parts 1.
# Rewards for junk take 2: what is done, and how often the environment is asked.
MAX_CONFIG_FIELDS = 214
VAGUE_NAMES = {"utils", "util", "common", "helpers", "misc"}


@functools.cache
def _files(*folders: str) -> list[tuple[str, pathlib.Path]]:
    paths = [
        path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return [(str(path.relative_to(ROOT)), path) for path in paths]


@functools.cache
def _nodes(path: pathlib.Path) -> tuple[ast.AST, ...]:
    """The nodes of a file, the module first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def tearDownModule():
    _nodes.cache_clear()


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _runs(node: ast.stmt) -> bool:
    """Returns whether a statement of a module runs as the module is imported."""
    is_for_types = (
        isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return not is_for_types and not isinstance(node, ast.FunctionDef)


def _modules() -> dict[str, pathlib.Path]:
    """Files of the packages by the name that imports give them."""
    return {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for name, path in _files("glm5_jax", "pallas_kernels")
    }


def _edges() -> Iterator[tuple[str, str]]:
    """Modules of the packages, and those that they import, also inside functions."""
    modules = _modules()
    for name, path in modules.items():
        for imported in _imports(_nodes(path)):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules and target != name:
                yield name, target


def _acyclic(edges: Iterable[tuple[str, str]]) -> None:
    """Raises CycleError, which names a cycle."""
    graph = graphlib.TopologicalSorter()
    for name, target in edges:
        graph.add(name, target)
    graph.prepare()


def _functions(
    nodes: Iterable[ast.AST],
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _is_compile_time(argument: ast.arg) -> bool:
    """A Triton kernel's sizes, which are parameters of its template."""
    kind = argument.annotation
    names = ("tl.constexpr", "gl.constexpr")
    return isinstance(kind, ast.Attribute) and ast.unparse(kind) in names


def _public(tree: ast.Module) -> Iterator[ast.AST]:
    """The module, its public classes and functions, and their public methods."""
    scopes = [tree]
    while scopes:
        scope = scopes.pop()
        yield scope
        scopes += [
            node
            for node in getattr(scope, "body", [])
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
        ]


class ImportsTest(absltest.TestCase):
    def test_package_imports_point_downwards(self):
        parts = {
            path: path.relative_to(ROOT / "glm5_jax").with_suffix("").parts[0]
            for _, path in _files("glm5_jax")
        }
        unknown = {*parts.values()} - {*RANK, "__init__"}
        self.assertEmpty(unknown, "DESIGN gives every module a layer; add it to LAYERS")
        bad = []
        for path, here in parts.items():
            if here == "__init__":
                continue  # test_the_package_alone_imports_nothing
            for name in _imports(_nodes(path)):
                head, *tail = name.split(".")
                is_ours = head == "glm5_jax" and tail and tail[0] != here
                if head == "tests" or (is_ours and RANK[tail[0]] <= RANK[here]):
                    bad.append((str(path), name))
        self.assertEmpty(bad)

    def test_the_package_alone_imports_nothing(self):
        """`import glm5_jax` takes no time: the face, and jax, come when it is used."""
        nodes = _nodes(ROOT / "glm5_jax" / "__init__.py")
        at_once = ast.walk(ast.Module([n for n in nodes[0].body if _runs(n)], []))
        self.assertEqual(set(_imports(at_once)), {"typing.TYPE_CHECKING", "typing.Any"})
        late = {i for i in _imports(nodes) if i.startswith("glm5_jax.")}
        self.assertEqual({".".join(i.split(".")[:2]) for i in late}, {"glm5_jax.api"})

    def test_environments_know_messages_only(self):
        for file, path in _files("glm5_jax/environments"):
            names = [name.split(".") for name in _imports(_nodes(path))]
            # The package alone, which imports nothing, knows its version.
            ours = {name[1] for name in names if name[:1] == ["glm5_jax"] != name}
            entry = {"command_line"} if path.name == "__main__.py" else set()
            self.assertEmpty(ours - ENVIRONMENT_IMPORTS - entry, file)
            self.assertEmpty({"jax", "tokenizers"} & {name[0] for name in names}, file)

    def test_folders_of_data_import_downwards(self):
        for file, path in _files("glm5_jax/data"):
            here = path.relative_to(ROOT / "glm5_jax/data").with_suffix("").parts[0]
            for name in _imports(_nodes(path)):
                package, folder, *rest = [*name.split("."), "", ""]
                if (package, folder) == ("glm5_jax", "data") and rest[0] != here:
                    ranks = DATA_RANK[rest[0]], DATA_RANK[here]
                    self.assertGreater(*ranks, f"{file} imports {name}")

    def test_kernels_import_jax_only(self):
        for file, path in _files("pallas_kernels"):
            heads = {name.partition(".")[0] for name in _imports(_nodes(path))}
            allowed = KERNEL_IMPORTS | sys.stdlib_module_names
            if path.stem.split("_")[0] in TRITON_FILES:
                allowed |= TRITON_IMPORTS
            if path.stem == "plot":
                allowed |= {"matplotlib"}
            self.assertEmpty(heads - allowed, file)

    def test_no_modules_import_each_other(self):
        _acyclic(_edges())

    def test_no_parts_of_a_folder_import_each_other(self):
        """A part is a file, or a folder with all that it holds."""
        between: dict[str, set[tuple[str, str]]] = {}
        for name, target in _edges():
            ours, theirs = name.split("."), target.split(".")
            pairs = enumerate(zip(ours, theirs, strict=False))
            depth = next((i for i, (a, b) in pairs if a != b), 0)
            if depth:  # else one is the folder of the other
                folder = ".".join(ours[:depth])
                between.setdefault(folder, set()).add((ours[depth], theirs[depth]))
        self.assertContainsSubset({"glm5_jax", "glm5_jax.scale"}, between)
        for edges in between.values():
            _acyclic(edges)

    def test_configs_import_the_schema_only(self):
        for name, path in _files("configs"):
            imported = {i for i in _imports(_nodes(path)) if i.startswith("glm5_jax")}
            self.assertEmpty(imported - CONFIG_IMPORTS, name)

    def test_modules_are_linen_and_imports_absolute(self):
        for name, path in _files("glm5_jax", "pallas_kernels", "configs", "tests"):
            nodes = _nodes(path)
            imports = set(_imports(nodes))
            nnx = {i for i in imports if i.startswith("flax.nnx")}
            self.assertEmpty(nnx, name)
            self.assertNotIn("__future__.annotations", imports, name)
            levels = [n.level for n in nodes if isinstance(n, ast.ImportFrom)]
            self.assertEqual(sum(levels), 0, f"{name} has relative imports")


class BudgetTest(absltest.TestCase):
    def test_files_stay_short(self):
        for name, path in _files(*MAX_FILE_LINES):
            package, *rest = path.relative_to(ROOT).with_suffix("").parts
            is_entry_point = package == "glm5_jax" and (
                rest[0] in ENTRY_POINTS or rest[-1] == "__main__"
            )
            limit = MAX_ENTRY_POINT_LINES if is_entry_point else MAX_FILE_LINES[package]
            count = path.read_text(encoding="utf-8").count("\n")
            self.assertLessEqual(count, limit, name)

    def test_functions_stay_short(self):
        for name, path in _files(*MAX_FILE_LINES):
            for function in _functions(_nodes(path)):
                where = name, function.name
                length = function.end_lineno - function.lineno + 1
                self.assertLessEqual(length, MAX_FUNCTION_LINES, where)
                given = function.args
                arguments = given.posonlyargs + given.args + given.kwonlyargs
                counted = [a for a in arguments if not _is_compile_time(a)]
                decorators = {*map(ast.unparse, function.decorator_list)}
                is_triton = not decorators.isdisjoint(("triton.jit", "gluon.jit"))
                limit = MAX_TRITON_POINTERS if is_triton else MAX_ARGUMENTS
                self.assertLessEqual(len(counted), limit, where)

    def test_lines_fit(self):
        for name, path in _files(*MAX_FILE_LINES, "tests"):
            lines = path.read_text(encoding="utf-8").splitlines()
            long = [i for i, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]
            self.assertEmpty(long, f"too long lines in {name}")


class ConfigFieldsTest(absltest.TestCase):
    """The settings of a run: few, and none that nobody reads."""

    def test_their_number_is_bounded(self):
        fields = [name for section in _sections().values() for name in section]
        self.assertLessEqual(len(fields), MAX_CONFIG_FIELDS)

    def test_every_one_is_read_outside_of_the_config(self):
        """By name; a property that is read counts for the fields that it reads."""
        read = set()
        for name, path in _files("glm5_jax"):
            if not name.startswith("glm5_jax/config/"):
                nodes = _nodes(path)
                read |= _attributes(nodes)
                read |= {
                    node.value
                    for node in nodes
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                }
        methods = {}
        for _, path in _files("glm5_jax/config"):
            for function in _functions(_nodes(path)):
                if not function.name.startswith("__"):
                    methods[function.name] = _attributes(ast.walk(function))
        reached = set()
        while found := (read & set(methods)) - reached:
            reached |= found
            read |= set().union(*(methods[name] for name in found))
        for section, fields in _sections().items():
            self.assertEmpty(fields - read, section)


def _sections() -> dict[str, set[str]]:
    """The fields of each dataclass of glm5_jax/config that are not sections."""
    sections = {}
    for name, path in _files("glm5_jax/config"):
        if name.startswith("glm5_jax/config/stages/"):  # no settings: facts
            continue
        for node in _nodes(path)[0].body:
            if isinstance(node, ast.ClassDef) and node.decorator_list:
                sections[node.name] = {
                    field.target.id: ast.unparse(field.annotation)
                    for field in node.body
                    if isinstance(field, ast.AnnAssign)
                }
    return {
        name: {field for field, kind in fields.items() if kind not in sections}
        for name, fields in sections.items()
    }


def _attributes(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of the attributes that a piece of code reads."""
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


class StagesTest(absltest.TestCase):
    def test_records_alone_know_the_stages_by_name(self):
        """Other code asks config.stage_record, so that a new stage is a new file."""
        names = {stage.name for stage in stages.STAGES}
        for file, path in _files("glm5_jax"):
            if (ROOT / "glm5_jax" / "config" / "stages") in path.parents:
                continue
            for node in _nodes(path):
                if isinstance(node, ast.Compare):
                    sides = [node.left, *node.comparators]
                elif isinstance(node, ast.Match):
                    sides = [node.subject, *(case.pattern for case in node.cases)]
                else:
                    continue
                for part in (part for side in sides for part in ast.walk(side)):
                    value = part.value if isinstance(part, ast.Constant) else None
                    is_named = isinstance(value, str) and value in names
                    self.assertFalse(is_named, f"{file}:{node.lineno} asks for {value}")


def _dims(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and name of every dim in an array's type."""
    for node in nodes:
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
            continue
        *_, dims = node.slice.elts
        if not isinstance(dims, ast.Constant):
            continue
        kind = ast.unparse(node.value).removeprefix("jaxtyping.")
        if hasattr(jaxtyping, kind):
            yield from ((node.lineno, name) for name in dims.value.split())


class ShapesTest(absltest.TestCase):
    def test_every_dim_is_in_the_alphabet_or_a_word(self):
        """A word has three letters or more, so that no letter is without an entry."""
        for file, path in _files("glm5_jax", "pallas_kernels"):
            for line, name in _dims(_nodes(path)):
                names = re.findall(r"[A-Za-z]\w*", name)
                unknown = [x for x in names if x not in shapes.ALPHABET and len(x) < 3]
                self.assertEmpty(unknown, f"{file}:{line}: {name}")


class CallsTest(absltest.TestCase):
    def test_no_call_spreads_a_tuple_that_it_writes_itself(self):
        """f(*(a, b)) says less than f(a, b) and only saves lines."""
        for name, path in _files(*MAX_FILE_LINES, "colab", "tests"):
            lines = [
                argument.lineno
                for node in _nodes(path)
                if isinstance(node, ast.Call)
                for argument in node.args
                if isinstance(argument, ast.Starred)
                and isinstance(argument.value, ast.Tuple | ast.List)
            ]
            self.assertEmpty(lines, f"lines of {name}")


class MarksTest(absltest.TestCase):
    def test_marks_stand_below_parameters(self):
        """Above them they are lost: absl makes the cases of the function alone."""
        for name, path in _files("tests"):
            for function in _functions(_nodes(path)):
                words = map(ast.unparse, function.decorator_list)
                kinds = [w.split(".")[0] for w in words if "." in w]
                marks = [i for i, kind in enumerate(kinds) if kind == "pytest"]
                cases = [i for i, kind in enumerate(kinds) if kind == "parameterized"]
                if marks and cases:
                    self.assertGreater(min(marks), max(cases), (name, function.name))


class NamesTest(absltest.TestCase):
    def test_no_file_is_a_rag_bag(self):
        for name, path in _files(*MAX_FILE_LINES, "tests"):
            words = set(
                "_".join(path.relative_to(ROOT).with_suffix("").parts).split("_")
            )
            self.assertEmpty(words & VAGUE_NAMES, name)

    def test_tests_mirror_the_tree(self):
        for name, path in _files("tests"):
            part = path.relative_to(ROOT / "tests")
            if part.name.endswith("_test.py") and len(part.parts) > 1:
                folder = part.parent
                self.assertTrue(
                    any((root / folder).is_dir() for root in (ROOT, ROOT / "glm5_jax")),
                    f"{name}: there is no {folder}/ to test",
                )

    def test_public_names_have_docstrings(self):
        for file, path in _files(*MAX_FILE_LINES):
            tree = _nodes(path)[0]
            bare = [
                getattr(node, "name", "the module")
                for node in _public(tree)
                if ast.get_docstring(node) is None
            ]
            if path.name == "__init__.py" and not tree.body:
                bare = []
            self.assertEmpty(bare, file)


if __name__ == "__main__":
    environment.main()
