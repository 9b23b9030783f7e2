"""`trainfit gpus`: the catalogue, one GPU explained, and its JSON document."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
from pathlib import Path

import pytest

from helpers_cli import error_line, json_of, trainfit
from helpers_report import whole
from trainfit.cli.main import main
from trainfit.cli.verbs import gpus as verb
from trainfit.hardware import GpuSpec, catalogue, find_gpu
from trainfit.hardware.gpu_catalogue import CURATED
from trainfit.hardware.gpu_figures import ARCHITECTURES, figures
from trainfit.hardware.gpu_lookup import _database_entries
from trainfit.hardware.gpu_records import database
from trainfit.report.gpu_meaning import JETPACK, explained
from trainfit.report.sections.gpus import catalogue_subject
from trainfit.results.files.errors import ResultFileError
from trainfit.results.gpus import GpuFigures, GpusResult
from trainfit.results.text import WIDTH, laid_out_for, percent, size, times

ALL = catalogue()
WITH_TENSOR_CORES = [spec for spec in ALL if spec.has_tensor_cores]


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    done = trainfit("gpus", *words, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done


def with_meaning(spec: GpuSpec) -> GpuFigures:
    found = figures(spec)
    return dataclasses.replace(found, meaning=explained(found))


def says(spec: GpuSpec, figure: str) -> str:
    (line,) = [line for line in explained(figures(spec)) if line.figure == figure]
    return f"{line.value}: {line.says}"


def numbers(text: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def has(text: str, value: float) -> bool:
    """Is the value among the text's numbers, as far as three significant digits tell?"""
    return any(math.isclose(number, value, rel_tol=0.006) for number in numbers(text))


# --- The table --------------------------------------------------------------------------------


def rows(text: str) -> dict[str, list[str]]:
    """Cells of each row of the table by the GPU's name (all but name and architecture)."""
    (part,) = (part for part in text.split("\n\n") if part.startswith("Figures"))
    _, head, *lines = part.splitlines()
    assert " ".join(head.split()) == "GPU architecture GiB GB/s fp32 tf32 bf16 fp16 fp8 W"
    start, found = head.index("architecture"), list[tuple[str, list[str]]]()
    for line in lines:
        name, cells = line[:start].strip(), line[start:].split()
        if cells:
            found.append((name, cells[2:]))
        else:  # a long name goes on in the next line
            found[-1] = (f"{found[-1][0]} {name}", found[-1][1])
    return dict(found)


def test_the_table_has_every_card_and_its_figures(tmp_path: Path) -> None:
    done = run("--list", cwd=tmp_path)
    assert max(map(len, done.stdout.splitlines())) <= 80
    table = rows(done.stdout)
    names = {s.key: s.key + " (shared)" * s.shared_memory_device for s in ALL}
    assert set(table) == set(names.values())
    for spec in ALL:
        memory, bandwidth, fp32, tf32, bf16, fp16, fp8, watts, *marks = table[names[spec.key]]
        assert memory.startswith("~") == spec.memory_is_assumed
        assert has(memory, spec.memory_bytes / 2**30)
        assert has(bandwidth, spec.bandwidth_bytes_per_s / 1e9)
        assert has(fp32, spec.fp32_flops / 1e12)
        for cell, dtype in zip(
            (tf32, bf16, fp16, fp8), ("tfloat32", "bfloat16", "float16", "float8"), strict=True
        ):
            if dtype in spec.tensor_flops:
                assert has(cell, spec.tensor_flops[dtype] / 1e12)
                assert cell.startswith("~") == spec.sources["tensor_flops"].startswith("assumed")
            else:
                assert cell == "-"
        assert has(watts, spec.power_watts)
        assert not marks


def test_the_newest_generation_and_the_largest_memory_come_first(tmp_path: Path) -> None:
    names = [name.partition(" (")[0] for name in rows(run("--list", cwd=tmp_path).stdout)]
    order = [find_gpu(name) for name in names]
    keys = [(spec.capability, spec.memory_bytes) for spec in order]
    assert keys == sorted(keys, reverse=True)


def test_without_names_all_cards_are_named_on_one_screen(tmp_path: Path) -> None:
    text = " ".join(run(cwd=tmp_path).stdout.split())
    assert text.startswith(f"{len(ALL)} GPUs ") and "trainfit gpus --list" in text
    assert all(f"{spec.key} (" in text for spec in ALL)
    done = trainfit("gpus", "--list", "--explain", cwd=tmp_path)
    assert "--list" in error_line(done)


def test_named_cards_alone_in_the_order_of_asking(tmp_path: Path) -> None:
    table = rows(run("T4", "rtx4090", "tesla t4", cwd=tmp_path).stdout)
    assert list(table) == ["T4", "RTX 4090"]


