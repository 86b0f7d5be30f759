"""glm5_jax.train with an engine that compiles all of its programs before it draws.

Takes the flags of glm5_jax.train. An engine compiles a program when it first meets a
number of rows and a length, which may be late in a run; where time is measured, that
would count.
"""

from glm5_jax import command_line, train
from glm5_jax.inference import engine as engine_lib
from glm5_jax.processes import interrupts


class Warmed(engine_lib.Engine):
    """An engine that compiles nothing after its first request."""

    _is_warm = False

    def submit(self, request: engine_lib.Request) -> engine_lib.Completion:
        """Compiles all programs, in the thread that will run them; then submits."""
        if not self._is_warm:
            self._is_warm = True
            self.warm_up()
        return super().submit(request)


if __name__ == "__main__":
    engine_lib.Engine = Warmed
    command_line.run(train.main, interrupted=interrupts.EXIT_TERMINATED)
