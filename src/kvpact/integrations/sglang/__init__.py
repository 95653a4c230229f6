"""SGLang: pages of its host memory (HiCache) in kvpact's stores, as packed slots.

SGLang loads `kvpact.integrations.sglang.storage` by its path; nothing of SGLang is imported before.
"""