def test_a_laptop_is_marked_and_its_long_name_stays_whole(tmp_path: Path) -> None:
    name = "GeForce RTX 3050 Mobile Refresh 6 GB"
    text = run(name, cwd=tmp_path).stdout
    assert list(rows(text)) == [f"{name} (laptop)"]
    assert max(map(len, text.splitlines())) <= 80
    assert "device's maker" in says(find_gpu(name), "power")


def test_which_cards_are_laptops() -> None:
    laptops = {entry.label for entry in _database_entries() if entry.spec().is_laptop}
    named = {label for label in database() if re.search(r"Mobile|Max-Q", label)}
    known = {entry.label for entry in _database_entries()}
    # A workstation's 300 W card is called Max-Q too, and MXM modules of servers Mobile.
    others = {"RTX PRO 6000 Blackwell Max-Q", "RTX PRO 6000D Blackwell Max-Q"}
    assert not others & laptops
    missed = (named & known) - laptops - others
    assert all(label.startswith("Tesla") for label in missed), missed
    assert not any(spec.is_laptop for spec in ALL)


def test_a_name_that_leaves_a_variant_open_says_what_it_was_taken_for(tmp_path: Path) -> None:
    for words in (["A100 80GB"], ["A100 80GB", "--explain"]):
        text = " ".join(run(*words, cwd=tmp_path).stdout.split())
        assert "'A100 80GB' does not name the variant; A100 80GB SXM is assumed" in text


def test_a_device_made_to_measure_has_no_speed(tmp_path: Path) -> None:
    done = run("custom:24GiB", cwd=tmp_path)
    ((memory, *cells),) = rows(done.stdout).values()
    assert has(memory, 24)
    assert cells == ["?"] * 5 + ["-", "?"]  # 8.0 has no FP8
    (gpu,) = json_of(run("custom:24GiB", "--explain", "--json", cwd=tmp_path))["gpus"]
    for field in ("bandwidth_bytes_per_s", "fp32_flop_per_s", "power_w", "sm_count", "cuda_cores"):
        assert gpu[field] is None, field
    assert gpu["tensor_flop_per_s"] is None and gpu["bus_bits"] is None
    shown = {line["figure"] for line in gpu["meaning"]}
    assert shown == {"capability", "PyTorch", "memory", "fp32 parameters"}


