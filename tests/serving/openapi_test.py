"""schemathesis against every route of the server's own OpenAPI description.

    pip install -e ".[test,fuzz]"
    python -m pytest -m slow tests/serving/openapi_test.py

tests/serving/hostile_test.py, in the default set, changes right bodies instead, and so
comes further into the server.
"""

import collections

import hypothesis
import pytest

from tests import environment
from tests.serving import scripted

THOROUGH = hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
NO_FAILURE = set(range(200, 500))


class OpenApiTest(scripted.ServerTest):
    @pytest.mark.slow
    # schemathesis's strategies draw with `random`, which newer hypothesis tells.
    @pytest.mark.filterwarnings("ignore:Do not use the `random` module")
    def test_no_route_fails(self):
        """A minute."""
        import schemathesis

        key = {"Authorization": f"Bearer {scripted.KEY}"}
        schema = schemathesis.openapi.from_url(f"{self.url}/openapi.json", headers=key)
        found = collections.Counter()
        for operation in schema.get_all_operations():
            route = operation.ok()

            @THOROUGH
            @hypothesis.given(case=route.as_strategy())
            def run(case):
                answer = case.call(headers=key, timeout=60)
                found[case.path] += 1
                self.assertIn(answer.status_code, NO_FAILURE, answer.text)

            run()
            self.service.resume().result()
        self.assertContainsSubset(
            {"/v1/chat/completions", "/inference/v1/generate", "/tokenize"}, found
        )


if __name__ == "__main__":
    environment.main()
