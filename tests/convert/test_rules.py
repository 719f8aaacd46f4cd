"""The language of the rule tables."""

from __future__ import annotations

import pytest

from rose.convert.families import FAMILIES
from rose.convert.rules import Drop, Fuse, Rename, Split, fill, match


@pytest.mark.parametrize(
    ("template", "name", "gaps"),
    [
        ("a.weight", "a.weight", {}),
        ("a.weight", "a_weight", None),  # a dot is a dot
        ("layers.{n}.up.{kind}", "layers.12.up.bias", {"n": "12", "kind": "bias"}),
        ("layers.{n}.up.{kind}", "layers.x.up.bias", None),  # {n} is a number
        ("layers.{n}.up.{kind}", "layers.1.up.bias.scale", None),  # {kind} is one part
        ("pooler.{rest*}", "pooler.dense.weight", {"rest": "dense.weight"}),
        ("pooler.{rest*}", "pooler.", None),
        ("{path*}.LayerNorm.gamma", "encoder.layer.0.output.LayerNorm.gamma", {"path": "encoder.layer.0.output"}),
        ("layers.{n}", "my.layers.0", None),  # the whole name
    ],
)
def test_match(template, name, gaps):
    assert match(template, name) == gaps


def test_fill():
    gaps = {"n": "3", "rest": "a.b"}
    assert fill("x.{n}.{rest*}.y", gaps) == "x.3.a.b.y"


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_tables_are_consistent(family):
    """Targets only use gaps that every source fills, and the bare prefix is always probed."""
    assert "" in family.prefixes
    for rule in family.rules:
        sources = rule.sources if isinstance(rule, Fuse) else (rule.source,)
        targets = rule.targets if isinstance(rule, Split) else () if isinstance(rule, Drop) else (rule.target,)
        for source in sources:
            gaps = match(source, source.replace("{n}", "0").replace("*}", "}").replace("{", "").replace("}", ""))
            assert gaps is not None
            for target in targets:
                fill(target, gaps)
    assert any(isinstance(rule, Fuse) for rule in family.rules)
    assert Rename not in {type(drop) for drop in family.outside}
