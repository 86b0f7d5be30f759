"""Compares expressions by math-verify, a JSON line each; a process of its own.

symbolic.py starts and ends it: sympy may take minutes and gigabytes over a short text.
"""

import json
import resource
import sys

import math_verify

_MEMORY_BYTES = 2**31


def main() -> None:
    """Answers "true" or "false" to each line of a reference and a text."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        reference, given = json.loads(line)
        right = math_verify.parse(f"${reference}$", parsing_timeout=0)
        said = math_verify.parse(given, parsing_timeout=0)
        # Without a reading of the reference, verify would compare nothing.
        is_equal = bool(right and said) and math_verify.verify(
            right, said, timeout_seconds=None
        )
        sys.stdout.write(f"{json.dumps(bool(is_equal))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
