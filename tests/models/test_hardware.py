"""The hardware table against datasheets and against itself."""

import math

import pytest

from models.hardware import devices, find_device
from models.strict_tables import ScenarioError


@pytest.mark.parametrize(
    ("name", "memory_gb", "peak_tb_per_s", "bf16_tflops"),
    [
        ("H200", 141, 4.8, 989),
        ("H100-80", 80, 3.35, 989),
        ("A100-80", 80, 2.039, 312),
        ("RTX-4090", 24, 1.008, 165),
    ],
)
def test_memory_bandwidth_and_arithmetic_are_those_of_the_datasheets(
    name, memory_gb, peak_tb_per_s, bf16_tflops
):
    device = find_device(name)
    assert device.memory_bytes == pytest.approx(memory_gb * 1e9)
    assert device.peak_bytes_per_s == pytest.approx(peak_tb_per_s * 1e12)
    assert device.flops_per_s == pytest.approx(bf16_tflops * 1e12, rel=0.01)


@pytest.mark.parametrize("name", ["H200", "H100-80", "A100-80", "B200", "RTX-4090"])
def test_no_device_copies_faster_than_its_memory_nor_decodes_faster_than_it_copies(name):
    device = devices()[name]
    assert 0.8 * device.peak_bytes_per_s < device.copy_bytes_per_s < device.peak_bytes_per_s
    assert device.link_bytes_per_s < 0.1 * device.copy_bytes_per_s
    assert sorted(device.decode_roof) == list(range(2, 9))
    assert all(0.0 < share <= 1.0 for share in device.decode_roof.values())
    assert device.source


@pytest.mark.parametrize(
    ("name", "roof"),
    [("H200", [1.17, 1.43, 1.01, 0.72]), ("A100-80", [1.9, 2.3, 1.6, 1.16]),
     ("B200", [0.84, 1.02, 0.72, 0.51])],
)  # fmt: skip
def test_decode_roofs_are_the_counted_ones_cut_at_the_bandwidth(name, roof):
    found = [find_device(name).decode_roof[bits] for bits in (2, 3, 4, 5)]
    assert found == pytest.approx([min(1.0, share) for share in roof])


def test_roofs_scale_with_the_inverse_of_the_bandwidth_where_processors_are_alike():
    fast, slow = find_device("H200"), find_device("H100-80")
    scale = fast.copy_bytes_per_s / slow.copy_bytes_per_s
    for bits in (6, 7, 8):
        assert slow.decode_roof[bits] == pytest.approx(fast.decode_roof[bits] * scale, rel=0.01)


def test_names_are_found_in_any_case_and_an_unknown_one_lists_all():
    assert find_device("rtx-4090") is find_device("RTX-4090")
    with pytest.raises(ScenarioError, match=r"\[hardware\] device: .*H200.*RTX-4090.*'h20'") as no:
        find_device("h20")
    assert "did you mean H200?" in str(no.value)
    assert math.isfinite(find_device("B200").memory_bytes)
