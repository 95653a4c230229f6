"""Lets pytest explain the assertions of the kit: it has to be told before they are imported."""

import pytest

CHECKED = (
    "backend",
    "cache_append",
    "cache_attention",
    "cache_bytes",
    "cache_exact",
    "cache_fork",
    "cache_input",
    "cache_paged",
    "cache_rollback",
    "cache_rows",
    "cache_snapshot",
    "fitted",
    "fitted_checks",
    "method_codec",
    "method_slots",
    "method_spec",
    "store",
    "store_entries",
    "store_limits",
    "store_machine",
)
"""Modules of the kit that assert."""

pytest.register_assert_rewrite(*(f"kvpact.testing.{name}" for name in CHECKED))
