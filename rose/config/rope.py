"""How far and how fast a model's rotary embedding turns: the base, and what stretches it to longer sequences.

Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it) of config.json. A way of scaling
whose angles depend on the length of the sequence is refused: keys in a cache are rotated once. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Literal

from rose.config.json_file import JsonFile

_SERVED = ("default", "linear", "dynamic", "llama3", "yarn")
_REFUSED = {
    "longrope": "it has other frequencies for sequences past the original length, and keys in a cache are rotated once",
    "su": "it is an older name of longrope, whose frequencies depend on the length of the sequence",
    "proportional": "it is served for no family here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Frequencies that differ from theta ** (-2 i / head_dim).

    Attributes:
        kind: "linear" (all divided by `factor`), "llama3" (the slow ones are, with a ramp between), or "yarn"
            (arXiv:2309.00071: likewise, and cos and sin grow by `attention_factor`).
        factor: by how much the range is stretched.
        original: positions the model had before.
        slow, fast: llama3: turns within `original` below which a frequency is divided, above which it is kept;
            yarn: the same, there called beta_slow and beta_fast.
        attention_factor: on cos and sin.
        truncate: yarn: the ramp begins and ends at whole dimensions.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original: int = 0
    slow: float = 1.0
    fast: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """
    Attributes:
        theta: the base.
        scaling: None for the plain frequencies.
        max_positions: longest sequence the config allows, in tokens.
        share: of a head's dimensions that are turned, the first ones.
    """

    theta: float
    scaling: RopeScaling | None
    max_positions: int
    share: float = 1.0


def read_rope(config: JsonFile, *, default_theta: float | None = None, default_share: float | None = None) -> Rope:
    """
    Args:
        default_theta: what the family means where config.json states no base; None: it must state one.
        default_share: likewise of partial_rotary_factor; None: the family turns all dimensions.

    Raises:
        CheckpointError: a scaling that is not served, with the reason, or one that lacks a number.
    """
    parameters = config.child("rope_parameters")
    scaling = config.child("rope_scaling")
    scaling = scaling if scaling.data else parameters  # which wins where a file has both
    if any(isinstance(value, dict) for value in scaling.data.values()):
        raise config.error("rotary settings that differ by layer are not served for this family")
    places = (scaling, parameters, config)
    share = next((place for place in places if "partial_rotary_factor" in place), config).number(
        "partial_rotary_factor", default_share or 1.0
    )
    if not 0 < share <= 1 or (share < 1 and default_share is None):
        raise config.error(f"partial_rotary_factor {share:g} is not served for this family")
    theta = next((place for place in places if "rope_theta" in place), config).number("rope_theta", default_theta)
    if theta <= 0:
        raise config.error(f"rope_theta is {theta:g}, and must be above 0")
    positions = config.integer("max_position_embeddings")
    found = _scaling(config, scaling, positions)
    if found is not None and found.kind == "yarn":
        # Checkpoints leave max_position_embeddings as it was, and state the factor alone.
        positions = max(positions, int(found.original * found.factor))
    return Rope(theta=theta, scaling=found, max_positions=positions, share=share)


def _scaling(config: JsonFile, given: JsonFile, positions: int) -> RopeScaling | None:
    kind = given.text("rope_type", given.text("type", "default"))
    if kind not in _SERVED:
        reason = _REFUSED.get(kind, f"there are {', '.join(_SERVED)}")
        raise config.error(f"rotary scaling {kind!r} is not served: {reason}")
    # Dynamic scaling begins past max_position_embeddings, and sequences end there.
    if kind in ("default", "dynamic"):
        return None
    # Some write it outside, where it wins.
    holder = config if "original_max_position_embeddings" in config else given
    original = holder.integer("original_max_position_embeddings", positions)
    if kind == "yarn":
        return _yarn(given, original, positions)
    factor = given.number("factor")
    if factor < 1:
        raise config.error(f"the factor of rotary scaling is {factor:g}, and must be at least 1")
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    slow, fast = given.number("low_freq_factor"), given.number("high_freq_factor")
    if not 0 < slow < fast:
        raise config.error(f"low_freq_factor {slow:g} and high_freq_factor {fast:g} leave no ramp between them")
    return RopeScaling(kind="llama3", factor=factor, original=original, slow=slow, fast=fast)


def _yarn(given: JsonFile, original: int, positions: int) -> RopeScaling:
    factor = given.number("factor", positions / original)
    if factor < 1:
        raise given.error(f"the factor of rotary scaling is {factor:g}, and must be at least 1")
    # A zero in one of them counts as left out, as it does upstream.
    scales = (given.number("mscale", 0.0), given.number("mscale_all_dim", 0.0))
    grown = _growth(factor, scales[0]) / _growth(factor, scales[1]) if all(scales) else _growth(factor, 1.0)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original=original,
        slow=given.number("beta_slow", 1.0) or 1.0,
        fast=given.number("beta_fast", 32.0) or 32.0,
        attention_factor=given.number("attention_factor", grown),
        truncate=given.flag("truncate", True),
    )


def _growth(factor: float, scale: float) -> float:
    return 0.1 * scale * log(factor) + 1.0 if factor > 1 else 1.0
