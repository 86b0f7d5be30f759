"""What becomes of a box's command."""

import dataclasses

NO_OUTPUT = "(no output)"


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a command."""

    exit_code: int | None  # None: it did not end by itself
    stdout: str
    stderr: str
    is_timeout: bool  # the box's processes were ended; its files remain
    is_cut: bool  # a stream was longer than Limits.output_bytes
    seconds: float

    def text(self) -> str:
        """Returns what an agent reads: both streams, and how the command ended."""
        if self.is_timeout:
            ending = f"[stopped after {self.seconds:.0f} s; the shell is a new one]"
        elif self.exit_code is None:
            ending = "[the shell ended; the next command gets a new one]"
        else:
            ending = f"[exit code {self.exit_code}]" if self.exit_code else ""
        cut = "[output was cut]" if self.is_cut else ""
        parts = (self.stdout, self.stderr, cut, ending)
        return "\n".join(part.rstrip("\n") for part in parts if part) or NO_OUTPUT

    def reason(self) -> str:
        """Returns why the command did not do what it was to do."""
        if self.is_timeout:
            return f"it took more than {self.seconds:.0f} s"
        ended = "the shell ended" if self.exit_code is None else "it is too long"
        return self.stderr.strip() or ended
