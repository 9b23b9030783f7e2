"""A job on other GPUs: what fits, how fast, at what cost; and `trainfit gpus --for`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import trainfit
from helpers_report import screen, whole
from tests.report.plan.test_text import PLAN
from trainfit.cli.main import main
from trainfit.hardware import GpuSpec, catalogue, find_gpu
from trainfit.plan.gpu_job import Job, JobError, job_of_plan, job_of_recordings
from trainfit.plan.gpus import compare_gpus
from trainfit.plan.prices import PriceFileError, Prices, load_prices
from trainfit.plan.sizing.costing import machine_of, memory_law
from trainfit.plan.sizing.curve import curve_of
from trainfit.plan.sizing.speed import speed
from trainfit.report.sections.gpus import comparison_subject
from trainfit.results.configuration import BatchLimits, EpochEnd
from trainfit.results.files.errors import ResultFileError
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import Recorded
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.steps import Coverage
from trainfit.results.speed import GpuComparison, GpuEstimate
from trainfit.results.text import GIB, MIB, WIDTH

WIDTHS = 2048


def recorded(batch: int, dtype: torch.dtype = torch.float16) -> Recording:
    """Two steps of a perceptron."""
    with trainfit.simulate("RTX 3090", limited=False) as simulation:
        model = nn.Sequential(nn.Linear(WIDTHS, WIDTHS), nn.ReLU(), nn.Linear(WIDTHS, WIDTHS))
        model = model.cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            images = torch.randn(batch, WIDTHS, device="cuda")
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=dtype):
                model(images).sum().backward()
            optimizer.step()
    recording = simulation.recording
    header = {**recording.header, "batch_size": batch, "script": "train.py"}
    return dataclasses.replace(recording, header=header)


@pytest.fixture(scope="module")
def job() -> Job:
    first, second = recorded(64), recorded(128)
    return Job("python train.py", 64, first, ((64, first), (128, second)), samples=64_000)


@pytest.fixture(scope="module")
def files(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("recordings")
    paths = folder / "one.trainfit", folder / "two.trainfit"
    for path, (_, recording) in zip(paths, job.pair, strict=True):
        recording.save(path)
    return paths


def estimate_of(result: GpuComparison, name: str) -> GpuEstimate:
    (found,) = [estimate for estimate in result.gpus if estimate.gpu == find_gpu(name).key]
    return found


def named(*names: str) -> list[GpuSpec]:
    return [find_gpu(name) for name in names]


# --- What is found ------------------------------------------------------------------------------


def test_the_gpu_it_was_recorded_for_gets_what_plan_says(job: Job) -> None:
    """Largest batch by replay, step time by the same clock."""
    gpu = find_gpu("RTX 3090")
    (estimate,) = compare_gpus(job, [gpu]).gpus
    assert estimate.fits and estimate.largest_batch is not None
    machine = machine_of(gpu)
    curve = curve_of(job.pair, machine, estimate.largest_batch)
    planned = speed(job.recording, 64, machine, curve, job.samples)
    assert planned is not None
    assert estimate.now == planned.now
    assert estimate.at_saturation == planned.at(planned.knee)
    assert estimate.run_s == pytest.approx(planned.epoch_s)
    law = memory_law(job.pair)
    assert law.at(estimate.largest_batch + 1).alloc_bytes.sum() > 0
    assert estimate.samples_per_joule == pytest.approx(planned.now.samples_per_s / 350)  # type: ignore[operator]


def test_more_memory_takes_a_larger_batch_and_more_bandwidth_is_faster(job: Job) -> None:
    result = compare_gpus(job, named("RTX 3060 12GB", "RTX 3090", "A100-80GB-SXM"))
    small, middle, large = (
        estimate_of(result, n) for n in ("RTX 3060 12GB", "RTX 3090", "A100-80GB-SXM")
    )
    assert 0 < (small.largest_batch or 0) < (middle.largest_batch or 0) < (large.largest_batch or 0)
    assert result.fastest == "A100 80GB SXM"
    assert [estimate.gpu for estimate in result.gpus] == [
        "A100 80GB SXM",
        "RTX 3090",
        "RTX 3060 12GB",
    ]
    assert result.cheapest is None and result.currency == ""


def test_about_the_largest_is_near_it(job: Job) -> None:
    gpus = named("RTX 3060 12GB", "RTX 3090", "T4", "H100 SXM", "V100 32GB SXM")
    about, exact = compare_gpus(job, gpus, exact=False), compare_gpus(job, gpus)
    for gpu in gpus:
        one, other = estimate_of(about, gpu.key), estimate_of(exact, gpu.key)
        assert not one.largest_is_exact and other.largest_is_exact
        # The allocator may release what it keeps, which some large tensors make much of.
        assert one.largest_batch is not None and other.largest_batch is not None
        assert 0.7 * other.largest_batch < one.largest_batch < 1.03 * other.largest_batch
        assert (one.fits, one.device_bytes) == (other.fits, other.device_bytes)
    assert "~" in whole(comparison_subject(about))


def test_a_gpu_that_is_too_small_at_this_batch_size_runs_with_another(job: Job) -> None:
    least = Job("train", 1 << 18, recorded(1 << 18), job.pair)
    result = compare_gpus(least, named("custom:3GiB", "RTX 3090"))
    small = estimate_of(result, "custom:3GiB")
    assert not small.fits and small.runs and small.now is None
    assert (
        small.largest_batch
        == estimate_of(compare_gpus(job, named("custom:3GiB")), "custom:3GiB").largest_batch
    )


def test_what_fits_nowhere_is_said() -> None:
    large = recorded(1 << 20)
    result = compare_gpus(Job("train", 1 << 20, large), named("GTX 1080 Ti", "RTX 3060 12GB"))
    assert not result.fits and result.fastest is None
    assert any("fits none of the GPUs" in note and "--remedies" in note for note in result.notes)
    assert all(estimate.now is None and estimate.run_s is None for estimate in result.gpus)
    assert "too large" in whole(comparison_subject(result))


def test_bfloat16_is_float16_where_there_is_none() -> None:
    first = recorded(64, torch.bfloat16)
    halves = recorded(64, torch.float16)
    result = compare_gpus(Job("train", 64, first), named("T4", "RTX 3090"))
    t4 = estimate_of(result, "T4")
    assert any("no bfloat16" in note and "float16" in note for note in t4.notes)
    assert estimate_of(result, "RTX 3090").notes == ()
    as_float16 = estimate_of(compare_gpus(Job("train", 64, halves), named("T4")), "T4")
    assert t4.now is not None and as_float16.now is not None
    assert t4.now.seconds == pytest.approx(as_float16.now.seconds, rel=0.02)
    assert as_float16.notes == ()


def test_old_gpus_are_told_apart(job: Job) -> None:
    result = compare_gpus(job, named("GTX 1080 Ti"))
    assert "no Tensor cores" in result.gpus[0].notes
    kepler = dataclasses.replace(find_gpu("GTX 1080 Ti"), capability=(3, 5), key="GTX 780 Ti")
    (estimate,) = compare_gpus(job, [kepler]).gpus
    assert any("compute capability 3.5" in note for note in estimate.notes)


def test_one_batch_size_alone_gives_no_other(job: Job) -> None:
    result = compare_gpus(
        dataclasses.replace(job, pair=(), _works={}), named("RTX 3090", "custom:24GiB")
    )
    known, made_up = (estimate_of(result, name) for name in ("RTX 3090", "custom:24GiB"))
    assert known.now is not None and known.at_saturation is None and known.largest_batch is None
    assert made_up.now is None and made_up.fits
    assert any("no other batch size is known" in note for note in result.notes)
    assert known.run_batch == 64


# --- Prices and measurements ----------------------------------------------------------------------


def test_prices_decide_and_budgets_bound(job: Job) -> None:
    prices = Prices("USD", {"RTX 3090": 0.2, "A100 80GB SXM": 40.0})
    gpus = named("RTX 3090", "A100-80GB-SXM", "RTX 4090")
    result = compare_gpus(job, gpus, prices)
    cheap, dear, free = (estimate_of(result, gpu.key) for gpu in gpus)
    assert result.cheapest == "RTX 3090"
    assert [estimate.gpu for estimate in result.gpus] == ["RTX 3090", "A100 80GB SXM", "RTX 4090"]
    assert free.cost is None and free.samples_per_unit is None
    assert cheap.cost == pytest.approx(cheap.run_s / 3600 * 0.2)  # type: ignore[operator]
    assert cheap.samples_per_unit == pytest.approx(job.samples / cheap.cost)  # type: ignore[operator]
    assert dear.cost is not None and cheap.cost is not None and cheap.cost < dear.cost
    between = (cheap.cost + dear.cost) / 2
    bounded = compare_gpus(job, gpus, prices, between)
    assert bounded.cheapest == bounded.fastest == "RTX 3090"
    none = compare_gpus(job, gpus, prices, cheap.cost / 2)
    assert none.cheapest is None and any("no run costs at most" in note for note in none.notes)


@pytest.fixture(scope="module")
def plain(job: Job) -> GpuComparison:
    return compare_gpus(job, named("RTX 3090", "RTX 4090"))


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(st.floats(0.4, 2.5))
def test_a_measured_step_scales_all(job: Job, plain: GpuComparison, factor: float) -> None:
    gpus = named("RTX 3090", "RTX 4090")
    step = estimate_of(plain, "RTX 3090").now
    assert step is not None
    scaled = compare_gpus(job, gpus, measured=(gpus[0], step.seconds * factor))
    assert scaled.anchor is not None and scaled.anchor.factor == pytest.approx(factor)
    for one, other in zip(plain.gpus, scaled.gpus, strict=True):
        assert one.gpu == other.gpu and one.now is not None and other.now is not None
        assert other.now.seconds == pytest.approx(factor * one.now.seconds)
        assert other.samples_per_s == pytest.approx(one.samples_per_s / factor)  # type: ignore[operator]
        assert other.now.range_s[1] == pytest.approx(factor * one.now.range_s[1])
    assert estimate_of(scaled, "RTX 3090").now.seconds == pytest.approx(step.seconds * factor)  # type: ignore[union-attr]


def test_a_measured_step_that_cannot_be_is_doubted(job: Job) -> None:
    gpu = find_gpu("RTX 3090")
    result = compare_gpus(job, [gpu], measured=(gpu, 10.0))
    assert any("check that it is the same job" in note for note in result.notes)
    useless = compare_gpus(job, [gpu], measured=(find_gpu("custom:24GiB"), 0.1))
    assert useless.anchor is None and any("cannot be used" in note for note in useless.notes)


def test_what_a_tenth_more_of_each_figure_does(job: Job) -> None:
    """This step waits for bandwidth: a tenth more of it is at most 1/11 less time."""
    (estimate,) = compare_gpus(job, named("RTX 3090"), explain=True).gpus
    effects = {effect.figure: effect for effect in estimate.effects}
    assert -0.091 < effects["memory bandwidth"].step_change < -0.03  # type: ignore[operator]
    assert effects["memory"].largest_batch > estimate.largest_batch  # type: ignore[operator]
    changes = [each.step_change for each in estimate.effects if each.step_change is not None]
    assert sum(changes) > -0.12 and all(change <= 1e-9 for change in changes)
    text = whole(comparison_subject(compare_gpus(job, named("RTX 3090"), explain=True)))
    assert "the step is" in text and "shorter" in text and "more in a batch" in text


# --- What comes after an epoch's steps ------------------------------------------------------------

_CONTEXT = 400 * MIB


def planned(job: Job, end: EpochEnd | None, then: EpochEnd | None = None, **limits: Any) -> Job:
    """The job as a plan has it, for an RTX 3090 and with these evaluations."""
    first = Recorded.of(64, job.recording)
    figures = MemoryFigures(GIB, GIB, GIB + _CONTEXT, _CONTEXT, (_CONTEXT, _CONTEXT))
    now = dataclasses.replace(
        PLAN.now, batch_size=64, memory=figures, limits=BatchLimits(None, None, **limits)
    )
    plan = dataclasses.replace(
        PLAN,
        now=now,
        gpu_memory_bytes=24 * GIB,
        recordings=(first, Recorded.of(128, job.pair[1][1])),
        samples=64_000,
        epoch_end=end,
        recommended_epoch_end=then,
    )
    return job_of_plan(plan, Path("plan.json"), on_several=False)


def evaluation(batch: int, gib: float) -> EpochEnd:
    device = round(gib * GIB) + _CONTEXT
    return EpochEnd(
        "simulated", saved=True, allocated_bytes=device, device_bytes=device, batch_size=batch
    )


def test_an_evaluation_that_needs_more_is_what_the_job_uses(job: Job) -> None:
    """It was left out: "uses 5 GiB" stood next to a plan whose evaluation needs 14."""
    after = planned(job, evaluation(64, 10.0), evaluation(32, 6.0))
    assert after.after is not None and after.after.second == (32, 6 * GIB)
    for exact in (True, False):
        small, large = compare_gpus(after, named("custom:8GiB", "custom:20GiB"), exact=exact).gpus[
            ::-1
        ]
        if small.memory_bytes > large.memory_bytes:
            small, large = large, small
        assert not small.fits and large.fits
        assert large.device_bytes > 10 * GIB
        # 2 GiB at no sample and 128 MiB more with each.
        assert 40 <= (small.largest_batch or 0) <= 48
        assert 130 <= (large.largest_batch or 0) <= 144
    text = whole(comparison_subject(compare_gpus(after, named("custom:20GiB"))))
    assert "the evaluation and checkpoint, not training, has the peak of memory" in text


def test_a_lesser_evaluation_changes_nothing(job: Job) -> None:
    gpus = named("custom:8GiB", "RTX 3090")
    lesser = planned(job, evaluation(64, 0.9))
    assert lesser.after is None
    assert compare_gpus(lesser, gpus).gpus == compare_gpus(planned(job, None), gpus).gpus


def test_of_one_evaluation_smaller_batches_are_not_known(job: Job) -> None:
    """It may have a batch size of its own."""
    after = planned(job, evaluation(64, 10.0))
    small, large = (
        compare_gpus(after, named(name)).gpus[0] for name in ("custom:8GiB", "custom:20GiB")
    )
    assert not small.runs and small.largest_batch is None
    assert large.fits and 64 < (large.largest_batch or 0) <= 128


def test_an_evaluation_with_a_batch_size_of_its_own_bounds_no_training(job: Job) -> None:
    """--test-batch-size 1000: 3648 stood where the plan said 30474."""
    end = dataclasses.replace(evaluation(64, 10.0), evaluation_batch_size=1000)
    (own,) = compare_gpus(planned(job, end), named("custom:20GiB")).gpus
    (without,) = compare_gpus(planned(job, None), named("custom:20GiB")).gpus
    assert own.largest_batch == without.largest_batch and (own.largest_batch or 0) > 128
    assert own.device_bytes > 10 * GIB
    twice = dataclasses.replace(end, evaluation_batch_size=128)  # it may follow the training's
    (follows,) = compare_gpus(planned(job, twice), named("custom:20GiB")).gpus
    assert (follows.largest_batch or 0) <= 128


def test_the_rule_of_a_plan_says_what_its_evaluation_allows(job: Job) -> None:
    after = planned(job, evaluation(64, 12.0), evaluation=120).after
    assert after is not None and after.second == (120, 24 * GIB - _CONTEXT)


def test_what_was_not_looked_at_is_told(job: Job, files: tuple[Path, Path]) -> None:
    unseen = planned(job, EpochEnd("not simulated", "it needs a network", batch_size=64))
    note = comparison_subject(compare_gpus(unseen, named("T4"))).notes[0]
    assert note.text.startswith("memory is that of training") and "network" in note.text
    recorded_ones = job_of_recordings([(path, Recording.load(path)) for path in files])
    assert "trainfit plan" in compare_gpus(recorded_ones, named("T4")).unseen
    assert not compare_gpus(planned(job, None), named("T4")).unseen


def test_of_many_gpus_it_is_still_told(job: Job) -> None:
    """It stood behind --explain, below a table that filled the screen."""
    unseen = planned(job, EpochEnd("not simulated", "it needs a network", batch_size=64))
    on_all = comparison_subject(compare_gpus(unseen, catalogue(), exact=False))
    assert "memory is that of training" in screen(on_all)


def test_the_run_has_all_epochs_where_a_loop_tells_them(job: Job) -> None:
    """ "4096 samples in the whole run" stood for one of its three epochs."""
    one = planned(job, None)
    assert one.samples == 64_000 and one.is_one_epoch
    text = whole(comparison_subject(compare_gpus(one, named("RTX 3090"))))
    assert "64000 samples in an epoch" in text and "The epoch" in text
    plan = dataclasses.replace(PLAN, samples=100, coverage=Coverage(False, False, all_epochs=3))
    assert plan.all_samples == 300 and PLAN.all_samples is None


def test_a_limit_is_of_the_whole_job() -> None:
    """--fail-if 'device > 22GiB' compares it."""
    plan = dataclasses.replace(PLAN, epoch_end=evaluation(8, 20.0))
    assert plan.quantities()["device_gib"] == 20 * GIB + _CONTEXT
    assert PLAN.quantities()["device_gib"] == PLAN.now.memory.device_bytes


# --- Files ----------------------------------------------------------------------------------------


def test_a_plan_keeps_its_recordings(job: Job, tmp_path: Path) -> None:
    kept = Recorded.of(64, job.recording)
    assert kept.recording(tmp_path).alloc_bytes.tolist() == job.recording.alloc_bytes.tolist()
    assert kept.recording(tmp_path).header == dict(job.recording.header)
    for content in ("%%%", "aGVsbG8="):
        with pytest.raises(ResultFileError, match="damaged"):
            dataclasses.replace(kept, content=content).recording(tmp_path / "plan.json")


def test_recordings_of_no_one_job_are_refused(job: Job, tmp_path: Path) -> None:
    one, two = (recording for _, recording in job.pair)
    path = tmp_path / "a.trainfit"
    assert job_of_recordings([(path, one)]).pair == ()
    assert [at for at, _ in job_of_recordings([(path, one), (path, two)]).pair] == [64, 128]
    with pytest.raises(JobError, match="another --batch-size"):
        job_of_recordings([(path, one), (path, one)])
    with pytest.raises(JobError, match="one or two"):
        job_of_recordings([(path, one)] * 3)
    other = dataclasses.replace(two, header={**two.header, "script": "other.py"})
    with pytest.raises(JobError, match="different commands"):
        job_of_recordings([(path, one), (path, other)])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("currency = 'USD'\n", "has no prices"),
        ("[per_hour]\n'RTX 9999' = 1\n", "RTX 9999"),
        ("[per_hour]\n'RTX 3090' = -1\n", "write a number above 0"),
        ("[per_hour]\n'RTX 3090' = nan\n", "write a number above 0"),
        ("[per_hour]\n'RTX 3090' = true\n", "write a number above 0"),
        ("[per_hour]\n'RTX 3090' = 1\n'NVIDIA GeForce RTX 3090' = 2\n", "are the same GPU"),
        ("[per_day]\n'RTX 3090' = 1\n", "unknown 'per_day'"),
        ("currency = 3\n[per_hour]\n'RTX 3090' = 1\n", "currency 3"),
        ("RTX 3090: 1\n", "is not valid TOML"),
        ("\xff", "is not valid TOML"),
    ],
)
def test_bad_prices_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PriceFileError, match=r"prices\.toml") as error:
        load_prices(path)
    assert says in str(error.value) and "\n" not in str(error.value).replace("\\n", "")


def test_prices_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('currency = "EUR"\n[per_hour]\n"RTX 4090" = 0.4\n"NVIDIA H200" = 3\n')
    assert load_prices(path) == Prices("EUR", {"RTX 4090": 0.4, find_gpu("H200").key: 3.0})


# --- The command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_table_is_within_its_width_and_names_every_gpu(job: Job) -> None:
    prices = Prices("USD", {gpu.key: 0.5 for gpu in catalogue()})
    subject = comparison_subject(compare_gpus(job, catalogue(), prices))
    text = whole(subject)
    table = text.partition("The columns")[0]
    for gpu in catalogue():
        assert any(line.strip().startswith(gpu.key) for line in table.splitlines()), gpu.key
    assert max(map(len, text.splitlines())) <= WIDTH
    assert text.startswith("Cheapest and best per USD")
    short = screen(subject).splitlines()
    assert len(short) <= 25 and short[0].startswith("Cheapest and best per USD")
    shown = [
        gpu.key for gpu in catalogue() if any(line.startswith(f"  {gpu.key} ") for line in short)
    ]
    assert len(shown) > 8 and f"{46 - len(shown)} more GPUs" in short[-1]


def test_gpus_for_a_job(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = map(str, files)
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "USD"\n[per_hour]\n"RTX 3090" = 0.2\n"RTX 4090" = 0.5\n')
    words = ["gpus", "RTX 3090", "RTX 4090", "--for", one, "--for", two, "--samples", "100000"]
    assert main([*words, "--price", str(prices), "--budget", "5", "--json"]) == 0
    result = GpuComparison.from_json(capsys.readouterr().out, tmp_path)
    assert [estimate.gpu for estimate in result.gpus] == ["RTX 3090", "RTX 4090"]
    assert result.cheapest == "RTX 3090" and result.samples == 100_000
    assert main([*words, "--measured", "RTX 3090=20ms", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "scaled by the 20 ms measured on RTX 3090" in text
    assert "With 10% more of it" in text
    assert max(map(len, text.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--price", "p.toml"], "add --for FILE"),
        (["--budget", "3"], "add --for FILE"),
        (["--for", "missing.json"], "there is no such file"),
        (["--for", "ONE", "--budget", "3"], "add --price FILE"),
        (["--for", "ONE", "--price", "PRICES", "--budget", "3"], "add --samples N"),
        (["--for", "ONE", "--list"], "--list shows figures"),
        (["--for", "ONE", "--measured", "0.2s"], "expected GPU=TIME"),
        (["--for", "ONE", "--measured", "RTX 9999=0.2s"], "RTX 9999"),
        (["--for", "ONE", "--samples", "0"], "expected a positive integer"),
        (["--for", "ONE", "--for", "ONE"], "another --batch-size"),
        (["--for", "GARBAGE"], "damaged"),
    ],
)
def test_bad_input_is_one_line(
    files: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    prices, garbage = tmp_path / "prices.toml", tmp_path / "garbage"
    prices.write_text('[per_hour]\n"RTX 3090" = 0.2\n')
    garbage.write_text("{")
    places = {"ONE": str(files[0]), "PRICES": str(prices), "GARBAGE": str(garbage)}
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["gpus", *(places.get(word, word) for word in words)]))
    assert ended.value.code == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "error: " in x]
    assert says in line
