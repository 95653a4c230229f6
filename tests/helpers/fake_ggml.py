"""Shared libraries that say what a ggml and kvpact's backend say, out of a few lines of C."""

import shutil
import subprocess

import pytest

GGML = """
#include <dlfcn.h>
#include <stdlib.h>
static size_t backends, devices, loads;
size_t fake_loads(void) { return loads; }
size_t ggml_backend_reg_count(void) { return backends; }
void ggml_backend_load_all_from_path(const char *path) { backends = 1; }
void *ggml_backend_dev_by_name(const char *name) { return devices ? &devices : NULL; }
void *ggml_backend_load(const char *path) {
    void *(*init)(void) = (void *(*)(void))dlsym(dlopen(path, RTLD_NOW), "ggml_backend_init");
    loads++;
    if (backends && init()) devices = 1;
    return devices ? &devices : NULL;
}
#ifdef CRASH
__attribute__((constructor)) static void crash(void) { abort(); }
#endif
"""
PLUGIN = """
#include <stdint.h>
#include <stdlib.h>
static int loaded;
const char *kvpact_ggml_refused(void) { return REFUSED && loaded ? "ggml 9.9.9: odd" : ""; }
const char *kvpact_ggml_found(void) { return loaded ? "ggml 9.9.9, interface 6" : ""; }
int64_t kvpact_ggml_computed(void) { return INT64_C(1) << 40; }
void *ggml_backend_init(void) { loaded = 1; return REFUSED ? NULL : &loaded; }
"""


def compiled(path, text, *options):
    """Compile a shared library to a path, and return it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [
        compiler, "-shared", "-fPIC", "-x", "c", "-", "-x", "none", *options, "-o", path, "-ldl",
    ]  # fmt: skip
    subprocess.run(words, input=text, text=True, check=True)
    return path
