"""Optimizer state in host memory: the same bits, loaded ahead and stored behind, readable at any moment."""

import copy
import pickle
import random

import pytest
import torch
from delayed_copies import DelayedCopies
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import quintic
from quintic import Experts, Heads, Muon, QKClip, Rows, Split
from quintic.optim.plan.offload_size import POOL_BUFFERS
from quintic.optim.rules.rule import PARAM_SHAPED_STATE
from quintic.optim.step.offload import offload

EXACT = {"orthogonalizer": "polar_express", "compute_dtype": torch.float32}

# So little that a bucket has a matrix or two, and AdamW's state comes in many pieces.
SMALL = 4000

RULES = {
    "muon": EXACT,
    "bf16": {"weight_decay": 0.1, "adamw_weight_decay": 0.1},
    "neuron": {**EXACT, "normalize": "neuron", "weight_decay": 0.1, "adamw_weight_decay": 0.1},
    "cautious": {**EXACT, "weight_decay": 0.3, "adamw_weight_decay": 0.3, "cautious": True},
    "squared": {
        **EXACT,
        "weight_decay": 0.3,
        "adamw_weight_decay": 0.3,
        "decay_coupling": "lr_squared",
        "nesterov": False,
    },
    "element": {**EXACT, "normalize": "element", "state_dtype": "bf16", "weight_decay": 0.1},
    "function": {"orthogonalizer": torch.sign},
    "skip": {**EXACT, "on_nonfinite": "skip"},
}


def parameters(dtype=torch.float32):
    """Parameters of every kind: whose matrices are runs of memory, or lie between each other, or have gaps."""
    torch.manual_seed(0)

    def made(*shape):
        return torch.randn(shape, dtype=torch.float64).to(dtype)

    found = {f"layers.{i}.weight": made(12, 8) for i in range(5)}
    found |= {
        "bank": made(24, 6),
        "experts": made(4, 6, 5),
        "heads": made(6, 24),
        "qkv": made(24, 8),
        "turned": made(5, 9).mT,
        "gaps": made(12, 16)[:, ::2],
        "empty": made(0, 4),
        "table": made(301, 7),
        "sparse": made(40, 16)[:, ::2],
        "bias": made(9),
        "scale": made(),
    }
    return {name: nn.Parameter(value) for name, value in found.items()}


VIEWS = {
    "bank": Rows(4),
    "experts": Experts(transposed=True),
    "heads": Heads(6, dim=1),
    "qkv": Split((4, 2, 2), groups=3),  # queries, keys and values of three groups, interleaved
}
ADAMW = ("table", "sparse", "bias", "scale")


def optimizer_of(params, **options):
    def group(names, **more):
        return {"params": [(name, params[name]) for name in names], **more}

    plain = [name for name in params if name not in VIEWS and name not in ADAMW]
    groups = [group([name], view=view) for name, view in VIEWS.items()]
    return Muon([group(plain), *groups, group(ADAMW, algorithm="adamw")], lr=0.05, adamw_lr=0.01, **options)


def give_gradients(params, step, missing=(), bad=()):
    for name, param in params.items():
        generator = torch.Generator().manual_seed(step * 1000 + sum(map(ord, name)))
        param.grad = None if name in missing else torch.randn(param.shape, generator=generator).to(param.dtype)
        if name in bad:
            param.grad.view(-1)[-1] = float("inf")


def assert_same(first, second):
    """The same weights and state, to the last bit, of two (params, optimizer)."""
    for name, param in first[0].items():
        other = second[0][name]
        assert torch.equal(param, other), name
        mine, theirs = first[1].state[param], second[1].state[other]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), f"{name}: {key}"


@pytest.fixture
def delayed(monkeypatch):
    """Make all copies of optimizers made from now on with a policy; returns the list of those made."""

    def install(policy):
        made = []

        def new_copies(device):
            made.append(DelayedCopies(policy))
            return made[-1]

        monkeypatch.setattr(offload, "Copies", new_copies)
        return made

    return install


