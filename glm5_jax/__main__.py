"""Runs a command of the package: python -m glm5_jax COMMAND [FLAGS].

An installation has the same as `glm5_jax COMMAND [FLAGS]`. Without a command it lists
them; `COMMAND --help` explains one.
"""

import ast
import difflib
import pathlib
import runpy
import sys

COMMANDS = (
    *("train", "evaluate", "generate", "serve", "route", "orchestrate", "chat"),
    *("prepare", "convert", "quantize", "checkpoint", "serve_weights"),
    *("plan", "aot", "ablate", "pipeline", "environments", "episodes", "compare"),
)


def main() -> None:
    """Runs the command that the first argument names."""
    _, *arguments = sys.argv
    if not arguments or arguments[0] in ("--help", "-help", "-h", "help"):
        print(_listing())
        return
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        guess = f" Did you mean {near[0]}?" if near else ""
        sys.stderr.write(
            f"error: there is no command {name!r}.{guess} Commands: "
            f"{', '.join(COMMANDS)}.\n"
        )
        sys.exit(2)
    del sys.argv[1]
    runpy.run_module(f"glm5_jax.{name}", run_name="__main__", alter_sys=True)


def _listing() -> str:
    """Returns the commands with the first sentence of what each says of itself."""
    lines = ["glm5_jax COMMAND [FLAGS]", ""]
    lines += [f"  {name:<14}{_summary(name)}" for name in COMMANDS]
    lines += ["", "glm5_jax COMMAND --help explains its flags."]
    return "\n".join(lines)


def _summary(name: str) -> str:
    """Returns the first line of a command's docstring, without importing it."""
    path = pathlib.Path(__file__).parent / name
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


if __name__ == "__main__":
    main()
