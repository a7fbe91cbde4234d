"""Clipping where the optimizer averages gradients: the norm of the average, and steps with the bits of one device."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import DEVICE, ON_GPUS, run
from host_graphs import capture_on_hosts
from models import Awkward, give_gradients, gradient, mean_gradient, rules

import quintic

MAX_NORM = 0.5

# A matrix among others of its shape, stacks, and parameters of AdamW; nobody has a gradient of the last one.
MISSING = ("stack.2.weight", "experts.up", "embedding.weight", "mlp.0.bias")
NOWHERE = "attention.qkv.weight"


def optimizer_of(model, comms="none", **options):
    of_tables = {"comms": comms}
    comms = comms.removesuffix("_sparse")  # matrices have no rows that are zero
    groups = quintic.param_groups(model, rules=rules(model), adamw=of_tables, muon={"comms": comms})
    # Cautious decay, so that AdamW is not PyTorch's fused one, which rounds the ends of tensors otherwise.
    options = {
        "compute_dtype": torch.float32,
        "weight_decay": 0.1,
        "adamw_weight_decay": 0.1,
        "cautious": True,
        **options,
    }
    return quintic.Muon(groups, lr=0.05, adamw_lr=0.01, **options)


class Twins:
    """A model on several ranks, and the same on one device; their gradients."""

    def __init__(self, rank, world_size, dtype, comms, **options):
        self.rank, self.ranks = rank, range(world_size)
        self.one, self.many = Awkward(extras=True, dtype=dtype), Awkward(extras=True, dtype=dtype)
        self.optimizers = optimizer_of(self.one), optimizer_of(self.many, comms=comms, **options)

    def give(self, step, gaps=False, unseen=False):
        """Set `p.grad`; or write to those that are there, unseen by their version, as a CUDA graph does."""
        last = self.ranks[-1]
        without = {NOWHERE: self.ranks, **{name: [last] for name in MISSING}} if gaps else {}
        means, own = {}, {}
        for name, param in self.one.named_parameters():
            missing = without.get(name, ())
            all_miss_it = len(missing) == len(self.ranks)
            given = name, param.shape, param.dtype, step
            means[name] = None if all_miss_it else mean_gradient(*given, self.ranks, missing)
            own[name] = None if self.rank in missing else gradient(*given, self.rank)
        give_gradients(self.one, means)
        if unseen:
            for name, param in self.many.named_parameters():
                if own[name] is not None:
                    param.grad.data.copy_(own[name])
        else:
            give_gradients(self.many, own)
        return own

    def clip(self, **options):
        norms = [quintic.clip_grad_norm_(optimizer, MAX_NORM, **options) for optimizer in self.optimizers]
        assert torch.equal(*norms), f"norm {norms[1].item()!r} instead of {norms[0].item()!r}"
        return norms[0]

    def step(self, averages=False):
        """Step both; nothing may be averaged again, unless told so."""
        self.optimizers[0].step()
        sent = []

        def counting(received, sending, *args, **kwargs):
            sent.append(sending.numel())
            return original(received, sending, *args, **kwargs)

        original = dist.all_to_all_single
        with mock.patch.object(dist, "all_to_all_single", counting):
            self.optimizers[1].step()
        assert bool(sent) == averages

    def check(self, where, rtol=0.0, atol=0.0):
        others = dict(self.many.named_parameters())
        pairs = [(name, param, others[name]) for name, param in self.one.named_parameters()]
        wrong = [name for name, one, many in pairs if not torch.allclose(one, many, rtol, atol)]
        assert not wrong, f"{where}: {wrong}"


def check_steps(rank, world_size, dtype, comms, options):
    twins = Twins(rank, world_size, dtype, comms, **options)
    for step, scope in enumerate(["all", "all"]):
        own = twins.give(step, gaps=step == 1)
        kept = {name: value if value is None else value.clone() for name, value in own.items()}
        assert twins.clip(scope=scope) > MAX_NORM
        for name, param in twins.many.named_parameters():
            assert (param.grad is None) == (kept[name] is None), name
            if comms == "sharded" and kept[name] is not None:
                assert torch.equal(param.grad, kept[name]), name
        twins.step()
        twins.check(f"step {step}")

    # The groups of AdamW first, and then all, of which those are averaged already.
    twins.give(2)
    twins.clip()
    twins.clip(scope="all")
    twins.step()
    twins.check("twice")

    # Some groups only: the others are averaged in the step. A second step is not clipped.
    for step in (3, 4):
        twins.give(step)
        if step == 3:
            twins.clip()
        twins.step(averages=True)
        twins.check("scope" if step == 3 else "without")

    # Measured alone.
    twins.give(5)
    norms = [quintic.clip_grad_norm_(optimizer, float("inf"), scope="all") for optimizer in twins.optimizers]
    assert torch.equal(*norms)
    twins.step()
    twins.check("measured")


@pytest.mark.parametrize(
    ("world_size", "comms", "dtype", "options"),
    [
        (2, "replicated", torch.float32, {}),
        (3, "replicated", torch.bfloat16, {}),
        (2, "sharded", torch.float32, {}),
        (3, "sharded", torch.bfloat16, {}),
        (3, "sharded", torch.float32, {"max_workspace_bytes": 512}),
        (4, "sharded", torch.float32, {}),
        (3, "sharded_sparse", torch.float32, {}),
    ],
)
def test_norms_and_steps_are_those_of_one_device(world_size, comms, dtype, options):
    run(check_steps, world_size, dtype, comms, options, timeout=60)


def check_touched(rank, world_size, comms):
    twins = Twins(rank, world_size, torch.float32, comms)
    # Another backward pass after all: what was averaged is worthless.
    twins.give(0)
    twins.clip(scope="all")
    twins.give(1)
    twins.step(averages=True)
    twins.check("other tensors")

    # Gradients set to zero in place, and made anew; the last rank has none of some.
    twins.give(2, gaps=True)
    twins.clip(scope="all")
    gradients = {param: param.grad for param in twins.many.parameters()}
    own = twins.give(3, gaps=True)
    for name, param in twins.many.named_parameters():
        if own[name] is not None:
            gradients[param].zero_()
            gradients[param] += own[name]
        param.grad = gradients[param]
    twins.step(averages=True)
    twins.check("new ones")

    # In place: with sharded parts the gradients are those of the ranks, not clipped; two ranks' averages are exact.
    twins.give(4)
    twins.clip(scope="all")
    for param in twins.many.parameters():
        param.grad.mul_(2)
    means = {n: mean_gradient(n, p.shape, p.dtype, 4, twins.ranks) for n, p in twins.one.named_parameters()}
    clipped = {n: p.grad for n, p in twins.one.named_parameters()}
    give_gradients(twins.one, {n: 2 * (means if comms == "sharded" else clipped)[n] for n in means})
    twins.step(averages=True)
    twins.check("in place")

    # Touched in one group, and then another one is clipped: nothing of the first remains.
    twins.give(5)
    twins.clip(scope="all")
    own = twins.give(6)
    twins.clip()
    give_gradients(twins.many, own) if comms == "sharded" else None
    twins.step(averages=True)
    if comms != "sharded":
        twins.check("another scope")


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_touched_gradients_are_averaged_again(comms):
    run(check_touched, 2, comms, timeout=60)


def check_unseen(rank, world_size, comms):
    twins = Twins(rank, world_size, torch.float32, comms)
    for step in range(4):
        twins.give(step, unseen=step > 0)
        twins.clip(scope="all")
        twins.step()
        twins.check(f"step {step}")


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_averages_are_those_of_one_step_also_where_a_cuda_graph_writes_gradients(comms):
    run(check_unseen, 2, comms, timeout=60)


def check_captured(rank, world_size, comms, scopes):
    """Return for each step, clipped in its scope or not at all, whether it was the replay of a graph."""
    twins = Twins(rank, world_size, torch.float32, comms)
    one, many = twins.optimizers
    replays = []
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPUS:
            capture_on_hosts(patch, many)
        with quintic.CapturedStep(many) as step_many:
            for step, scope in enumerate(scopes):
                twins.give(step, gaps=True, unseen=step in (4, 9))
                if scope is not None:
                    twins.clip(scope=scope)
                one.step()
                with mock.patch.object(many, "step", wraps=many.step) as usual:
                    step_many()
                replays.append(not usual.called)
                twins.check(f"step {step}")
    return replays


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_a_captured_step_takes_the_averages_of_each_clipping(comms):
    """A replay makes no averages, and takes those of the groups that it was captured with."""
    scopes = ["all"] * 5 + [None, "all", "adamw", "all", "all"]
    replays = [False] * 2 + [True] * 3 + [False, True, False, True, True]
    assert run(check_captured, 2, comms, scopes, timeout=60) == [replays] * 2


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_a_step_captured_without_clipping_is_not_replayed_after_one(comms):
    replays = [False] * 2 + [True] * 2 + [False, True]
    assert run(check_captured, 2, comms, [None] * 4 + ["all", None], timeout=60) == [replays] * 2


def check_verify(rank, world_size, comms):
    twins = Twins(rank, world_size, torch.float32, comms)
    for step in range(2):
        twins.give(step, gaps=True)
        twins.clip(scope="all")
        report = quintic.verify(twins.many, twins.optimizers[1])
        assert report.ok, str(report)
        assert ON_GPUS or report.is_bitwise, str(report)
        twins.step()
        twins.check(f"step {step}")
    twins.give(2)
    twins.clip(scope="all")
    twins.optimizers[0].step()
    quintic.reference_step(twins.optimizers[1])
    # On GPUs the products of a step are rounded otherwise than the reference's.
    tolerance = (1e-4, 1e-5) if ON_GPUS else (0.0, 0.0)
    twins.check("reference", *tolerance)
    twins.give(3)
    twins.step(averages=True)
    twins.check("after the reference", *tolerance)


@pytest.mark.parametrize("comms", ["replicated", "sharded", "sharded_sparse"])
def test_verify_takes_the_clipped_averages_and_leaves_them(comms):
    run(check_verify, 3, comms, timeout=60)


def check_not_finite(rank, world_size, comms):
    twins = Twins(rank, world_size, torch.float32, comms, on_nonfinite="raise")
    before = [param.detach().clone() for param in twins.many.parameters()]
    twins.give(0)
    if rank == 1:
        twins.many.norm.weight.grad[3] = float("inf")
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        quintic.clip_grad_norm_(twins.optimizers[1], MAX_NORM, error_if_nonfinite=True)
    assert not quintic.clip_grad_norm_(twins.optimizers[1], MAX_NORM).isfinite()
    with pytest.raises(FloatingPointError):
        twins.optimizers[1].step()
    assert all(torch.equal(p, kept) for p, kept in zip(twins.many.parameters(), before, strict=True))
    twins.give(1)
    twins.clip(scope="all")
    twins.step()
    twins.check("afterwards")


@pytest.mark.parametrize("comms", ["replicated", "sharded"])
def test_a_norm_that_is_not_finite(comms):
    run(check_not_finite, 2, comms, timeout=60)


def check_several_groups(rank, world_size):
    """Some parameters are averaged by the optimizer and others are not; one group waits for its turn."""
    sizes = {"a": 3, "b": 4, "c": 5, "d": 6}
    params = {name: torch.nn.Parameter(torch.ones(size, device=DEVICE)) for name, size in sizes.items()}
    names = dict(zip(params, ("replicated", "sharded", "averaged", "sharded"), strict=True))
    groups = [
        {"params": [(name, params[name])], "comms": comms, "step_every": 1 + (name == "d")}
        for name, comms in names.items()
    ]
    optimizer = quintic.Muon([{**group, "algorithm": "adamw"} for group in groups])
    for name, param in params.items():
        param.grad = torch.full_like(param, 2.0 if name == "c" else 1.0 + 2 * rank)
    norm = quintic.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == pytest.approx((4 * (3 + 4 + 5)) ** 0.5)
    assert params["a"].grad.tolist() == pytest.approx([2 / norm.item()] * 3)
    assert params["b"].grad.tolist() == [1.0 + 2 * rank] * 4
    assert params["d"].grad.tolist() == [1.0 + 2 * rank] * 6


def test_only_what_is_stepped_next_is_averaged():
    run(check_several_groups, 2)


def check_inference_mode(rank, world_size, comms):
    """Gradients that were computed by hand, in inference mode on rank 0: PyTorch lets no one change them."""
    shapes = {"weight": (6, 4), "bias": (5,), "head": (6, 4)}
    stepped = []
    for of_rank in (None, 0):
        torch.manual_seed(0)
        params = {name: torch.nn.Parameter(torch.randn(shape).to(DEVICE)) for name, shape in shapes.items()}
        groups = [{"params": [(name, param)], "algorithm": "adamw"} for name, param in params.items()]
        groups[0]["algorithm"] = "muon"
        optimizer = quintic.Muon(groups, lr=0.1, comms=comms)
        optimizer.tie("weight", "head")
        for clips in (True, False):
            with torch.inference_mode(rank == of_rank):
                for name, param in params.items():
                    param.grad = gradient(name, param.shape, param.dtype, 0, 0 if comms == "averaged" else rank)
            if clips:
                quintic.clip_grad_norm_(optimizer, 1e-3, scope="all")
            optimizer.step()
        stepped.append([param.detach() for param in params.values()])
    assert all(map(torch.equal, *stepped))


@pytest.mark.parametrize("comms", ["averaged", "replicated", "sharded"])
def test_gradients_made_in_inference_mode_are_averaged_clipped_and_stepped(comms):
    """Clipping ended by errors of PyTorch's that named nothing, and averages with one rank waiting for another."""
    run(check_inference_mode, 2, comms, timeout=30)


