"""`check_update_rule`: the library's rules pass it, and rules with one mistake each are caught by name."""

import os
import subprocess
import sys
import textwrap
import threading
import types
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist

import quintic
from quintic.testing import check_update_rule, processes
from quintic.testing.processes import run_on_ranks
from quintic.testing.stages import check_stages
from quintic.testing.steps import CASES, Trained, check_one_device, wrong_matrix
from quintic.update_rules import (
    MOMENTUM,
    RULES,
    WEIGHT,
    DriftStage,
    GradientStage,
    MatrixStage,
    PolarStage,
    StateSpec,
    UpdateRule,
    WeightStage,
    norms,
)


# These have all kinds of stages but `PolarStage`; the next test tries the stages of all rules.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["nanochat", "muown", "ema_nesterov"])
def test_the_rules_of_the_library_pass(name):
    done = check_update_rule(name)
    assert {"stages", "float64, one device", "float32, FSDP2", "checkpoints"} <= set(done)


@pytest.mark.parametrize("name", RULES)
def test_the_stages_of_the_library_pass(name):
    assert check_stages(RULES[name]) == []


# -- one mistake each --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Centred(MatrixStage):
    """Looks at the other matrices."""

    label = "centred"

    def apply(self, matrices, state, options):
        return matrices - matrices.mean(0), None


@dataclass(frozen=True)
class Clamped(MatrixStage):
    """Changes its input."""

    label = "clamped"

    def apply(self, matrices, state, options):
        return matrices.clamp_(-1, 1), None


@dataclass(frozen=True)
class Counting(MatrixStage):
    """Counts its calls in Python."""

    label = "counting"
    calls = []  # noqa: RUF012

    def apply(self, matrices, state, options):
        self.calls.append(None)
        return matrices / len(self.calls), None


@dataclass(frozen=True)
class Caching(MatrixStage):
    """Keeps an average of its own, which neither skipped steps nor checkpoints know of."""

    label = "caching"
    averages = {}  # noqa: RUF012

    def apply(self, matrices, state, options):
        if matrices.is_meta:
            return matrices.clone(), None
        average = self.averages.setdefault((matrices.shape, matrices.dtype), torch.zeros_like(matrices))
        average.lerp_(matrices, 0.1)
        return average.clone(), None


@dataclass(frozen=True)
class Forgetful(MatrixStage):
    """Does not declare its state."""

    label = "forgetful"

    def apply(self, matrices, state, options):
        return matrices + state["unknown_buffer"], None


@dataclass(frozen=True)
class FromZero(MatrixStage):
    """Divides by state that begins at zero, and never leaves it for a matrix of zeros."""

    label = "from zero"
    state = (StateSpec("test_square", "wide", "rows"),)

    def apply(self, matrices, state, options):
        square = state["test_square"]
        square.lerp_(norms(matrices.float(), -1).square(), 0.1)
        return matrices / square.sqrt(), None


@dataclass(frozen=True)
class Replacing(MatrixStage):
    """Puts a new tensor in place of its state."""

    label = "replacing"
    state = (StateSpec("test_average", "wide", "param"),)

    def apply(self, matrices, state, options):
        state["test_average"] = state["test_average"] * 0.9 + matrices * 0.1
        return state["test_average"].clone(), None


@dataclass(frozen=True)
class Asking(MatrixStage):
    """Waits for the device."""

    label = "asking"

    def apply(self, matrices, state, options):
        return (matrices * 2 if float(matrices.abs().max()) < 0 else matrices.clone()), None


@dataclass(frozen=True)
class Deciding(MatrixStage):
    """Decides on the host, and so differently for each batch."""

    label = "deciding"

    def apply(self, matrices, state, options):
        if matrices.abs().max() > 2.5:
            return matrices / 2, None
        return matrices.clone(), None


@dataclass(frozen=True)
class Bounded(GradientStage):
    """Decides for all of a piece."""

    label = "bounded"

    def apply(self, gradient, state, options):
        return gradient / 2 if bool((gradient > 2).any()) else gradient


@dataclass(frozen=True)
class Alpha(GradientStage):
    """Gives an option to an argument that takes numbers of the host only."""

    label = "alpha"

    def apply(self, gradient, state, options):
        return gradient.add(gradient, alpha=1 - options.momentum)


@dataclass(frozen=True)
class Elsewhere(MatrixStage):
    """Makes a tensor on the CPU, wherever the matrices are."""

    label = "elsewhere"

    def apply(self, matrices, state, options):
        return matrices * torch.full(matrices.shape, 0.5), None


@dataclass(frozen=True)
class Silent(MatrixStage):
    """Raises an error without a text."""

    label = "silent"

    def apply(self, matrices, state, options):
        raise AssertionError


