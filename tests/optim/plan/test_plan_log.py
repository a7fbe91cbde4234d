"""What the logger "quintic" says at DEBUG: how parameters are routed, and what a plan does."""

import logging

import torch
from torch import nn

import quintic


def model_with_gradients():
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 12))
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    return model


def test_param_groups_says_what_and_why(caplog):
    model = model_with_gradients()
    with caplog.at_level(logging.DEBUG, logger="quintic"):
        quintic.param_groups(model, rules=[quintic.Rule("2.weight", "adamw")])
    lines = caplog.messages
    assert len(lines) == len(list(model.parameters()))
    assert lines[0].startswith("0.weight (7, 6): adamw, because: ")
    assert any(line.startswith("1.weight (12, 6): muon, Matrix(transposed=False), because: ") for line in lines)
    reasons = {row.name: row.why for row in quintic.explain(model, rules=[quintic.Rule("2.weight", "adamw")]).rows}
    assert all(line.endswith(f"because: {reasons[line.split()[0]]}") for line in lines)


def test_a_plan_is_logged_once(caplog):
    model = model_with_gradients()
    optimizer = quintic.Muon(quintic.param_groups(model), compute_dtype=torch.float32)
    with caplog.at_level(logging.DEBUG, logger="quintic"):
        optimizer.step()
    lines = caplog.messages
    assert "1.weight (12, 6): muon, Matrix(transposed=False), parameter group 0" in lines
    assert "1.bias (12,): adamw, parameter group 1" in lines
    (total,) = [line for line in lines if line.startswith("plan of rank 0: 3 buckets, ")]
    assert f"{optimizer.plan().flops / 1e9:.3f} GFLOP" in total
    assert "balance 1.00" in total
    assert any(line.startswith("bucket 0: ") and " 2x12x6, 144 entries" in line for line in lines)
    assert "bucket 0: rank 0 owns 1.weight, 3.weight" in lines
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="quintic"):
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    assert not caplog.messages  # nothing is planned, and nothing said
    optimizer.param_groups[0]["nesterov"] = False
    optimizer.param_groups[0]["view"] = quintic.Rows(6)
    with caplog.at_level(logging.INFO, logger="quintic"):
        optimizer.plan()
    assert not caplog.messages


def test_names_with_percent_signs_are_logged(caplog):
    optimizer = quintic.Muon([("100%s", nn.Parameter(torch.zeros(4, 4)))])
    with caplog.at_level(logging.DEBUG, logger="quintic"):
        optimizer.plan()
    assert "bucket 0: rank 0 owns 100%s" in caplog.messages
