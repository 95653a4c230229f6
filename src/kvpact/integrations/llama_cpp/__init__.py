"""llama.cpp: a backend of ggml that attends to KV caches in host memory, loaded into its programs.

Nothing of llama.cpp is imported before `enable`; docs/llama-cpp.md is the guide for users.
"""

from kvpact.integrations.llama_cpp.backend import EnabledGgml, enable, environment, library

__all__ = ["EnabledGgml", "enable", "environment", "library"]
