"""Update rules as values, the option `update_rule`, and what is wrong with either."""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import quintic
from quintic.optim.rules.library.aurora import BalancedPolar
from quintic.optim.rules.library.ema_nesterov import Lookahead
from quintic.optim.rules.library.muon_plus import Renormalize
from quintic.optim.rules.library.muoneq import Equalize
from quintic.optim.rules.library.normuon import NeuronSecondMoment
from quintic.optim.rules.library.radial import RadialBrake
from quintic.optim.rules.library.two_rate import TwoRateMomentum
from quintic.optim.rules.rule import STATE_KEYS, UpdateRule
from quintic.optim.rules.stages import DriftStage, GradientStage, MatrixStage, StateSpec, WeightStage
from quintic.optim.rules.table import ADAMW, RULES, SHORT_FORMS

CONSTRAINING = sorted(name for name, rule in RULES.items() if rule.constrain is not None)
SCALING = sorted(name for name, rule in RULES.items() if rule.scale is not None)


def weight_of(*shape):
    return nn.Parameter(torch.randn(shape or (4, 3)))


def muon(**options):
    return quintic.Muon([("w", weight_of())], **options)


# -- the option ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["hyperball", "muown"])
def test_a_clip_is_refused_where_the_rule_would_undo_it(rule):
    with pytest.raises(
        ValueError, match=rf"\(w\): qk_clip with the update rule {RULES[rule].title}.* leave qk_clip out"
    ):
        muon(update_rule=rule, qk_clip=quintic.QKClip())


def test_an_unknown_name_lists_the_names():
    names = ", ".join(map(repr, RULES))
    message = f"parameter group 0 (w): update_rule='lion': choose {names}, or an UpdateRule"
    with pytest.raises(ValueError, match=re.escape(message)):
        muon(update_rule="lion")


@pytest.mark.parametrize("value", [3, UpdateRule, Equalize(), RULES], ids=["number", "class", "stage", "table"])
def test_what_is_no_rule_says_what_to_give(value):
    with pytest.raises(
        TypeError, match=r"parameter group 0 \(w\): update_rule=.*: give the name of a rule, or a quintic"
    ):
        muon(update_rule=value)


def test_element_wise_rules_are_for_no_matrices():
    with pytest.raises(
        ValueError, match=r"update_rule=AdamW: it does not orthogonalise; groups with algorithm='adamw'"
    ):
        muon(update_rule=ADAMW)


@pytest.mark.parametrize("rule", ["muoneq", RULES["muown"], "muon"], ids=["name", "value", "muon"])
def test_normalize_beside_another_rule_is_refused(rule):
    title = rule if isinstance(rule, str) else rule.title
    message = f"normalize='neuron' is short for update_rule='normuon', and update_rule={title!r} is given, too; leave"
    with pytest.raises(ValueError, match=re.escape(message)):
        muon(update_rule=rule, normalize="neuron")


@pytest.mark.parametrize(("short", "name"), [(short, name) for short, name in SHORT_FORMS.items() if short is not None])
def test_normalize_is_short_for_a_rule(short, name):
    params = []
    for options in ({"normalize": short}, {"update_rule": name}, {"update_rule": name, "normalize": short}):
        torch.manual_seed(0)
        weight = weight_of()
        optimizer = quintic.Muon([weight], **options)
        assert next(iter(optimizer.plan())).rule is RULES[name]
        weight.grad = torch.ones(4, 3)
        optimizer.step()
        params.append(weight.detach())
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])


@pytest.mark.parametrize("name", CONSTRAINING)
@pytest.mark.parametrize(
    ("key", "value"),
    [("cautious", True), ("cautious", "strict"), ("scale_decay", True), ("decay_coupling", "lr_squared")],
)
def test_rules_that_constrain_weights_decide_about_decay(name, key, value):
    message = (
        f"{key}={value!r} with the update rule {RULES[name].title}, which decides itself how weights decay; leave "
    )
    with pytest.raises(ValueError, match=re.escape(message) + key + " out"):
        muon(update_rule=name, **{key: value})


@pytest.mark.parametrize("name", SCALING)
@pytest.mark.parametrize("adjust_lr", ["unit_rms", None, lambda m, n: 2.0], ids=["name", "None", "function"])
def test_rules_with_a_scale_have_no_other(name, adjust_lr):
    with pytest.raises(
        ValueError, match=rf"adjust_lr=.* with the update rule {RULES[name].title}, which scales updates"
    ):
        muon(update_rule=name, adjust_lr=adjust_lr)


