"""Lets pytest explain the assertions of the kit: it has to be told before they are imported."""

import pytest

CHECKED = (
    "backend",
    "cache_append",
    "cache_attention",
    "cache_changes",
    "cache_input",
    "cache_paged",
    "fitted",
    "method",
    "method_codec",
    "method_slots",
    "store",
    "store_checks",
    "store_machine",
)
"""Modules of the kit that assert."""

pytest.register_assert_rewrite(*(f"kvpact.testing.{name}" for name in CHECKED))