@dataclass(frozen=True)
class FixedRate(WeightStage):
    """Reads the learning rate as a number, which a captured step would keep for ever."""

    label = "fixed rate"
    numbers = "matrix"

    def apply(self, weights, updates, scales, state, options):
        return torch.ones_like(scales), scales * float(options.lr)


@dataclass(frozen=True)
class Noisy(MatrixStage):
    """Draws random numbers."""

    label = "noisy"

    def apply(self, matrices, state, options):
        return matrices + torch.randn(matrices.shape, device=matrices.device) * 0.01, None


@dataclass(frozen=True)
class Wide(WeightStage):
    """Returns a number for each row, and declares one for each matrix."""

    label = "wide"
    numbers = "matrix"

    def apply(self, weights, updates, scales, state, options):
        return torch.ones_like(weights[..., :1]), scales * options.lr


@dataclass(frozen=True)
class Undeclared(MatrixStage):
    """Returns factors that it does not declare."""

    label = "undeclared"

    def apply(self, matrices, state, options):
        return matrices, torch.ones_like(matrices[..., :1])


@dataclass(frozen=True)
class Normalized(GradientStage):
    """Looks at all of a piece, of which others may hold the rest."""

    label = "normalized"

    def apply(self, gradient, state, options):
        return gradient / (gradient.norm() + 1e-8)


def _clipped(x, roots):
    limit = x.square().mean().sqrt() * roots
    return torch.minimum(torch.maximum(x, -limit), limit)


@dataclass(frozen=True)
class Outlying(GradientStage):
    """Clips by the root mean square of a piece, which ordinary entries do not reach."""

    label = "outlying"
    roots: float = 6.0

    def apply(self, gradient, state, options):
        return _clipped(gradient, self.roots)


@dataclass(frozen=True)
class OutlyingInBatch(MatrixStage):
    """Clips by the root mean square of a batch, which ordinary entries do not reach."""

    label = "outlying in a batch"
    roots: float = 6.0

    def apply(self, matrices, state, options):
        return _clipped(matrices, self.roots), None


@dataclass(frozen=True)
class Itself(GradientStage):
    """Returns its state itself."""

    label = "itself"
    state = (StateSpec(MOMENTUM, "average", "param"),)

    def apply(self, gradient, state, options):
        return state[MOMENTUM].lerp_(gradient, 0.1)


@dataclass(frozen=True)
class Neighbours(DriftStage):
    """Adds up along a row."""

    label = "neighbours"

    def apply(self, step, state, options):
        return step.cumsum(-1) * 0.1


@dataclass(frozen=True)
class Miscounted(PolarStage):
    """Orthogonalises twice, and says once."""

    def rounds_of(self, m, n):
        return 1

    def apply(self, matrices, orthogonalize):
        return orthogonalize(orthogonalize(matrices).to(matrices.dtype))


@dataclass(frozen=True)
class Idle(MatrixStage):
    """Lacks the arithmetic."""

    label = "idle"


@dataclass(frozen=True)
class Uncounted(PolarStage):
    """Does not say how often it orthogonalises."""

    def apply(self, matrices, orthogonalize):
        return orthogonalize(matrices)