def check_one_rank_has_gradients(rank, world_size, comms, between):
    """Clip, but step nothing of it; then only rank 0 has a gradient, and the other one averages all the same."""
    size = 5
    param, alone = (torch.nn.Parameter(torch.ones(size, device=DEVICE)) for _ in range(2))
    optimizer = quintic.Muon([{"params": [param], "algorithm": "adamw"}], comms=comms)
    gradient = torch.arange(1.0, size + 1, device=DEVICE)
    if rank == 0:
        param.grad = gradient.clone()
    quintic.clip_grad_norm_(optimizer, 1.0)
    optimizer.zero_grad()
    if between:
        optimizer.param_groups[0]["comms"] = between
        optimizer.step()
        optimizer.param_groups[0]["comms"] = comms
    if rank == 0:
        param.grad = gradient.clone()
    optimizer.step()
    alone.grad = gradient / world_size
    quintic.Muon([{"params": [alone], "algorithm": "adamw"}]).step()
    assert torch.equal(param, alone)


@pytest.mark.parametrize(
    ("comms", "between"), [("replicated", "none"), ("replicated", ""), ("sharded", ""), ("sharded_sparse", "")]
)
def test_averages_of_a_step_that_was_left_out_are_forgotten_on_all_ranks(comms, between):
    """A rank without gradients took them for those of the next step, and did not join it: the others waited forever."""
    run(check_one_rank_has_gradients, 2, comms, between, timeout=30)


def change_comms(rank, world_size, before, after):
    twins = Twins(rank, world_size, torch.float32, before)
    twins.give(0)
    twins.clip(scope="all")
    for group in twins.optimizers[1].param_groups:
        group["comms"] = after
    twins.step(averages=True)
    # Gradients were scaled before their average was made, which rounds otherwise.
    twins.check("averaged by other owners", rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("before", "after"), [("sharded", "replicated"), ("replicated", "sharded")])
def test_averages_for_other_owners_are_made_again(before, after):
    run(change_comms, 2, before, after)