@pytest.mark.parametrize("name", sorted(RULES.keys() - set(SCALING)))
def test_other_rules_take_any_scale(name):
    weights = []
    for adjust_lr in (None, lambda m, n: 0.5):
        torch.manual_seed(0)
        weight = weight_of()
        before = weight.detach().clone()
        weight.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        quintic.Muon([weight], update_rule=name, adjust_lr=adjust_lr, compute_dtype=torch.float32).step()
        weights.append(weight.detach() - before)
    if RULES[name].constrain is None:
        torch.testing.assert_close(weights[1], 0.5 * weights[0], rtol=1e-4, atol=1e-6)
    assert not torch.equal(*weights)


@pytest.mark.parametrize("name", ["muown", "hyperball", "ema_nesterov"])
def test_groups_of_adamw_ignore_the_rule(name):
    params = []
    for options in ({}, {"update_rule": name}):
        torch.manual_seed(0)
        bias = nn.Parameter(torch.randn(7))
        groups = [{"params": [("w", weight_of())]}, {"params": [("b", bias)], "algorithm": "adamw"}]
        optimizer = quintic.Muon(groups, **options)
        bias.grad = torch.arange(7.0)
        optimizer.step()
        assert set(optimizer.state[bias]) == {"step", "exp_avg", "exp_avg_sq"}
        params.append(bias.detach())
    assert torch.equal(*params)
    # Nor do options that the rule would refuse matter there.
    quintic.Muon([{"params": [bias], "algorithm": "adamw", "update_rule": name, "cautious": True}])


def test_groups_have_rules_of_their_own():
    first, second = weight_of(), weight_of()
    groups = [{"params": [("a", first)], "update_rule": "hyperball"}, {"params": [("b", second)]}]
    optimizer = quintic.Muon(groups, update_rule="two_rate")
    first.grad, second.grad = torch.ones(4, 3), torch.ones(4, 3)
    optimizer.step()
    assert set(optimizer.state[first]) == {"momentum_buffer", "radius"}
    assert set(optimizer.state[second]) == {"momentum_buffer", "slow_momentum_buffer"}


def test_a_wrong_rule_that_is_set_later_is_named_at_the_next_step():
    weight = weight_of()
    optimizer = quintic.Muon([("w", weight)])
    weight.grad = torch.ones(4, 3)
    optimizer.param_groups[0]["update_rule"] = "lion"
    with pytest.raises(ValueError, match=r"parameter group 0 \(w\): update_rule='lion': choose"):
        optimizer.step()
    optimizer.param_groups[0]["update_rule"] = "muon_plus"
    optimizer.step()