def pair(dtype=torch.float32, **options):
    """(params, optimizer) without offload and with it."""
    found = []
    for on in (False, True):
        params = parameters(dtype)
        found.append((params, optimizer_of(params, offload=on, **options)))
    return found


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["late", "early"])
@pytest.mark.parametrize("workspace", [SMALL, 2**31])
@pytest.mark.parametrize("rule", RULES)
def test_bits_do_not_depend_on_where_state_is(rule, workspace, policy, delayed):
    made = delayed(policy)
    plain, hosted = pair(**RULES[rule], max_workspace_bytes=workspace)
    for step in range(4):
        missing = [(), ("layers.1.weight", "heads", "table"), tuple(plain[0]), ("qkv", "bias")][step]
        for params, optimizer in (plain, hosted):
            give_gradients(params, step, missing, bad=["bank"] if rule == "skip" and step in (0, 3) else [])
            optimizer.step()
    assert_same(plain, hosted)
    assert made[0].log
    assert (plain[1].last_step().matrices, plain[1].last_step().adamw_parameters) == (
        hosted[1].last_step().matrices,
        hosted[1].last_step().adamw_parameters,
    )


@pytest.mark.parametrize("policy", ["late", "early"])
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.bfloat16, master) for master in ("fp32", "mantissa", "8bit")], ids=str
)
@pytest.mark.parametrize("workspace", [SMALL, 2**31])
def test_masters_are_offloaded_too(dtype, master, workspace, policy, delayed):
    delayed(policy)
    plain, hosted = pair(
        dtype,
        master=master,
        max_workspace_bytes=workspace,
        normalize="neuron",
        weight_decay=0.1,
        adamw_weight_decay=0.1,
    )
    for step in range(4):
        for params, optimizer in (plain, hosted):
            give_gradients(params, step, ("layers.0.weight", "experts", "scale") if step == 1 else ())
            optimizer.step()
    assert_same(plain, hosted)


def test_float64_state(delayed):
    delayed("late")
    plain, hosted = pair(torch.float64, max_workspace_bytes=SMALL)
    for step in range(3):
        for params, optimizer in (plain, hosted):
            give_gradients(params, step)
            optimizer.step()
    assert_same(plain, hosted)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    workspace=st.sampled_from([200, 1500, 5000, 20_000, 2**31]),
    cadence=st.integers(1, 3),
    rule=st.sampled_from(["muon", "neuron", "skip"]),
    master=st.sampled_from([None, "fp32", "mantissa", "8bit"]),
    data=st.data(),
)
def test_any_gradients_any_order_of_copies_any_time_of_reading(seed, workspace, cadence, rule, master, data):
    with pytest.MonkeyPatch.context() as patch:
        policy = random.Random(seed)
        patch.setattr(offload, "Copies", lambda device: DelayedCopies(policy))
        options = {**RULES[rule], "max_workspace_bytes": workspace, "master": master}
        plain, hosted = pair(torch.bfloat16, **options)
        names = list(plain[0])
        for _, optimizer in (plain, hosted):
            optimizer.param_groups[-1]["step_every"] = cadence
        for step in range(5):
            missing = data.draw(st.lists(st.sampled_from(names), max_size=6))
            action = data.draw(st.sampled_from(["nothing", "read", "switch", "all", "copy", "write"]))
            for params, optimizer in (plain, hosted):
                give_gradients(params, step, missing, bad=[] if step % 2 or "bank" in missing else ["bank"])
                if rule != "skip":
                    give_gradients(params, step, missing)
                optimizer.step()
                if action == "write":
                    for param in params.values():
                        for value in optimizer.state[param].values():
                            value.mul_(1) if value.dtype in (torch.uint16, torch.uint8) else value.mul_(0.5)
            if action == "read":
                assert_same(plain, hosted)
            if action == "switch":
                group = hosted[1].param_groups[data.draw(st.integers(0, 5))]
                group["offload"] = not group["offload"]
            if action == "all":
                hosted[1].offload(data.draw(st.booleans()))
            if action == "copy":
                hosted = copied(*hosted)
        assert_same(plain, hosted)


def copied(params, optimizer):
    both = copy.deepcopy((params, optimizer))
    for name, param in params.items():
        assert both[0][name] is not param
    return both


@pytest.mark.parametrize("policy", ["late", "early"])
def test_a_bucket_that_was_the_last_comes_first(policy, delayed):
    delayed(policy)
    plain, hosted = pair(master=None, max_workspace_bytes=SMALL)
    for step, name in enumerate(plain[0]):
        for missing in ((), set(plain[0]) - {name}):
            for params, optimizer in (plain, hosted):
                give_gradients(params, step, missing)
                optimizer.step()
    assert_same(plain, hosted)


