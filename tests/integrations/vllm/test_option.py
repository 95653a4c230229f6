"""``--kv-cache-dtype kvpact`` in stand-ins of vLLM's arguments; `tests/engines` has real ones."""

import argparse
import os
import sys
from types import SimpleNamespace as Names

import pytest

from kvpact.errors import BackendUnavailable, SpecError
from kvpact.integrations.vllm import SETTING, option


class EngineArgs(Names):
    def create_engine_config(self, usage=None):
        return self.kv_cache_dtype, os.environ.get(SETTING)

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"])
        return parser


@pytest.mark.parametrize("own", ["auto", "kvpact"])  # what 0.32 and 0.33 see
def test_it_sets_the_variable_for_all_engines_after_it(monkeypatch, own):
    make, told = type("Args", (EngineArgs,), {}), []
    cached = Names(cache_clear=lambda: told.append("forgotten"))
    names = {"register_kv_cache_dtype": print} if own == "kvpact" else {}
    for name, held in {
        "": {}, ".config": {}, ".config.cache": names, ".engine.arg_utils": {"EngineArgs": make},
        ".v1.attention.selector": {"_cached_get_attn_backend": cached},
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, f"vllm{name}", Names(**held))
    monkeypatch.setenv(SETTING, "none")
    assert option.offer(lambda: told.append(os.environ[SETTING])) and not option.offer(print)
    parser = make.add_cli_args(argparse.ArgumentParser())
    asked = make(**vars(parser.parse_args(["--kv-cache-dtype", "kvpact"])))
    asked.kv_cache_dtype = "KVPact"  # out of Python, whose choices nobody checks before
    assert asked.create_engine_config() == (own, "none") and not told
    monkeypatch.setenv(SETTING, "")
    assert make(kv_cache_dtype="auto").create_engine_config() == ("auto", "")
    for _ in range(2):
        assert asked.create_engine_config(usage=1) == (own, "default")
        assert asked.kv_cache_dtype == "kvpact"
    assert told == ["", "forgotten", "default"]
    with pytest.raises(SpecError, match=r"'kvpact', after os.*SPEC'. = 'int:bits=4,sinks=0'"):
        make(kv_cache_dtype="kvpact:int:bits=4").create_engine_config()
    with pytest.raises(BackendUnavailable, match="give it to this one, too"):
        make(kv_cache_dtype="fp8").create_engine_config()
