"""Cases of test_triton.py: every candidate of every tunable kernel gives the bits of the shipped configuration."""

from dataclasses import asdict

import pytest
import torch
from triton.runtime.errors import OutOfResources

from quintic.kernels.configurations import TUNABLES, Tunable
from quintic.kernels.dispatch import triton_is_interpreted
from quintic.kernels.tuning import same_bits
from quintic.kernels.tuning_problems import subjects

DEVICE = torch.device("cpu") if triton_is_interpreted() else torch.device("cuda", torch.cuda.current_device())
SUBJECTS = {subject.tunable.name: subject for subject in subjects(DEVICE)}


def test_every_tunable_kernel_has_its_problems():
    assert list(SUBJECTS) == list(TUNABLES)
    assert all(subject.timed and subject.compared for subject in SUBJECTS.values())


@pytest.mark.parametrize("name", TUNABLES)
def test_candidates_give_the_shipped_bits(name):
    subject = SUBJECTS[name]
    if subject.obstacle is not None:
        pytest.skip(subject.obstacle)
    for candidate in distinct(subject.tunable.candidates(DEVICE)):
        try:
            assert same_bits(subject, candidate, DEVICE), candidate
        except OutOfResources:  # this device has less memory than another one
            assert DEVICE.type == "cuda"


def distinct(candidates):
    """Those that the interpreter can tell apart; on a device, all."""
    if DEVICE.type == "cuda":
        return candidates
    ignored = {"num_warps": 0, "num_stages": 0}
    return list({tuple({**asdict(one), **ignored}.items()): one for one in candidates}.values())


@pytest.mark.parametrize("name", TUNABLES)
def test_problems_are_repeatable_and_launch_their_kernel(name, monkeypatch):
    """A comparison of what no launch has written would find everything equal."""
    subject = SUBJECTS[name]
    if subject.obstacle is not None:
        pytest.skip(subject.obstacle)
    asked = []
    on = Tunable.on
    monkeypatch.setattr(Tunable, "on", lambda self, device: asked.append(self.name) or on(self, device))
    for owner, empty in ((torch, "empty"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, empty, poisoned(getattr(owner, empty)))
    for problem in subject.compared:
        asked.clear()
        run = problem(DEVICE)
        results = run()
        # The large tile is always asked for: it decides whether there are enough of them.
        assert asked[-1] == name
        assert not any(result.isnan().any() for result in results if result.is_floating_point())
        first = bits(results)
        assert all(torch.equal(x, y) for x, y in zip(first, bits(problem(DEVICE)()), strict=True))
        if results[0].data_ptr() == run()[0].data_ptr():  # in place: a second step goes on from the first
            assert not all(torch.equal(x, y) for x, y in zip(first, bits(results), strict=True))


def poisoned(empty):
    def filled(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    return filled


def bits(tensors):
    return [tensor.clone().view(torch.uint8) for tensor in tensors]