@pytest.mark.parametrize("policy", ["late", "early"])
def test_a_step_that_fails_in_the_middle_does_no_harm_to_the_next(policy, delayed):
    delayed(policy)
    failing = set()

    def function(matrices):
        if matrices.shape[-2:] in failing:
            raise ZeroDivisionError
        return matrices.sign()

    plain, hosted = pair(orthogonalizer=function, max_workspace_bytes=SMALL)
    for step in range(4):
        for params, optimizer in (plain, hosted):
            give_gradients(params, step)
            if step == 1:
                failing.add((6, 24 // 6))
                with pytest.raises(ZeroDivisionError):
                    optimizer.step()
                failing.clear()
            else:
                optimizer.step()
        if step == 1:  # the state of what was under way is not defined
            for name, param in plain[0].items():
                hosted[0][name].data.copy_(param)
            hosted[1].load_state_dict(plain[1].state_dict())
    assert_same(plain, hosted)


QK_OPTIONS = {"qk_clip": QKClip(threshold=1.0), "compute_dtype": torch.float32}


@pytest.mark.parametrize("master", [None, "fp32", "mantissa", "8bit"])
@pytest.mark.parametrize("policy", ["late", "early"])
def test_qk_clip_scales_masters_in_host_memory(master, policy, delayed):
    delayed(policy)
    found = []
    for on in (False, True):
        torch.manual_seed(0)
        names = ["attn.q_proj.weight", "attn.k_proj.weight", "other"]
        params = {name: nn.Parameter(torch.randn(16, 8).bfloat16()) for name in names}
        optimizer = Muon(params.items(), lr=0.1, master=master, offload=on, max_workspace_bytes=SMALL, **QK_OPTIONS)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step(qk_logits={"attn": torch.tensor([0.5, 3.0])})
        found.append((params, optimizer))
    assert_same(*found)


# -- when what is copied -----------------------------------------------------------------------------------------------


def test_the_addresses_on_the_device_repeat(delayed):
    made = delayed("late")
    _, (params, optimizer) = pair(torch.bfloat16, master="fp32", max_workspace_bytes=SMALL)
    logs = []
    for step in range(4):
        give_gradients(params, step)
        optimizer.step()
        logs.append(list(made[0].log))
        made[0].log.clear()
    assert logs[0] == logs[1] == logs[2] == logs[3]
    assert len({address for _, address in logs[0]}) <= 2 * POOL_BUFFERS


def test_nothing_is_loaded_for_what_is_not_stepped(delayed):
    made = delayed("late")
    params = parameters()
    optimizer = optimizer_of(params, offload=True, max_workspace_bytes=SMALL)
    optimizer.param_groups[-1]["step_every"] = 2
    # (step, parameters without gradient) -> the state that is loaded.
    counts = []
    for step, missing in enumerate([(), (), tuple(params), [name for name in params if name != "bank"]]):
        give_gradients(params, step, missing)
        optimizer.step()
        loads = [kind for kind, _ in made[0].log].count("load")
        assert loads == [kind for kind, _ in made[0].log].count("store")
        counts.append(loads)
        made[0].log.clear()
    of_adamw = sum(b.offloaded.num_loads for b in optimizer.plan() if b.algorithm == "adamw")
    of_muon = sum(1 for b in optimizer.plan() if b.algorithm == "muon" and b.numel)
    of_bank = sum(1 for b in optimizer.plan() if b.group == 1)
    assert counts == [of_muon, of_muon + of_adamw, 0, of_bank]
    assert of_adamw > 5
    assert of_bank > 1


def test_state_of_stages_on_whole_matrices_is_loaded_ahead_too(delayed, monkeypatch):
    """AdaMuon's second moments: loaded with momentum, and stored once stages have advanced them, not by the step."""
    made = delayed("late")
    plain, hosted = pair(**EXACT, normalize="element", max_workspace_bytes=30_000)
    monkeypatch.delattr(offload.Offload, "reachable")
    for step in range(3):
        for params, optimizer in (plain, hosted):
            give_gradients(params, step)
            optimizer.step()
    plan = hosted[1].plan()
    kinds = [kind for kind, _ in made[0].log]
    matrices = [b for b in plan if b.algorithm == "muon" and b.numel]
    of_adamw = sum(b.offloaded.num_loads for b in plan if b.algorithm == "adamw")
    # A store of momentum and one of second moments, without a second load except where second moments have gaps.
    assert kinds.count("store") == 3 * (2 * len(matrices) + of_adamw)
    assert 3 * (len(matrices) + of_adamw) <= kinds.count("load") < kinds.count("store")
    assert made[0].allocated == plan.offload_buffer_bytes
    assert all(POOL_BUFFERS * (b.offloaded.directions + b.offloaded.weights) <= 30_000 for b in plan)
    assert_same(plain, hosted)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_buffers_are_bounded_and_in_the_plan(delayed):
    made = delayed("late")
    _, (params, optimizer) = pair(torch.bfloat16, master="mantissa", max_workspace_bytes=30_000)
    give_gradients(params, 0)
    optimizer.step()
    plan = optimizer.plan()
    assert made[0].allocated == plan.offload_buffer_bytes
    assert all(POOL_BUFFERS * (b.offloaded.directions + b.offloaded.weights) <= 30_000 for b in plan)
    state = [v for p in params.values() for key, v in optimizer.state[p].items() if key in PARAM_SHAPED_STATE]
    assert sum(value.nbytes for value in state) <= sum(b.offloaded.num_bytes for b in plan)
    assert "MiB of state in host memory, loaded and stored through" in str(plan)
    assert "host MiB" in str(plan)
    optimizer.offload(False)
    plain = optimizer.plan()
    assert plain.offload_buffer_bytes == 0
    assert "host" not in str(plain)
    assert all(bucket.offloaded is None for bucket in plain)


def test_a_bucket_has_no_more_state_than_is_loaded_at_a_time(monkeypatch):
    from quintic.optim.plan import offload_size

    params = {f"w{i}": nn.Parameter(torch.randn(16, 16)) for i in range(9)}
    params["table"] = nn.Parameter(torch.randn(1000, 3))
    monkeypatch.setattr(offload_size, "OFFLOAD_BYTES", 4 * 1024)
    names = [name for name in params if name != "table"]
    groups = [{"params": [(n, params[n]) for n in names]}, {"params": [params["table"]], "algorithm": "adamw"}]
    plan = Muon(groups, offload=True).plan()
    assert [len(bucket.members) for bucket in plan] == [3, 3, 3, 1]
    assert all(bucket.offloaded.directions <= 4 * 1024 for bucket in plan)
    assert plan.buckets[3].offloaded.num_loads == 6
    assert plan.offload_buffer_bytes == 3 * 4 * 1024


def test_state_of_a_model_without_memory_stays_without():
    with torch.device("meta"):
        params = [nn.Parameter(torch.empty(30000, 30000)) for _ in range(50)]
    optimizer = Muon(params, offload=True)
    assert optimizer.state[params[0]]["momentum_buffer"].is_meta
    plan = optimizer.plan()
    assert sum(bucket.offloaded.num_bytes for bucket in plan) == 50 * 4 * 30000**2
    assert plan.offload_buffer_bytes == 3 * 4 * 30000**2


# -- reading, saving, switching ----------------------------------------------------------------------------------------


def trained(on, steps=2, **options):
    params = parameters(torch.bfloat16)
    optimizer = optimizer_of(params, offload=on, master="fp32", max_workspace_bytes=SMALL, **options)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("way", ["state", "state_dict", "pickle", "deepcopy", "state_of_one"])
def test_what_is_read_has_been_stored(way, delayed):
    delayed("late")
    plain, hosted = trained(False), trained(True)
    if way == "state":
        assert_same(plain, hosted)
    elif way == "state_dict":
        first, second = plain[1].state_dict(), hosted[1].state_dict()
        for index, state in first["state"].items():
            for key, value in state.items():
                assert torch.equal(value, second["state"][index][key])
    elif way == "pickle":
        assert_same(plain, pickle.loads(pickle.dumps(hosted)))
    elif way == "deepcopy":
        assert_same(plain, copied(*hosted))
    else:
        name = next(iter(plain[0]))
        mine = hosted[1].state[hosted[0][name]]["master"]
        assert torch.equal(mine, plain[1].state[plain[0][name]]["master"])


@pytest.mark.parametrize("saved_on", [False, True])
def test_checkpoints_go_both_ways(saved_on, delayed):
    delayed("late")
    saved, expected = trained(saved_on, normalize="neuron"), trained(False, normalize="neuron")
    loaded = trained(not saved_on, steps=1, normalize="neuron")
    for name, param in saved[0].items():
        loaded[0][name].data.copy_(param)
    loaded[1].load_state_dict(copy.deepcopy(saved[1].state_dict()))
    # Where state lies belongs to the run.
    assert all(group["offload"] is not saved_on for group in loaded[1].param_groups)
    for step in range(2, 4):
        for params, optimizer in (loaded, expected):
            give_gradients(params, step)
            optimizer.step()
    assert_same(expected, loaded)


def test_switching_one_group_takes_effect_at_the_next_step(delayed):
    made = delayed("late")
    plain, hosted = trained(False), trained(False)
    assert not made
    hosted[1].param_groups[2]["offload"] = True
    assert not any(bucket.offloaded for bucket in hosted[1].plan() if bucket.group != 2)
    assert all(bucket.offloaded for bucket in hosted[1].plan() if bucket.group == 2)
    for step in range(2, 4):
        for params, optimizer in (plain, hosted):
            give_gradients(params, step)
            optimizer.step()
    assert made[0].log
    hosted[1].param_groups[2]["offload"] = False
    made[0].log.clear()
    for params, optimizer in (plain, hosted):
        give_gradients(params, 4)
        optimizer.step()
    assert not made[0].log
    assert_same(plain, hosted)


def test_switching_all_groups_holds_for_later_ones(delayed):
    delayed("late")
    found = []
    for on in (False, True):
        params, optimizer = trained(False)
        if on:
            optimizer.offload()
        assert [group["offload"] for group in optimizer.param_groups] == [on] * 6
        params["late"] = nn.Parameter(torch.ones(6, 6))
        optimizer.add_param_group({"params": [params["late"]]})
        assert optimizer.param_groups[-1]["offload"] is on
        assert any(bucket.offloaded for bucket in optimizer.plan()) is on
        for step in range(2):
            give_gradients(params, step)
            optimizer.step()
        found.append((params, optimizer))
    assert_same(*found)


def test_buffers_can_be_given_back_between_steps(delayed):
    made = delayed("late")
    plain, hosted = trained(False), trained(True)
    assert [copies.allocated > 0 for copies in made] == [True]
    hosted[1].offload(True)
    for params, optimizer in (plain, hosted):
        give_gradients(params, 2)
        optimizer.step()
    assert len(made) == 2
    assert_same(plain, hosted)


def test_a_captured_graph_is_refused(monkeypatch):
    params, optimizer = trained(True)
    give_gradients(params, 2)
    before = {name: param.detach().clone() for name, param in params.items()}
    monkeypatch.setattr(offload, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*host memory.*CUDA graph.*optimizer\.offload\(False\)"):
        optimizer.step()
    assert all(torch.equal(before[name], param) for name, param in params.items())


def test_verify_telemetry_clip_and_explain_work_meanwhile(delayed):
    delayed("late")
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 24), nn.Linear(24, 8))
    twin = copy.deepcopy(model)
    found = []
    for each, on in ((twin, False), (model, True)):
        optimizer = Muon(quintic.param_groups(each), offload=on, telemetry_every=1, max_workspace_bytes=SMALL)
        norms = []
        for step in range(3):
            torch.manual_seed(step)
            each(torch.randint(50, (8,))).square().mean().backward()
            norms.append(quintic.clip_grad_norm_(optimizer, 0.1))
            if step == 1:
                assert quintic.verify(each, optimizer).ok
            optimizer.step()
            optimizer.zero_grad()
        found.append((dict(each.named_parameters()), optimizer, norms))
    assert_same(*found)
    assert found[0][1].telemetry() == found[1][1].telemetry()
    assert found[0][2] == found[1][2]
    assert str(quintic.explain(model)) == str(quintic.explain(twin))
    assert found[0][1].last_step() == found[1][1].last_step()


def test_the_reference_step_works_meanwhile(delayed):
    delayed("late")
    plain, hosted = trained(False), trained(True)
    for params, optimizer in (plain, hosted):
        give_gradients(params, 2)
        quintic.reference_step(optimizer)
        give_gradients(params, 3)
        optimizer.step()
    assert_same(plain, hosted)


def test_an_option_that_is_no_switch_is_refused():
    with pytest.raises(ValueError, match="offload='cpu' must be False or True"):
        Muon([nn.Parameter(torch.ones(2, 2))], offload="cpu")


def test_state_that_somebody_replaces_is_the_state(delayed):
    delayed("late")
    plain, hosted = trained(False), trained(True)
    for params, optimizer in (plain, hosted):
        for param in params.values():
            for key, value in optimizer.state[param].items():
                if key != "step":
                    optimizer.state[param][key] = value * 0.5
        give_gradients(params, 2)
        optimizer.step()
    assert_same(plain, hosted)
