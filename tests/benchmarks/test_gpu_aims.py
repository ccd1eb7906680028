"""What a record of a GPU is held to, and the tables made from it."""

from __future__ import annotations

import json

import pytest

from .scripts import script

gpu, gpu_aims = script("gpu"), script("gpu_aims")
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"

RATES = {
    "optimizers": {
        "collage-plus, AdamW, bfloat16": {
            "seconds": 2e-3,
            "share_of_copy_bandwidth": 0.91,
            "times_torch fused FP32": 1.5,
            "times_FlashOptim": 1.1,
        }
    },
    "tables": {
        "int8+5%, 64 numbers": {
            "lookups_per_second": 2e9,
            "times_torch, SGD on all rows": 9.0,
            "times_fbgemm fp32": 1.3,
            "times_fbgemm fp16": 0.9,
            "times_fbgemm int8": 1.1,
            **{"narrow": True, "peer": False},
        },
        "int4+5%, 64 numbers": {"lookups_per_second": 2e9, "narrow": True, "peer": False},
        "fp32+0%, 64 numbers": {"lookups_per_second": 1e9, "narrow": False, "peer": False},
        "fbgemm int8, 64 numbers": {"lookups_per_second": 1e9, "narrow": False, "peer": True},
    },
    "heads": {
        "three bare products, bf16, 128 instances": {
            **{"seconds": 1e-3, "flops_per_second": 4e14, "share_of_peak": 0.4},
            **{"time_of_products": 1.0, "times_torch": 5.0},
            **{"products": "bf16", "bare": True, "peer": False},
        },
        "bf16, 128 instances, 1 chunk": {
            **{"seconds": 1.2e-3, "flops_per_second": 3e14, "share_of_peak": 0.3},
            **{"time_of_products": 1.2, "times_torch": 4.0},
            **{"products": "bf16", "bare": False, "peer": False},
        },
        "torch, 128 instances": {
            **{"seconds": 5e-3, "flops_per_second": 1e14, "share_of_peak": None},
            **{"products": "fp32", "bare": False, "peer": True},
        },
    },
    "mixtures": {
        "tensor, tensor, 8,192": {"seconds": 2e-3, "times_bf16": 1.3, "judged": True},
        "subtensor-3way, block-128x128, 8,192": {
            **{"seconds": 3e-3, "times_bf16": 0.9, "judged": False}
        },
    },
    "memory": {"activations kept": {"peak_bytes": 6 * 2**30, "parameters": 109_482_240}},
}

EXPECTED = {
    "optimizers": {"collage-plus, AdamW, bfloat16: share of a copy's bandwidth": True},
    "tables": {
        # The fastest of FBGEMM's narrow rows counts.
        "int8+5%, 64 numbers: rate of FBGEMM's": False,
        "int4+5%, 64 numbers: rate of FBGEMM's": None,
    },
    "heads": {
        "three bare products, bf16, 128 instances: share of the peak": False,
        "bf16, 128 instances, 1 chunk: time of its products": True,
    },
    "mixtures": {"tensor, tensor, 8,192: rate of BF16's": True},
    "memory": {"activations kept: GiB at the peak": False},
}


@pytest.mark.parametrize("section", RATES)
def test_aims_are_judged_on_the_device_that_they_are_of(section):
    found = gpu_aims.judge(section, RATES[section], H100)
    assert {name: met for name, (_, _, met) in found.items()} == EXPECTED[section]
    elsewhere = gpu_aims.judge(section, RATES[section], A100)
    assert {name: row[:2] for name, row in elsewhere.items()} == {
        name: row[:2] for name, row in found.items()
    }
    assert {met for _, _, met in elsewhere.values()} == {None}
    assert gpu_aims.judge(section, RATES[section], None) == elsewhere


def test_a_rate_that_equals_bf16s_is_not_faster():
    rates = {"x": {"times_bf16": 1.0, "judged": True}}
    assert gpu_aims.judge("mixtures", rates, H100)["x: rate of BF16's"] == [1.0, "> 1", False]


def test_aims_of_what_was_only_run():
    assert gpu_aims.judge("tuning", {"kernel": {}}, H100) == {}


@pytest.mark.parametrize(
    ("device", "bf16"),
    [(H100, 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989e12), (A100, 312e12)],
)
def test_nominal_peaks_go_by_name(device, bf16):
    assert gpu_aims.peaks_of(device)["bf16"] == bf16
    assert gpu_aims.peaks_of("NVIDIA GeForce") == gpu_aims.peaks_of(None) == {}


@pytest.fixture
def record(tmp_path):
    sections = {
        name: {
            "status": "passed",
            "seconds": 1.0,
            "result": {"rates": rates, "peers": {"absent": ["torchao"], "failed": {"x": "error"}}},
            "aims": gpu_aims.judge(name, rates, H100),
        }
        for name, rates in RATES.items()
    }
    sections["mixtures"] = {"status": "took too long", "seconds": 35.0, "output": ""}
    del sections["memory"]
    machine = {"gpu": H100, "date": "2026-01-01", "versions": {"torch": "2.11.0", "torchao": None}}
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"benchmark": "gpu", "machine": machine, "sections": sections}))
    return path


def test_a_records_tables(record, capsys):
    assert gpu.main(["--table", str(record)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "NVIDIA H100 80GB HBM3, 2026-01-01; torch 2.11.0."
    assert "| collage-plus, AdamW, bfloat16 | 2.00 | 0.91 | 1.50 | | 1.10 |" in lines
    assert "| int8+5%, 64 numbers | 2,000.0 | 9.00 | 1.30 | 0.90 | 1.10 |" in lines
    assert "| bf16, 128 instances, 1 chunk | 1.20 | 300.0 | 0.30 | 1.20 | 4.00 |" in lines
    assert "No figures: took too long." in lines
    assert "Not yet run." in lines
    assert "Not installed: torchao." in lines
    assert "Failed: x." in lines
    assert "| int8+5%, 64 numbers: rate of FBGEMM's | 0.90 | >= 1 | missed |" in lines
    assert "| int4+5%, 64 numbers: rate of FBGEMM's | | >= 1 | not judged |" in lines
    # Every row of a table has its columns.
    columns = 0
    for line in lines:
        here = line.count("|") if line.startswith("|") else 0
        assert not columns or not here or here == columns
        columns = here


def test_the_page_has_the_rows_that_a_record_gives():
    """README.md shows what is measured before anything is."""
    page = (gpu.HERE / "README.md").read_text()
    table = script("gpu_table")
    for name, title in table.TITLES.items():
        assert f"### {title}\n" in page
        assert table.header("", *table.COLUMNS[name])[0] in page
