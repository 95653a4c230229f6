"""The option ``--kv-cache-dtype kvpact``: kvpact's pages without a variable.

vLLM asks for a page's format in every process, outside of a configuration. So where arguments
become one, the option sets the variable, which processes inherit that are started from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from kvpact.errors import BackendUnavailable, SpecError
from kvpact.integrations.vllm.dtype import DTYPE
from kvpact.integrations.vllm.setting import DEFAULT, SETTING, served
from kvpact.spec import is_spec, parse_spec

_MARK = "kvpact_asked"


def offer(register: Callable[[], None]) -> bool:
    """Let vLLM's arguments, where they are, take the option; return whether that is new."""
    arguments: Any = getattr(sys.modules.get("vllm.engine.arg_utils"), "EngineArgs", None)
    if arguments is None or hasattr(arguments, _MARK):
        return False
    make, add = arguments.create_engine_config, arguments.add_cli_args

    def create(self: Any, *given: Any, **named: Any) -> Any:
        asked = str(self.kv_cache_dtype).lower() == DTYPE
        text = str(self.kv_cache_dtype).removeprefix(f"{DTYPE}:")
        if ":" in text and is_spec(text):
            text = str(parse_spec(text).with_options(sinks=0))
            line = f"kv_cache_dtype={DTYPE!r}, after os.environ[{SETTING!r}] = {text!r}"
            raise SpecError(f"a spec is no kv_cache_dtype; write: {line}")
        if getattr(arguments, _MARK) and not asked:
            raise BackendUnavailable(
                f"this process has started an engine with kv_cache_dtype={DTYPE!r}, and all after "
                "it have such pages: give it to this one, too, or start another process"
            )
        if served() is None:
            if asked:
                os.environ[SETTING] = DEFAULT
                setattr(arguments, _MARK, True)
                if chosen := cast(Any, sys.modules.get("vllm.v1.attention.selector")):
                    chosen._cached_get_attn_backend.cache_clear()  # for an engine before this one
            register()
        try:
            if asked:  # 0.32 takes no names, and its pages are the same
                names = hasattr(import_module("vllm.config.cache"), "register_kv_cache_dtype")
                self.kv_cache_dtype = DTYPE if names else "auto"
            return make(self, *given, **named)
        finally:
            self.kv_cache_dtype = DTYPE if asked else self.kv_cache_dtype

    def add_options(parser: Any, *given: Any, **named: Any) -> Any:
        parser = add(parser, *given, **named)
        for option in parser._actions:
            if option.dest == "kv_cache_dtype" and DTYPE not in (option.choices or DTYPE):
                option.choices = [*option.choices, DTYPE]
        return parser

    setattr(arguments, _MARK, False)
    arguments.create_engine_config, arguments.add_cli_args = create, staticmethod(add_options)
    return True
