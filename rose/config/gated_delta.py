"""The layers of a hybrid model that keep a recurrent state instead of keys and values (Qwen3.5's gated delta nets).

Knows config.json; knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.config.json_file import JsonFile

_LINEAR, _FULL = "linear_attention", "full_attention"
_STATE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """
    Attributes:
        layers: indices of these layers; the others attend.
        conv_width: tokens that the convolution before them sees, its own included.
        key_heads, value_heads: value head h goes with key head h // (value_heads // key_heads).
        key_dim, value_dim: of one head.
    """

    layers: tuple[int, ...]
    conv_width: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


def read_gated_delta(config: JsonFile, num_layers: int) -> GatedDeltaConfig | None:
    """None where every layer attends.

    Raises:
        CheckpointError: layer types that are not served or not one a layer, heads that do not share evenly, or a state
            in a type that is none.
    """
    kinds = config.texts("layer_types") or _regular(config.integer("full_attention_interval", 4), num_layers)
    unknown = sorted({*kinds} - {_LINEAR, _FULL})
    if unknown:
        raise config.error(f"layer_types {', '.join(unknown)} are not served; there are {_LINEAR}, {_FULL}")
    if len(kinds) != num_layers:
        raise config.error(f"layer_types names {len(kinds)} layers, and num_hidden_layers is {num_layers}")
    # States are kept in fp32 whatever is asked: a narrower one only saves memory.
    asked = config.text("mamba_ssm_dtype", "float32").removeprefix("torch.")
    if asked not in _STATE_DTYPES:
        raise config.error(f"mamba_ssm_dtype {asked!r} is not served; there are {', '.join(_STATE_DTYPES)}")
    key_heads, value_heads = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if value_heads % key_heads:
        raise config.error(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    width = config.integer("linear_conv_kernel_dim", 4)
    if width < 2:
        raise config.error(f"linear_conv_kernel_dim is {width}, and must be at least 2")
    layers = tuple(index for index, kind in enumerate(kinds) if kind == _LINEAR)
    if not layers:
        return None
    return GatedDeltaConfig(
        layers=layers,
        conv_width=width,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
    )


def _regular(interval: int, num_layers: int) -> tuple[str, ...]:
    return tuple(_LINEAR if (index + 1) % interval else _FULL for index in range(num_layers))
