"""The search for better launch configurations."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

import quintic
from quintic.errors import ConfigError
from quintic.kernels import tuning, tuning_problems
from quintic.kernels.configuration_cache import cache_file, device_key, read_configurations
from quintic.kernels.configurations import TUNABLES, Configuration, Tunable, candidates_by_name
from quintic.kernels.tuning_problems import Subject

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an A100, as far as its names go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    return device_key(GPU)


# -- the search -------------------------------------------------------------------------------------------------------


class Toy:
    """A kernel whose time and bits follow from its number of warps, and a clock that it moves."""

    def __init__(self, times, *, wrong=(), broken=(), inputs=1, name="toy", device=CPU):
        self.times = times
        self.wrong = wrong
        self.broken = broken
        self.device = device
        self.now = 0.0
        self.tunable = Tunable(name, Configuration(num_warps=8), [{"num_warps": n} for n in times if n != 8])
        problems = [self.problem(number) for number in range(inputs)]
        self.subject = Subject(self.tunable, problems, problems)

    def problem(self, number):
        def run():
            warps = self.tunable.on(self.device).num_warps
            if warps in self.broken:
                raise RuntimeError(f"out of resource\n{warps} warps")
            return [torch.tensor([number + 0.5 * (warps in self.wrong)])]

        run.number = number
        return lambda device: run

    def sampler(self, run):
        self.now += 1
        run()
        times = self.times[self.tunable.on(self.device).num_warps]
        if callable(times):
            return times
        return lambda: times[run.number] if isinstance(times, tuple) else times

    def search(self, seconds=100.0):
        return tuning.search(
            [self.subject], self.device, seconds, clock=lambda: self.now, sampler=lambda run: self.sampler(run)
        )[0]


def verdicts(report):
    return {trial.configuration.num_warps: trial.verdict for trial in report.trials}


def test_the_fastest_is_taken():
    report = Toy({8: 1.0, 4: 0.9, 2: 0.7, 16: 0.8}).search()
    assert report.best == Configuration(num_warps=2)
    assert report.ratio == pytest.approx(0.7)
    assert verdicts(report) == {4: "faster", 2: "faster", 16: "no faster"}
    assert str(report) == "toy              0.70 x shipped  num_warps=2; tried 3 of 3: 2 faster, 1 no faster"


def test_what_is_slower_or_within_the_noise_is_not():
    report = Toy({8: 1.0, 4: 1.2, 2: 0.98}).search()
    assert report.best == report.shipped == Configuration(num_warps=8)
    assert report.ratio == 1.0
    assert verdicts(report) == {4: "no faster", 2: "no faster"}
    assert "(as shipped)" in str(report)


def test_other_bits_are_refused_however_fast():
    report = Toy({8: 1.0, 4: 0.1, 2: 0.9}, wrong=(4,)).search()
    assert report.best == Configuration(num_warps=2)
    assert verdicts(report) == {4: "other bits", 2: "faster"}


def test_bits_tell_zeros_of_both_signs_apart_and_find_equal_not_a_numbers():
    toy = Toy({8: 1.0, 4: 1.0})
    results = {8: torch.tensor([0.0, float("nan")]), 4: torch.tensor([0.0, float("nan")])}
    subject = Subject(toy.tunable, [], [lambda device: lambda: [results[toy.tunable.on(CPU).num_warps]]])
    assert tuning.same_bits(subject, Configuration(num_warps=4), CPU)
    results[4] = torch.tensor([-0.0, float("nan")])
    assert not tuning.same_bits(subject, Configuration(num_warps=4), CPU)


def test_fast_once_is_not_fast():
    samples = iter([0.5] * 9 + [1.0] * 100)
    report = Toy({8: 1.0, 4: lambda: next(samples)}).search()
    assert verdicts(report) == {4: "no faster"}


def test_an_outlier_counts_for_nothing():
    samples = iter([50.0, 0.8, 0.8, 0.8, 50.0, 0.8, 0.8, 0.8, 50.0] * 2)
    assert verdicts(Toy({8: 1.0, 4: lambda: next(samples)}).search()) == {4: "faster"}


def test_no_input_may_lose():
    toy = Toy({8: (1.0, 1.0), 4: (0.5, 1.1), 2: (0.9, 1.0)}, inputs=2)
    assert verdicts(toy.search()) == {4: "no faster", 2: "faster"}


def test_what_does_not_run_is_passed_over():
    report = Toy({8: 1.0, 4: 0.5, 2: 0.9}, broken=(4,)).search()
    assert verdicts(report) == {4: "does not run", 2: "faster"}
    assert report.trials[0].error == "RuntimeError: out of resource"
    broken = Toy({8: 1.0, 4: 0.5}, broken=(8,)).search()
    assert broken.trials == ()
    assert str(broken).endswith("not searched: the shipped configuration does not run: RuntimeError: out of resource")


def test_no_candidate_is_begun_after_the_time():
    times = {8: 1.0, 4: 0.9, 2: 0.8, 16: 0.7}
    # One unit for the baseline and one for each candidate.
    for seconds, tried in ((0.5, 0), (1.5, 1), (2.5, 2), (9.0, 3)):
        report = Toy(times).search(seconds)
        assert len(report.trials) == tried
    assert Toy(times).search(0.5).skipped == "the time was over"


def test_time_that_is_left_over_goes_to_the_next():
    quick, slow = Toy({8: 1.0, 4: 1.0}, name="quick"), Toy({8: 1.0, 4: 1.0, 2: 1.0, 16: 1.0, 1: 1.0}, name="slow")
    toys = {quick.tunable.name: quick, slow.tunable.name: slow}

    def sampler(run):
        toy = quick if run is quick.subject.timed[0](CPU) else slow
        return toy.sampler(run)

    reports = tuning.search(
        [quick.subject, slow.subject],
        CPU,
        6.0,
        clock=lambda: sum(toy.now for toy in toys.values()),
        sampler=sampler,
    )
    # Two of six units for the first; four are left: a baseline and three of the four candidates.
    assert [len(report.trials) for report in reports] == [1, 3]


def test_what_is_in_use_is_tried_first_and_kept_where_nothing_was():
    toy = Toy({8: 1.0, 4: 0.9, 2: 0.8})
    in_use = Configuration(num_warps=2)
    with toy.tunable.using(in_use, CPU):
        assert toy.search(1.5).trials[0].configuration == in_use
        assert toy.search(0.0).best == in_use


# -- tune -------------------------------------------------------------------------------------------------------------


def test_mistakes(monkeypatch):
    for given, message in (
        ({"only": "symetric"}, "only='symetric': did you mean 'symmetric'?"),
        ({"only": ["adamw", "zzz"]}, "only='zzz': choose from momentum, weights"),
        ({"seconds": 0}, "seconds=0: give a number above 0"),
        ({"seconds": float("nan")}, "seconds=nan: give a number above 0"),
        ({"device": "cpu"}, "device='cpu': tuning needs a CUDA device"),
        ({"device": "abc"}, "device='abc': "),
    ):
        with pytest.raises(ConfigError) as caught:
            quintic.kernels.tune(**given)
        assert str(caught.value).startswith(message)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"tuning needs a CUDA device.*; PyTorch finds none here"):
        quintic.kernels.tune()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device='cuda:2': there are 2 CUDA devices"):
        quintic.kernels.tune("cuda:2")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        quintic.kernels.tune("cuda:1")
    monkeypatch.setattr(tuning, "triton_is_installed", lambda: False)
    with pytest.raises(ConfigError, match="pip install triton"):
        quintic.kernels.tune("cuda:1")


def test_what_was_found_is_kept_and_used(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    toy = Toy({8: 1.0, 4: 0.5}, name="adamw", device=GPU)
    idle = Subject(TUNABLES["weights"], [], [], "nothing launches it")
    monkeypatch.setattr(tuning_problems, "subjects", lambda device: [toy.subject, idle])
    monkeypatch.setattr(tuning, "_graph_sampler", toy.sampler)
    report = quintic.kernels.tune("cuda:0", only=["adamw", "weights"])
    assert [kernel.name for kernel in report.kernels] == ["adamw", "weights"]
    lines = str(report).splitlines()
    assert lines[0].startswith("NVIDIA A100, compute capability 8.0, torch ")
    assert lines[1].startswith("adamw            0.50 x shipped  num_warps=4; ")
    assert lines[2:] == ["weights         not searched: nothing launches it", f"kept in {cache_file(gpu)}"]
    assert read_configurations(gpu, candidates_by_name()) == {"adamw": {"num_warps": 4}}
    assert TUNABLES["adamw"].on(GPU) == Configuration(num_warps=4)


@pytest.mark.usefixtures("gpu")
def test_it_is_found_out_before_the_search_that_nothing_can_be_kept(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUINTIC_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tuning, "search", None)
    with pytest.raises(ConfigError, match="cannot be written"):
        quintic.kernels.tune("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(300)
def test_a_search_on_the_device_changes_no_bit(own_cache):
    device = torch.device("cuda", torch.cuda.current_device())

    def bits():
        launched = [subject for subject in tuning_problems.subjects(device) if subject.obstacle is None]
        results = [problem(device)() for subject in launched for problem in subject.compared]
        return [tensor.cpu().view(torch.uint8) for tensors in results for tensor in tensors]

    before = bits()
    report = quintic.kernels.tune(seconds=5)
    assert [kernel.name for kernel in report.kernels] == list(TUNABLES)
    assert list(own_cache.iterdir()) == [report.path]
    tried = [kernel for kernel in report.kernels if kernel.trials]
    assert tried
    assert {kernel.name: kernel.best for kernel in tried} == {
        kernel.name: TUNABLES[kernel.name].on(device) for kernel in tried
    }
    assert all(torch.equal(x, y) for x, y in zip(before, bits(), strict=True))
