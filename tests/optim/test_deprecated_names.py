"""Old names of public methods and keywords: they work as the new ones do, with a warning."""

import pytest
import torch
from torch import nn

import quintic
from quintic.optim.deprecated import renamed_method


def matrices():
    """Two parameters of one shape, of which the first has been stepped."""
    params = [nn.Parameter(torch.ones(4, 4) * (number + 1)) for number in range(2)]
    optimizer = quintic.Muon([{"params": [("a", params[0]), ("b", params[1])]}])
    params[0].grad = torch.eye(4)
    optimizer.step()
    return params, optimizer


def test_the_old_name_of_copy_state_copies_state():
    (first, second), optimizer = matrices()
    old = "carry_state"
    with pytest.warns(DeprecationWarning, match="carry_state is called copy_state now"):
        getattr(optimizer, old)("a", "b")
    momentum = optimizer.state[second]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[first]["momentum_buffer"])
    assert momentum.any()


@pytest.mark.parametrize(
    ("old", "new"),
    [({"launch_order": ["b"]}, {"comm_order": ["b"]}), ({"work_order": ["b"]}, {"compute_order": ["b"]})],
)
def test_old_names_of_orders_set_the_orders(old, new):
    params = [("a", nn.Parameter(torch.ones(4, 4))), ("b", nn.Parameter(torch.ones(4, 4)))]
    expected = quintic.Muon(params, **new)._plans.orders
    (old_name,), (new_name,) = old, new
    with pytest.warns(DeprecationWarning, match=f"{old_name} is called {new_name} now"):
        optimizer = quintic.Muon(params, **old)
    assert optimizer._plans.orders == expected
    assert expected != quintic.Muon(params)._plans.orders
    with pytest.raises(ValueError, match=f"{old_name} is the old name of {new_name}, and both are given"):
        quintic.Muon(params, **old, **new)


def test_a_renamed_method_has_its_old_name_and_the_docstring():
    def new(number: int) -> int:
        """Return the number after it."""
        return number + 1

    old = renamed_method("old", new)
    assert (old.__name__, old.__doc__) == ("old", new.__doc__)
    with pytest.warns(DeprecationWarning, match="^old is called new now; the old name will go$") as caught:
        assert old(2) == 3
    assert caught[0].filename == __file__
