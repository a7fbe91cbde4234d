"""One parameter's state for another: what is refused. tests/distributed/test_carried_state.py hands it over."""

import pytest
import torch
from torch import nn

import quintic
from quintic import Matrix, Muon


def optimizer_of(shapes, dtypes=(torch.float32, torch.float32), **options):
    pairs = [(nn.Parameter(torch.randn(shape).to(dtype))) for shape, dtype in zip(shapes, dtypes, strict=True)]
    own = [{key: value[number] for key, value in options.items()} for number in range(2)]
    return Muon([{"params": [(f"p{n}", p)], **one} for n, (p, one) in enumerate(zip(pairs, own, strict=True))])


@pytest.mark.parametrize(
    ("shapes", "options", "transposed", "message"),
    [
        ([(3, 4), (4, 3)], {}, False, r"p0 cannot be copied to p1: the shapes are \(3, 4\) and \(4, 3\)"),
        ([(3, 4), (3, 4)], {}, True, r"p1 transposed: the shapes are \(3, 4\) and \(3, 4\)"),
        ([(2, 3, 4), (4, 3, 2)], {"algorithm": ["adamw"] * 2}, True, "p1 transposed: it has 3 dimensions"),
        ([(3, 4), (3, 4)], {"algorithm": ["adamw", "muon"]}, False, "update rules AdamW and Muon"),
        ([(3, 4), (3, 4)], {"algorithm": ["adamw"] * 2, "state_dtype": ["bf16", None]}, False, "same state_dtype"),
        ([(3, 4), (3, 4)], {"normalize": ["neuron", None]}, False, r"second_momentum_buffer.*update rule"),
        (
            [(4, 4), (4, 4)],
            {"normalize": ["neuron"] * 2},
            True,
            "belongs to the matrices of a view",
        ),
        ([(4, 4), (4, 4)], {"normalize": ["neuron"] * 2, "view": [Matrix(), quintic.Rows(2)]}, False, "same view"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(shapes, options, transposed, message):
    optimizer = optimizer_of(shapes, **options)
    before = [value.clone() for param in optimizer.state for value in optimizer.state[param].values()]
    with pytest.raises(ValueError, match=message):
        optimizer.copy_state("p0", "p1", transposed=transposed)
    after = [value for param in optimizer.state for value in optimizer.state[param].values()]
    assert all(map(torch.equal, before, after))


def test_masters_belong_to_one_dtype_of_weights():
    options = {"algorithm": ["adamw"] * 2, "master": ["fp32", None]}
    optimizer = optimizer_of([(3, 4), (3, 4)], (torch.bfloat16, torch.bfloat16), **options)
    with pytest.raises(ValueError, match=r"one has .*'master': 'torch.float32'.* give both parameters the same dtype"):
        optimizer.copy_state("p0", "p1")


@pytest.mark.parametrize("strangers", [("p0", "p0"), ("p0", "nobody"), ("nobody", "p0")])
def test_only_two_parameters_of_the_optimizer_will_do(strangers):
    optimizer = optimizer_of([(3, 4), (3, 4)])
    with pytest.raises(ValueError, match=r"the same parameter|copy_state was given 'nobody', which is no parameter"):
        optimizer.copy_state(*strangers)


def test_state_that_was_carried_is_kept_like_that_of_a_step():
    """Not taken for new, where a plan is made again or the model moves."""
    optimizer = optimizer_of([(3, 4), (4, 3)], algorithm=["adamw"] * 2)
    first, second = (group["params"][0] for group in optimizer.param_groups)
    first.grad = torch.randn(3, 4)
    optimizer.step()
    optimizer.copy_state(first, second, transposed=True)
    second.data = second.data.double().float()
    optimizer.param_groups[1]["cautious"] = True
    optimizer.plan()
    state = optimizer.state[second]
    assert torch.equal(state["exp_avg"].T, optimizer.state[first]["exp_avg"])
    assert torch.equal(state["exp_avg_sq"].T, optimizer.state[first]["exp_avg_sq"])
    assert float(state["step"]) == 1
