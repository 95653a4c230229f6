"""Random cases of kernels: some in `make test`, eight times as many in `make test-slow`."""

import pytest
from hypothesis import given, settings

times = pytest.mark.parametrize("times", (1, pytest.param(8, marks=pytest.mark.slow)))


def random_cases(examples, *arguments):
    """Let a function that checks a case be a test of so many random ones; of more, where slow."""

    def decorate(check):
        @times
        def test(times):
            settings(max_examples=times * examples, deadline=None)(given(*arguments)(check))()

        return test

    return decorate