# -- settings of stages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Equalize("row"), r"Equalize\(of='row'\): choose 'rows', 'columns' or 'both'"),
        (
            lambda: Renormalize("both"),
            r"Renormalize\(to='both'\): choose 'frobenius', 'rows', 'columns', 'columns_rows'",
        ),
        (lambda: BalancedPolar(num_rounds=0), r"BalancedPolar\(num_rounds=0.*need num_rounds >= 1 and power > 0"),
        (lambda: BalancedPolar(power=0.0), r"need num_rounds >= 1 and power > 0"),
        (lambda: TwoRateMomentum(fast=0.99, slow=0.9), r"need 0 <= fast <= slow < 1, and a share in \[0, 1\]"),
        (lambda: TwoRateMomentum(share=1.5), r"TwoRateMomentum\(.*share=1.5\): need"),
        (lambda: TwoRateMomentum(slow=1.0), r"need 0 <= fast <= slow < 1"),
        (lambda: Lookahead(rate=1.0), r"Lookahead\(rate=1.0.*need 0 <= rate < 1 and ahead >= 0"),
        (lambda: Lookahead(ahead=-0.1), r"need 0 <= rate < 1 and ahead >= 0"),
        (lambda: RadialBrake(outward=1.5), r"RadialBrake\(outward=1.5.*outward and inward must lie in \[0, 1\]"),
        (lambda: RadialBrake(inward=-1.0), r"outward and inward must lie in \[0, 1\]"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# -- rules as values -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnRows(MatrixStage):
    label = "own rows"
    state = (StateSpec("own_rows_of_a_test", "wide", "rows"),)

    def apply(self, matrices, state, options):
        return matrices, None


@dataclass(frozen=True)
class OwnColumns(OwnRows):
    state = (StateSpec("own_rows_of_a_test", "wide", "neurons"),)


@dataclass(frozen=True)
class Vectors(GradientStage):
    label = "vectors"
    state = (StateSpec("vectors_of_a_test", "wide", "rows"),)


@dataclass(frozen=True)
class VectorsOfSteps(DriftStage):
    label = "vectors of steps"
    state = (StateSpec("vectors_of_a_test", "wide", "matrix"),)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"before": (NeuronSecondMoment(),)}, "mine: factors multiply updates, so stages in before cannot have them"),
        ({"after": (NeuronSecondMoment(), NeuronSecondMoment())}, "mine: only one stage in after can have factors"),
        ({"direction": Vectors()}, "mine: Vectors is element-wise, and can only have state of the shape 'param'"),
        ({"drift": VectorsOfSteps()}, "mine: VectorsOfSteps is element-wise, and can only have state of the shape"),
    ],
    ids=["before", "after", "direction", "drift"],
)
def test_stages_that_do_not_fit_are_refused(stages, message):
    before = set(STATE_KEYS)
    with pytest.raises(ValueError, match=re.escape(message)):
        UpdateRule(title="mine", **stages)
    assert before == STATE_KEYS


def test_two_rules_cannot_mean_different_state_by_one_name():
    UpdateRule(title="first", before=(OwnRows(),))
    UpdateRule(title="first again", before=(OwnRows(),))
    with pytest.raises(
        ValueError, match=r"second: its state 'own_rows_of_a_test' is declared as StateSpec\(.*; choose"
    ):
        UpdateRule(title="second", before=(OwnColumns(),))


def test_rules_are_equal_by_value_and_known_by_their_settings():
    first, same = (UpdateRule(title="mine", before=(Equalize("both"),)) for _ in range(2))
    assert first == same
    assert hash(first) == hash(same)
    assert first != replace(first, before=(Equalize("rows"),))
    assert str(first) == "mine: Equalize(of='both')"
    assert str(RULES["muon"]) == "Muon"
    assert len({str(rule) for rule in RULES.values()}) == len(RULES)


def test_rules_of_the_library_declare_their_state_once():
    for rule in RULES.values():
        names = [spec.name for spec in rule.state]
        assert len(set(names)) == len(names)
        assert set(names) <= STATE_KEYS


def test_stages_of_several_rules_make_a_rule():
    """MuonEq, two-rate momentum, a balanced polar step, NorMuon, a brake and a look-ahead in one."""
    rule = UpdateRule(
        title="everything",
        direction=TwoRateMomentum(),
        before=(Equalize(),),
        polar=BalancedPolar(),
        after=(Renormalize("frobenius"), NeuronSecondMoment()),
        constrain=RadialBrake(),
        drift=Lookahead(),
    )
    model = nn.ParameterDict({"tall": weight_of(8, 3), "wide": weight_of(3, 8)})
    optimizer = quintic.Muon([*model.items()], lr=0.1, weight_decay=0.1, update_rule=rule)
    for _ in range(3):
        for weight in model.values():
            weight.grad = torch.randn_like(weight)
        report = quintic.verify(model, optimizer)
        assert report.is_bitwise, str(report)
        optimizer.step()
    names = {"momentum_buffer", "slow_momentum_buffer", "second_momentum_buffer", "lookahead_buffer"}
    assert set(optimizer.state[model["tall"]]) == names


def stage_of(base, **attributes):
    """A stage that is a frozen dataclass, with other declarations."""
    return dataclass(frozen=True)(type("Mine", (base,), {"label": "mine", **attributes}))()


class Plain(MatrixStage):
    """No dataclass: two of its objects are never equal, and a checkpoint cannot name its settings."""

    label = "plain"


@dataclass(frozen=True)
class Weighted(MatrixStage):
    """A setting that cannot be hashed, if it is a list."""

    label = "weighted"
    weights: list


