"""Changes of parameters that are noticed, and those that are not worth noticing."""

import pytest
import torch
from torch import nn

from quintic.optim.state.sync import Change, ParamFingerprint


def groups_of():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    return [{"params": params[:2]}, {"params": params[2:]}]


def params_of(groups):
    return [group["params"] for group in groups]


def other_memory(groups):
    groups[1]["params"][0].data = groups[1]["params"][0].data.clone()


def other_object(groups):
    groups[0]["params"][1] = nn.Parameter(groups[0]["params"][1].data)  # of the same memory


def other_dtype_at_the_same_address(groups):
    param = groups[0]["params"][0]
    param.data = param.data.view(torch.int32).view(torch.bfloat16)[:, :6]


def other_device(groups):
    groups[0]["params"][0].data = torch.empty(4, 6, dtype=torch.float64)


def other_strides(groups):
    groups[0]["params"][0].data = torch.randn(6, 4).mT


def other_shape(groups):
    groups[0]["params"][0].data = torch.randn(4, 7)


def swapped_places(groups):
    groups[0]["params"].reverse()


def one_less(groups):
    groups[0]["params"].pop()


def one_group_more(groups):
    groups.append({"params": []})


def nothing(groups):
    groups[0]["params"] = list(groups[0]["params"])
    groups[0]["params"][0].data.mul_(2)
    groups[0]["params"][0].grad = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (nothing, Change.NONE),
        (other_memory, Change.MEMORY),
        *(
            (change, Change.PARAMETERS)
            for change in (
                other_object,
                other_dtype_at_the_same_address,
                other_device,
                other_strides,
                other_shape,
                swapped_places,
                one_less,
                one_group_more,
            )
        ),
    ],
)
def test_each_change_is_noticed_once(change, expected):
    groups = groups_of()
    watched = ParamFingerprint(params_of(groups))
    assert watched.check(params_of(groups)) is Change.NONE
    change(groups)
    assert watched.check(params_of(groups)) is expected
    assert watched.check(params_of(groups)) is Change.NONE
