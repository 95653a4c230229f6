"""The table of platforms fits what pip, Zig and the loader of the library take for granted."""

import re

import pytest
from packaging.tags import mac_platforms, sys_tags
from wheel_platforms import PLATFORMS

from kvpact.kernels.cpu.library import file_name

LINUX = [platform for platform in PLATFORMS if platform.system == "linux"]


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
def test_the_loader_looks_for_the_file_that_is_built(platform):
    assert file_name(platform.system) == platform.library


@pytest.mark.parametrize("platform", LINUX, ids=lambda platform: platform.name)
def test_zig_compiles_for_the_glibc_of_the_tag(platform):
    major, minor, machine = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform.tag).groups()
    assert platform.target == f"{machine}-linux-gnu.{major}.{minor}"
    assert platform.machine == machine


def test_macos_compiles_for_the_release_of_the_tag():
    (platform,) = (one for one in PLATFORMS if one.system == "darwin")
    assert platform.tag in mac_platforms((14, 0), "arm64")
    assert platform.tag.split("_")[1:3] == platform.target.rpartition("macos.")[2].split(".")


def test_each_platform_has_a_wheel_of_its_own():
    assert len({platform.full_tag for platform in PLATFORMS}) == len(PLATFORMS) == 4


def test_no_tag_names_a_python_or_its_abi():
    assert {platform.full_tag.rpartition("-")[0] for platform in PLATFORMS} == {"py3-none"}


@pytest.mark.skipif(
    not any(tag.platform.startswith("manylinux_2_17_x86_64") for tag in sys_tags()),
    reason="no glibc on x86-64",
)
def test_pip_takes_the_wheel_of_this_machine():
    installable = {str(tag) for tag in sys_tags()}
    assert "py3-none-manylinux_2_17_x86_64" in installable
    assert [one.name for one in PLATFORMS if one.full_tag in installable] == ["Linux x86-64"]