def two_of(*shapes):
    """Two declarations of one name."""
    return tuple(StateSpec("declared_twice", "wide", shape) for shape in shapes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UpdateRule(title="r", before=(Plain(),)), "Plain must be a frozen dataclass"),
        (lambda: UpdateRule(title="r", before=stage_of(MatrixStage)), r"r: before=.* must be a tuple of MatrixStages"),
        (
            lambda: UpdateRule(title="r", after=(stage_of(GradientStage),)),
            r"r: after=.* must be a tuple of MatrixStages",
        ),
        (lambda: UpdateRule(title="r", direction=stage_of(MatrixStage)), r"r: direction=.* must be a GradientStage"),
        (lambda: UpdateRule(title="r", drift=Plain()), r"r: drift=.* must be a DriftStage"),
        (lambda: UpdateRule(title="r", before=(stage_of(MatrixStage, label=None),)), "Mine has no label"),
        (
            lambda: UpdateRule(title="r", before=(stage_of(MatrixStage, state=StateSpec("a", "wide", "rows")),)),
            "Mine: state must be a tuple of StateSpecs",
        ),
        (
            lambda: UpdateRule(title="r", after=(stage_of(MatrixStage, factors=(1, 1)),)),
            r"Mine: factors=\(1, 1\); choose",
        ),
        (lambda: UpdateRule(title="r", constrain=stage_of(WeightStage)), "Mine: numbers=None; choose"),
        (
            lambda: UpdateRule(
                title="r", before=(stage_of(MatrixStage, state=(StateSpec("weight", "wide", "param"),)),)
            ),
            "Mine: its state 'weight' is named like the weights for stages; choose another name",
        ),
        (
            lambda: UpdateRule(title="r", before=(stage_of(MatrixStage, state=two_of("rows", "matrix")),)),
            "r: its state 'declared_twice' is declared in two ways; choose another name for one",
        ),
        (
            lambda: UpdateRule(
                title="r", before=tuple(stage_of(MatrixStage, state=(one,)) for one in two_of("rows", "param"))
            ),
            "r: its state 'declared_twice' is declared in two ways",
        ),
        (
            lambda: UpdateRule(title="r", before=(Weighted([1.0]),)),
            r"Weighted\(.*: its fields must be hashable; .*tuples",
        ),
        (lambda: UpdateRule(title=3), "title=3 must be a text"),
        (lambda: UpdateRule(title="r", scale="spectrall"), "r: scale='spectrall': choose 'spectral', .* function of"),
        (lambda: UpdateRule(title="r", scale=0.2), r"r: scale=0\.2: choose 'spectral'"),
        (lambda: StateSpec("a", "wide", "row"), r"StateSpec\('a'\): shape='row'; choose 'param', 'scalar', 'neurons'"),
        (lambda: StateSpec("a", "float16", "rows"), r"StateSpec\('a'\): dtype='float16'; choose 'average'"),
    ],
)
def test_what_a_rule_cannot_be_made_of_is_named(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_rule_of_the_same_title_may_declare_its_state_anew():
    for shape in ("rows", "matrix"):
        stage = stage_of(MatrixStage, state=(StateSpec("of_a_notebook", "wide", shape),))
        assert UpdateRule(title="notebook", before=(stage,)).vector_state[0].shape == shape
    with pytest.raises(ValueError, match=r"other: its state 'of_a_notebook' .* and the rule 'notebook' has"):
        UpdateRule(title="other", before=(stage_of(MatrixStage, state=(StateSpec("of_a_notebook", "wide", "rows"),)),))


def test_factors_that_a_stage_does_not_declare_are_an_error_in_a_step():
    stage = stage_of(MatrixStage, apply=lambda self, matrices, state, options: (matrices, matrices[:, :1, :1]))
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"Mine returns factors, and declares factors=None"):
        quintic.Muon([weight], update_rule=UpdateRule(title="r", after=(stage,))).step()


@pytest.mark.parametrize("factor", [None, float("nan"), float("inf"), "1"])
def test_a_scale_of_a_rule_is_tried_for_each_shape(factor):
    rule = UpdateRule(title="mine", scale=lambda m, n: factor if (m, n) == (4, 3) else 1.0)
    with pytest.raises(
        ValueError, match=rf"^w: scale of mine\(4, 3\) returned {factor!r}; it must return a finite number$"
    ):
        muon(update_rule=rule)
    quintic.Muon([("w", weight_of(3, 4))], update_rule=rule)
