"""Random cases: some in `make test`, more in `make test-slow`; and random histories of caches."""

import pytest
from hypothesis import HealthCheck, given, settings

HISTORIES = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
"""Of histories that are the same in every run, however long each takes."""
times = pytest.mark.parametrize("times", (1, pytest.param(8, marks=pytest.mark.slow)))


def random_cases(examples, *arguments):
    """Let a function that checks a case be a test of so many random ones; of more, where slow."""

    def decorate(check):
        @times
        def test(times):
            settings(max_examples=times * examples, deadline=None)(given(*arguments)(check))()

        return test

    return decorate


def run_histories(machine, steps, examples, **members):
    """Run so many histories, of so many steps, of a state machine with members of its own."""
    case = type("Machine", (machine,), members).TestCase
    case.settings = settings(HISTORIES, stateful_step_count=steps, max_examples=examples)
    case("runTest").runTest()