BROKEN = {
    "idle": (UpdateRule(title="broken", before=(Idle(),)), "Idle: has no method apply$"),
    "uncounted": (UpdateRule(title="broken", polar=Uncounted()), "Uncounted: has no method rounds_of$"),
    "batch": (UpdateRule(title="broken", before=(Centred(),)), "Centred: depends on the batch: matrices of matrix 0"),
    "input": (UpdateRule(title="broken", after=(Clamped(),)), "Clamped: changes its input: matrices"),
    "calls": (UpdateRule(title="broken", before=(Counting(),)), "Counting: remembers something outside of its state"),
    "cache": (UpdateRule(title="broken", before=(Caching(),)), "Caching: remembers something outside of its state"),
    "undeclared": (UpdateRule(title="broken", before=(Forgetful(),)), "Forgetful: asks for state 'unknown_buffer'"),
    "zero": (UpdateRule(title="broken", after=(FromZero(),)), r"FromZero: is not finite: matrices of matrix 2 \(it is"),
    "replaced": (UpdateRule(title="broken", after=(Replacing(),)), "Replacing: replaces the state 'test_average'"),
    "asks": (
        UpdateRule(title="broken", before=(Asking(),)),
        r"Asking: asks for a value, in line \d+ of test_testing.py: return \(matrices",
    ),
    "decides": (UpdateRule(title="broken", before=(Deciding(),)), "Deciding: asks for a value, in line"),
    "piece": (UpdateRule(title="broken", direction=Bounded()), "Bounded: asks for a value, in line"),
    "alpha": (UpdateRule(title="broken", direction=Alpha()), "Alpha: asks for a value, .*: use torch.where, lerp_"),
    "device": (UpdateRule(title="broken", before=(Elsewhere(),)), "Elsewhere: fails on tensors without values"),
    "silent": (
        UpdateRule(title="broken", before=(Silent(),)),
        r"Silent: raises AssertionError without a message, in line \d+ of test_testing.py: raise AssertionError",
    ),
    "rate": (UpdateRule(title="broken", constrain=FixedRate()), "FixedRate: asks for a value, in line"),
    "random": (UpdateRule(title="broken", before=(Noisy(),)), "Noisy: draws random numbers"),
    "shape": (UpdateRule(title="broken", constrain=Wide()), r"Wide: returns keep of the shape \(5, 6, 1\)"),
    "factors": (UpdateRule(title="broken", after=(Undeclared(),)), "Undeclared: returns factors that it does not"),
    "whole": (UpdateRule(title="broken", direction=Normalized()), "Normalized: is not element-wise: result of rows 0"),
    "outliers": (UpdateRule(title="broken", direction=Outlying()), "Outlying: is not element-wise: result of"),
    "rare outliers": (UpdateRule(title="broken", direction=Outlying(20.0)), "Outlying: is not element-wise: result"),
    "outliers of a batch": (UpdateRule(title="broken", before=(OutlyingInBatch(),)), "InBatch: depends on the batch"),
    "alias": (UpdateRule(title="broken", direction=Itself()), "Itself: returns the memory of its state 'momentum_b"),
    "row": (UpdateRule(title="broken", drift=Neighbours()), "Neighbours: is not element-wise: result of columns"),
    "rounds": (UpdateRule(title="broken", polar=Miscounted()), "Miscounted: orthogonalises 2 times, and rounds_of"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_mistake_in_a_stage_is_named(name):
    rule, message = BROKEN[name]
    [finding] = check_stages(rule)
    assert finding.startswith("stages: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(finding)


@dataclass(frozen=True)
class Ranked(MatrixStage):
    """Another result on another rank, which no single process can see."""

    label = "ranked"

    def apply(self, matrices, state, options):
        rank = dist.get_rank() if dist.is_initialized() else 0
        return matrices * (1.0 + rank), None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_layout_that_differs_is_named_with_its_tensor_and_matrix():
    rule = UpdateRule(title="by rank", after=(Ranked(),))
    with pytest.raises(AssertionError) as caught:
        check_update_rule(rule)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("by rank: ")
    pattern = "float32: FSDP2: tall, weight: matrix 0 of 1, "
    assert any(pattern in line and line.endswith("from one device") for line in lines)
    # Whoever does all of the work agrees with itself.
    assert not any("comms='replicated'" in line for line in lines)


class Broken(Exception):
    pass


@dataclass(frozen=True)
class Raising(MatrixStage):
    label = "raising"

    def apply(self, matrices, state, options):
        raise Broken("no such matrix")


@pytest.mark.slow
def test_a_rule_defined_in_a_function_is_tried_in_other_processes():
    @dataclass(frozen=True)
    class Local(Raising):
        label = "local"

    with pytest.raises(AssertionError, match="mine: 1 finding\n  stages: Local: raises Broken: no such matrix"):
        check_update_rule(UpdateRule(title="mine", before=(Local(),)))


@dataclass(frozen=True)
class Failing(MatrixStage):
    """Fails with weights of which there is one, which no stage by itself is given."""

    label = "failing"

    def apply(self, matrices, state, options):
        if matrices.shape[-2:] == (16, 6):
            raise Broken("sixteen")
        return matrices, None


@pytest.mark.slow
def test_an_error_of_all_dtypes_is_one_finding():
    names = "float32, bfloat16 with mantissas, float64"
    message = f"^mine: 1 finding\n  {names}: one device: Broken: sixteen$"
    with pytest.raises(AssertionError, match=message):
        check_update_rule(UpdateRule(title="mine", before=(Failing(),)))


# -- what only steps of an optimizer show ------------------------------------------------------------------------------


def test_a_mistake_that_only_steps_show_is_named_with_weight_and_matrix(monkeypatch):
    calls = []

    @dataclass(frozen=True)
    class Late(MatrixStage):
        label = "late"

        def apply(self, matrices, state, options):
            calls.append(None)
            return matrices * (2.0 if len(calls) > 40 else 1.0), None

    rule = UpdateRule(title="late", after=(Late(),))
    _, findings = check_one_device(rule, "float32", {})
    assert any("float32: repetition" in line and "weight: matrix 0 of 1" in line for line in findings)


def test_steps_that_go_where_gradients_are_missing_are_found(monkeypatch):
    from quintic.testing import steps

    class Stepping(Trained):
        def step(self, number, **more):
            super().step(number, **more)
            with torch.no_grad():
                self.model.twin.add_(1e-3)

    monkeypatch.setattr(steps, "Trained", Stepping)
    _, findings = check_one_device(RULES["normuon"], "float32", {})
    assert any(line.startswith("float32: missing gradients: ") and "twin, weight" in line for line in findings)
    assert any(line.startswith("float32: on_nonfinite='skip': ") and "twin, weight" in line for line in findings)


def test_infinite_weights_are_found():
    _, findings = check_one_device(RULES["muon"], "float32", {"lr": 1e38})
    assert findings[0].startswith("float32: finite: tall, ")


def test_the_first_matrix_that_differs_is_named():
    whole = torch.zeros(4, 6, 4)
    found = whole.clone()
    found[2, 1, 3] = 0.5
    assert wrong_matrix("experts", found, whole) == "matrix 2 of 4, 1 entries differ, by up to 0.5"
    # Vectors have as many numbers for each matrix.
    assert wrong_matrix("heads", torch.tensor([0.0] * 9 + [1.0] * 3), torch.zeros(12)).startswith(
        "matrix 2 of 3, 3 ent"
    )


def test_cases_have_their_options():
    for name in CASES:
        trained = Trained(RULES["normuon"], name, {"normalize_beta": 0.5})
        assert all(group["normalize_beta"] == 0.5 for group in trained.optimizer.param_groups)


# -- processes ---------------------------------------------------------------------------------------------------------


def wait_for_nobody(rank):
    if rank == 1:
        threading.Event().wait()
    return [], []


def die(rank):
    dist.barrier()  # both are connected
    if rank == 1:
        os._exit(3)
    return ["something"], []


@pytest.mark.slow
def test_ranks_that_wait_for_ever_are_ended():
    with pytest.raises(TimeoutError, match=r"ranks \[1\] had not finished after 4 s"):
        run_on_ranks(wait_for_nobody, 2, timeout=4.0)


@pytest.mark.slow
def test_a_rank_that_dies_is_a_finding():
    assert run_on_ranks(die, 2, timeout=60.0) == (["something"], ["rank 1: the process died"])


def test_a_rule_that_cannot_be_sent_is_an_error_where_processes_are_not_forked(monkeypatch):
    @dataclass(frozen=True)
    class Inside(Raising):
        label = "inside"

    monkeypatch.setattr(processes.sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match="define its stages as classes at the top level of a module"):
        check_update_rule(UpdateRule(title="mine", before=(Inside(),)))


def test_a_rule_that_cannot_be_sent_is_an_error_once_cuda_was_used(monkeypatch):
    @dataclass(frozen=True)
    class Inside(Raising):
        label = "inside"

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    message = "^this process has used CUDA, .* of a module that can be imported, or check the rule before anything uses"
    with pytest.raises(RuntimeError, match=message):
        check_update_rule(UpdateRule(title="mine", before=(Inside(),)))
    # Without a file the main module cannot be imported again.
    monkeypatch.setattr(Raising, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(Raising=Raising))
    with pytest.raises(RuntimeError, match=r"\(it is defined in a notebook or at a prompt\)"):
        check_update_rule(UpdateRule(title="mine", before=(Raising(),)))


HERE = []


def started(rank):
    return ["forked" if HERE else "anew"], []


@pytest.mark.slow
def test_processes_are_started_anew_once_cuda_was_used(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "HERE", [os.getpid()])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert run_on_ranks(started, 2, timeout=120.0) == (["anew"], [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_of_a_user_checks_its_rule(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        textwrap.dedent("""
            from dataclasses import dataclass
            import torch
            torch.randn(500, 500) @ torch.randn(500, 500)  # with threads, before any process is made
            import quintic
            from quintic.testing import check_update_rule
            from quintic.update_rules import MatrixStage

            @dataclass(frozen=True)
            class Halved(MatrixStage):
                label = "halved"

                def apply(self, matrices, state, options):
                    return matrices / 2, None

            print(*check_update_rule(quintic.UpdateRule(title="mine", after=(Halved(),))), sep="\\n")
        """),
        "utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "float32, tensor parallel" in done.stdout.splitlines()


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_what_is_no_rule_is_an_error():
    with pytest.raises(ValueError, match="update_rule='nomuon': choose 'muon'"):
        check_update_rule("nomuon")
    with pytest.raises(TypeError, match="give the name of a rule"):
        check_update_rule(MatrixStage())
    with pytest.raises(ValueError, match="update_rule='None': choose"):
        check_update_rule(None)


def test_a_process_group_is_an_error(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"where torch\.distributed is not initialised"):
        check_update_rule("muon")


def test_public_names_are_those_of_the_library():
    assert quintic.UpdateRule is UpdateRule
    assert quintic.update_rules.RULES is RULES
    assert WEIGHT == "weight"
    assert replace(RULES["muon"], title="mine").title == "mine"


@pytest.mark.gpu
def test_steps_captured_in_cuda_graphs_have_the_same_bits():
    assert "CUDA graphs" in check_update_rule("normuon", gpu=True)