# --- Explained --------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.key)
def test_every_card_is_explained_with_sources(spec: GpuSpec) -> None:
    gpu = with_meaning(spec)
    text = whole(catalogue_subject(GpusResult((gpu,))))
    assert max(map(len, text.splitlines())) <= WIDTH
    listed = dict(re.findall(r"^  \[(\d+)\] +(.+)", text, re.MULTILINE))
    body, _, _ = text.partition("Sources (")
    assert set(re.findall(r"\[(\d+)\]", body)) == set(listed)
    assert all(line.source for line in gpu.meaning)
    for line in gpu.meaning:
        if line.source.startswith("assumed"):
            assert line.assumed, line


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.key)
def test_numbers_are_the_cards_own(spec: GpuSpec) -> None:
    bandwidth, fp32, memory = spec.bandwidth_bytes_per_s, spec.fp32_flops, spec.memory_bytes
    text = says(spec, "memory bandwidth")
    assert has(text, memory / bandwidth * 1e3)
    assert f" {fp32 / bandwidth:.0f} (fp32)" in text
    text = says(spec, "FP32")
    assert has(text, fp32 / 1e12)
    # Two numbers of four bytes in, one out, and one addition: its rate against the peak.
    assert f"reaches {percent(bandwidth / 12 / fp32, decimals=2)}" in text
    text = says(spec, "CUDA cores")
    assert has(text, spec.sm_count * 1024)
    first = next(n for n in range(128, 10**6, 128) if n // 128 * (1024 // 128) >= spec.sm_count)
    assert f"{first} rows" in text
    text = says(spec, "memory")
    assert size(memory) in text and size(spec.context_bytes) in text
    most = (memory - spec.context_bytes) // 16
    text = says(spec, "fp32 parameters")
    assert has(text, most / (1e9 if most >= 1e9 else 1e6))
    assert has(text, most * 28 / bandwidth * 1e3)
    assert has(says(spec, "power"), spec.power_watts)
    if spec.l2_bytes is not None:
        assert f"{spec.l2_bytes / 4 / 1e6:.1f} million" in says(spec, "L2 cache")
    if spec.bus_bits is not None:
        text = says(spec, "memory bus")
        assert has(text, spec.bus_bits) and has(text, bandwidth * 8 / spec.bus_bits / 1e9)


@pytest.mark.parametrize("spec", WITH_TENSOR_CORES, ids=lambda spec: spec.key)
def test_tensor_cores_against_the_cards_own_fp32(spec: GpuSpec) -> None:
    text = says(spec, "Tensor cores")
    names = {"tfloat32": "tf32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}
    for dtype, name in names.items():
        if dtype not in spec.tensor_flops:
            assert name not in text
            continue
        assert f"{name} {times(spec.tensor_flops[dtype] / spec.fp32_flops)}" in text
    half = spec.tensor_flops["float16"]
    assert f"up to n = {math.ceil(3 * half / spec.bandwidth_bytes_per_s)}" in says(
        spec, "memory bandwidth"
    )
    assert has(says(spec, "power"), half / spec.power_watts / 1e9)
    if "tfloat32" in spec.tensor_flops:
        gains = spec.tensor_flops["tfloat32"] > 1.1 * spec.fp32_flops
        assert ("no gain in peak rate" in says(spec, "TF32")) != gains


@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.key)
def test_what_the_capability_switches_on(spec: GpuSpec) -> None:
    text = says(spec, "capability")
    assert f"{spec.capability[0]}.{spec.capability[1]}" in text
    assert ARCHITECTURES[spec.capability] in text
    assert ("no bf16" in text) == (not spec.supports_bf16)
    assert ("no flash attention" in text or "or flash attention" in text) == (
        spec.capability < (8, 0)
    )
    assert ("FP8 matmuls" in text) == ("float8" in spec.tensor_flops)
    assert ("torch.compile refuses" in text) == (spec.capability < (7, 0))
    if not spec.has_tensor_cores:
        assert says(spec, "Tensor cores").startswith("none")
    shared = [line for line in explained(figures(spec)) if line.figure == "shared memory"]
    assert bool(shared) == spec.shared_memory_device


def test_a_t4_is_told_to_use_fp16() -> None:
    text = says(find_gpu("T4"), "capability")
    assert "no bf16" in text and "GradScaler" in text and "emulation" in text


def test_builds_of_pytorch_agree_with_its_own_table() -> None:
    """PyTorch runs a build's kernel on a card of its own generation that is not older."""
    from torch import cuda

    # Before 2.11 or so the table is not there.
    table = getattr(cuda, "PYTORCH_RELEASES_CODE_CC", None)
    if table is None:
        pytest.skip("this torch has no table of its builds")
    assert "12.6" in table and "13.0" in table

    def runs(build: str, capability: tuple[int, int]) -> bool:
        kernels = {code for codes in table[build].values() for code in codes}
        own = 10 * capability[0] + capability[1]
        return any(code // 10 == own // 10 and code <= own for code in kernels)

    specs = [*ALL, *(find_gpu(f"custom:24GiB:{name}") for name in ("10.3", "11.0", "12.1"))]
    for spec in specs:
        if spec.capability in JETPACK:
            assert "JetPack" in says(spec, "PyTorch")
            continue
        text = says(spec, "PyTorch")
        old, new = runs("12.6", spec.capability), runs("13.0", spec.capability)
        assert text.startswith("any build:") == (old and new), spec.key
        assert text.startswith("CUDA 12.6 build:") == (old and not new), spec.key
        if old and not new:
            later = [build for build in table if build != "12.6"]
            assert "CUDA 12.9 or later have no kernels" in text
            assert not any(runs(build, spec.capability) for build in later), spec.key
        assert text.startswith(("CUDA 12.8", "CUDA 13.0")) == (new and not old), spec.key


#: Gbit/s per line that memory of a kind reaches (JEDEC's and the makers' data sheets).
_PIN_RATES = {
    "GDDR5": (4, 9),
    "GDDR5X": (9, 12),
    "GDDR6": (10, 20.1),
    "GDDR6X": (18, 24),
    "GDDR7": (27, 33),
    "HBM2": (1.3, 2.5),
    "HBM2e": (2.3, 3.7),
    "HBM3": (5, 6.5),
    "HBM3e": (6, 9.7),
    "LPDDR5": (4, 6.5),
}


def test_bus_width_and_bandwidth_fit_the_kind_of_memory() -> None:
    checked = 0
    for card in CURATED:
        pin = figures(find_gpu(card.key)).for_a_job.pin_bits_per_s
        if pin is None:
            assert card.key in ("B200", "GB200", "B300")  # whose width is of one die of two
            continue
        least, most = _PIN_RATES[database()[card.record].memory_type]
        assert least <= pin / 1e9 <= most, (card.key, pin)
        checked += 1
    assert checked == len(ALL) - 3


def test_cuda_cores_are_the_databases() -> None:
    for card in CURATED:
        cores = figures(find_gpu(card.key)).cuda_cores
        assert cores == database()[card.record].shading_units, card.key


def test_tensor_cores_and_memory_are_the_databases() -> None:
    for card in CURATED:
        spec, record = find_gpu(card.key), database()[card.record]
        each, sms = record.tensor_cores / record.streaming_multiprocessors, spec.sm_count
        assert spec.tensor_cores == each * sms and spec.memory_type == record.memory_type, card.key
    t4 = find_gpu("T4")
    assert "320 of them" in says(t4, "Tensor cores")
    assert (t4.tensor_cores, t4.memory_type) == (320, "GDDR6")
    assert find_gpu("custom:24GiB").tensor_cores is None


def test_cards_of_the_database_render() -> None:
    """Those with the longest names, and one of each kind of figures."""
    specs = [entry.spec() for entry in _database_entries()]
    kinds = {(gpu.capability, gpu.memory_type, gpu.inline_ecc, gpu.is_laptop): gpu for gpu in specs}
    for gpu in (*sorted(specs, key=lambda gpu: len(gpu.name))[-20:], *kinds.values()):
        text = whole(catalogue_subject(GpusResult((with_meaning(gpu),))))
        assert max(map(len, text.splitlines())) <= WIDTH, gpu.name


def test_explain_through_the_cli(tmp_path: Path) -> None:
    done = run("--explain", "T4", "4090", cwd=tmp_path)
    assert max(map(len, done.stdout.splitlines())) <= WIDTH
    expected = GpusResult((with_meaning(find_gpu("T4")), with_meaning(find_gpu("4090"))))
    with laid_out_for(80):
        assert done.stdout == whole(catalogue_subject(expected)) + "\n"
    # Names may stand on both sides of an option.
    assert run("T4", "--explain", "4090", cwd=tmp_path).stdout == done.stdout


# --- JSON -------------------------------------------------------------------------------------


def test_the_json_document_reads_back(tmp_path: Path) -> None:
    done = run("--json", cwd=tmp_path)
    document = json_of(done)
    assert (document["format"], document["version"]) == ("trainfit-gpus", 1)
    assert len(document["gpus"]) == len(ALL)
    result = GpusResult.from_json(done.stdout, tmp_path / "x.json")
    assert {gpu.key for gpu in result.gpus} == {spec.key for spec in ALL}
    for gpu in result.gpus:
        assert gpu.meaning == ()
        assert gpu == figures(find_gpu(gpu.key))
        assert re.fullmatch(r"[a-z0-9_]+", "".join(vars(gpu)))
    again = result.to_json()
    assert again + "\n" == done.stdout


def test_json_with_explain_has_the_lines(tmp_path: Path) -> None:
    (gpu,) = json_of(run("L4", "--json", "--explain", cwd=tmp_path))["gpus"]
    assert [line["figure"] for line in gpu["meaning"]] == [
        line.figure for line in explained(figures(find_gpu("L4")))
    ]
    field_of = {"power": "power_w", "memory": "memory_bytes", "CUDA cores": "sm_count"}
    for line in gpu["meaning"]:
        if line["figure"] in field_of:
            assert line["source"] == gpu["sources"][field_of[line["figure"]]]


def test_every_figure_has_a_source(tmp_path: Path) -> None:
    for gpu in GpusResult.from_json(run("--json", cwd=tmp_path).stdout, tmp_path).gpus:
        unsourced = {"architecture", "memory_is_assumed", "tensor_dtypes", "for_a_job"}
        unsourced |= {"sources", "meaning"}
        assert set(gpu.sources) == set(vars(gpu)) - unsourced


def test_a_damaged_document_is_refused(tmp_path: Path) -> None:
    text = run("T4", "--json", cwd=tmp_path).stdout
    for damaged in (text[:-20], text.replace('"memory_bytes": ', '"memory_bytes": "x", "y": ')):
        with pytest.raises(ResultFileError):
            GpusResult.from_json(damaged, tmp_path / "x.json")


# --- Bad input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["RTX 9999"],
        ["RTX 4090", "banana"],
        [""],
        ["A100"],
        ["custom:24"],
        ["x" * 500],
        ["bad\x1b[31mname"],
        ["RTX", "4090"],
        ["--explain", "nope"],
    ],
)
def test_a_bad_name_is_one_line(words: list[str], tmp_path: Path) -> None:
    done = trainfit("gpus", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    line = error_line(done)
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in line
    if words == ["RTX", "4090"]:
        assert 'trainfit gpus "RTX 4090"' in line


def test_without_a_gpu_there_is_none_to_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "local_gpu", lambda: None)
    assert main(["gpus", "--explain"]) == 2


def test_this_machines_gpu_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = find_gpu("RTX 4090")
    monkeypatch.setattr(verb, "local_gpu", lambda: here)
    assert main(["gpus", "--explain"]) == 0
    with laid_out_for(80):
        assert (
            capsys.readouterr().out
            == whole(catalogue_subject(GpusResult((with_meaning(here),)))) + "\n"
        )
