"""Hardware as data: figures that belong together, formats that a generation has, and a source for all of it."""

import pytest

from core.errors import ConfigError
from launch.profiles import GB, PROFILES, TB, TFLOPS, Profile, find_profile

KNOWN = tuple(profile for profile in PROFILES if profile.chip is not None)
NAMES = ("gb300", "gb200", "b300", "b200", "h200", "h100", "a100")


def test_every_kind_of_the_published_set_ups_is_there_and_named_once() -> None:
    assert sorted(profile.name for profile in KNOWN) == sorted(NAMES)
    assert len({profile.name for profile in PROFILES}) == len(PROFILES)


@pytest.mark.parametrize("profile", KNOWN, ids=lambda profile: profile.name)
def test_figures_lie_where_such_hardware_lies(profile: Profile) -> None:
    chip, fabric, speeds = profile.chip, profile.fabric, profile.speeds
    assert chip is not None and fabric is not None and speeds is not None
    assert 40 * GB <= chip.memory <= 300 * GB
    assert 1 * TB <= chip.memory_bandwidth <= 10 * TB
    assert 25 * GB <= chip.host_link <= 450 * GB
    assert 10 * TFLOPS <= chip.float32 < chip.bfloat16 <= 3000 * TFLOPS
    assert fabric.domain % fabric.gpus_per_node == 0
    assert fabric.network < fabric.nvlink
    assert max(speeds.products, speeds.low_products, speeds.overlapped) < 1 <= speeds.streamed
    assert all(rate < chip.bfloat16 for rate in (*speeds.attention, *speeds.long_attention))


@pytest.mark.parametrize("profile", KNOWN, ids=lambda profile: profile.name)
def test_nothing_is_measured_to_be_faster_than_its_maker_says(profile: Profile) -> None:
    fabric = profile.fabric
    assert fabric is not None
    assert max(fabric.all_to_all_nvlink, fabric.token_once_nvlink) < fabric.nvlink
    assert max(fabric.all_to_all_network, fabric.token_once_network) < fabric.network


@pytest.mark.parametrize("profile", KNOWN, ids=lambda profile: profile.name)
def test_formats_are_those_of_the_generation(profile: Profile) -> None:
    chip, capability = profile.chip, profile.capability
    assert chip is not None and capability is not None
    assert ("mxfp8" in chip.recipes) == ("nvfp4" in chip.recipes) == (capability >= (10, 0))
    assert ("fp8_blockwise" in chip.recipes) == (capability[0] == 9)
    assert bool(chip.recipes) == (chip.fp8 is not None) == (capability >= (9, 0))
    assert (chip.fp4 is not None) == ("nvfp4" in chip.recipes)


def test_eight_bits_are_twice_and_four_bits_at_least_four_times_as_fast() -> None:
    for profile in KNOWN:
        assert profile.chip is not None
        if profile.chip.fp8 is not None:
            assert profile.chip.fp8 == pytest.approx(2 * profile.chip.bfloat16, rel=1e-3)
        if profile.chip.fp4 is not None:
            assert profile.chip.fp4 >= 4 * profile.chip.bfloat16


def test_a_rack_is_one_nvlink_domain_and_a_server_another() -> None:
    domains = {profile.name: profile.fabric.domain for profile in KNOWN if profile.fabric is not None}
    assert domains == {"gb300": 72, "gb200": 72, "b300": 8, "b200": 8, "h200": 8, "h100": 8, "a100": 8}


@pytest.mark.parametrize("profile", KNOWN, ids=lambda profile: profile.name)
def test_sources_tell_of_peaks_memory_links_and_of_what_was_fitted(profile: Profile) -> None:
    told = " ".join(profile.sources).lower()
    for either in (("peak",), ("gb",), ("nvlink",), ("pcie", "c2c"), ("network", "infiniband"), ("fitted",)):
        assert any(word in told for word in either), (profile.name, either)
    assert "docs/throughput.md" in told


def test_nothing_is_claimed_of_the_machine_at_hand() -> None:
    for name in ("cpu", "gpu"):
        profile = find_profile(name)
        assert (profile.chip, profile.fabric, profile.speeds, profile.sources) == (None, None, None, ())


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as raised:
        find_profile("gb400")
    for profile in PROFILES:
        assert profile.name in str(raised.value)
