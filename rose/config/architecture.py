"""The numbers of one architecture, under the same names whatever family the checkpoint comes from.

Knows config.json; knows neither weights nor pooling. What would change the result and is not served (some rotary
scalings, windows in some layers only, relative positions, most ways to quantise) is refused by name instead of ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rose.config.gated_delta import GatedDeltaConfig, read_gated_delta
from rose.config.json_file import JsonFile
from rose.config.rope import RopeScaling, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchitectureConfig:
    """Shape of a transformer backbone.

    Attributes:
        architecture: class name from `architectures` ("BertModel", "XLMRobertaModel", "Qwen3Model", ...).
        model_type: `model_type` of config.json ("bert", "xlm-roberta", "qwen3", ...).
        head_dim: dimensions per attention head; not always hidden_size / num_heads.
        norm_eps: epsilon of LayerNorm or RMSNorm.
        activation: "gelu" (erf), "gelu_tanh", "relu" or "silu".
        max_positions: longest sequence the position table or the rotary range allows, in tokens.
        position_offset: added to a token's index in its sequence to find its row in the position table
            (0 for BERT, pad_token_id + 1 for the RoBERTa family).
        causal: whether token i sees only tokens 0..i.
        causal_source: where `causal` came from ("config.json: is_causal", "default of qwen3", ...), printed at start.
        rope_theta: rotary base, or None without rotary embedding.
        rope_scaling: what stretches it, or None for the plain frequencies.
        rotary_dim: how many dimensions of a head are turned, the first ones; None: all.
        gated_delta: the layers that keep a recurrent state; None: every layer attends.
        attention_bias: q, k and v have biases; o has one too unless `output_bias` says otherwise.
        output_bias: whether o has a bias; None: as `attention_bias`.
        mlp_bias: the feed-forward's products have biases.
        window: a token sees itself and so many before it (and behind it, where not causal), or None for all.
        dtype: dtype the checkpoint stores or asks for ("float32", "bfloat16", "float16").
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    activation: str
    max_positions: int
    position_offset: int = 0
    type_vocab_size: int = 0
    causal: bool
    causal_source: str
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    gated_delta: GatedDeltaConfig | None = None
    attention_bias: bool = False
    output_bias: bool | None = None
    mlp_bias: bool = False
    window: int | None = None
    tie_word_embeddings: bool = True
    pad_token_id: int | None = None
    dtype: str = "float32"


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def read_architecture(config: JsonFile, causal: bool | None = None) -> ArchitectureConfig:
    """Read config.json.

    Args:
        causal: overrides what the file says of the attention mode.

    Raises:
        CheckpointError: a model_type or a feature that is not served, a missing key, or contradicting keys.
    """
    model_type = config.text("model_type")
    reader = _READERS.get(model_type)
    if reader is None:
        raise config.error(f"model_type {model_type!r} is not served; there are {', '.join(_READERS)}")
    method = quantized_by(config)
    if method is not None and method not in QUANTIZED_BY:
        raise config.error(f"the weights are quantised ({method}), which is not served; {', '.join(QUANTIZED_BY)} are")
    return reader(config, causal)


def check_mode_is_known(config: JsonFile, architecture: ArchitectureConfig) -> None:
    """Whether something says what a token sees, of a model that is not to generate.

    Raises:
        CheckpointError: code of the checkpoint's own runs the model elsewhere, and no key says that it is causal: such
            code made gte-Qwen2 bidirectional.
    """
    named = config.child("auto_map").data
    code = named.get("AutoModel") or named.get("AutoModelForCausalLM")
    if code is not None and architecture.causal and architecture.causal_source.startswith("default of"):
        raise config.error(
            f"auto_map names code of the checkpoint's own ({code}), which is not run here and may attend both ways; "
            "settle it with --causal or --bidirectional"
        )


# What rose/convert/quantized/schemes.py reads.
QUANTIZED_BY = ("compressed-tensors", "fp8", "modelopt")


def quantized_by(config: JsonFile) -> str | None:
    """Who quantised the weights, by the name that config.json gives; None where they are plain."""
    own = quantization_of(config)
    return None if own is None else own.text("quant_method", "of an unnamed method")


def quantization_of(config: JsonFile) -> JsonFile | None:
    """The object that says how the weights are quantised; None where they are plain.

    compressed-tensors called it `compression_config` first.
    """
    for place in (config, config.child("text_config")):
        for key in ("quantization_config", "compression_config"):
            if key in place:
                return place.child(key)
    return None


def _read_bert(config: JsonFile, causal: bool | None) -> ArchitectureConfig:
    """BERT and the RoBERTa family: the same blocks; RoBERTa leaves the first pad_token_id + 1 position rows unused."""
    model_type = config.text("model_type")
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise config.error(f"position_embedding_type {kind!r} is not served, only 'absolute'")
    if config.flag("add_cross_attention", False):
        raise config.error("add_cross_attention is set: decoders of an encoder-decoder pair are not served")
    pad = config.count("pad_token_id", 0 if model_type == "bert" else 1)
    offset = 0 if model_type == "bert" else pad + 1
    rows = config.integer("max_position_embeddings")
    if rows <= offset:
        raise config.error(f"max_position_embeddings is {rows}, and the first {offset} rows are not for tokens")
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    if hidden % heads:
        raise config.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    is_causal, source = _causal(config, causal, {"is_causal": True, "is_decoder": True}, default=False)
    return ArchitectureConfig(
        architecture=_architecture(config, "BertModel" if model_type == "bert" else "RobertaModel"),
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=config.integer("intermediate_size"),
        norm_eps=config.number("layer_norm_eps", 1e-12),
        activation=_activation(config, "gelu"),
        max_positions=rows - offset,
        position_offset=offset,
        type_vocab_size=config.count("type_vocab_size", 2),
        causal=is_causal,
        causal_source=source,
        attention_bias=True,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        pad_token_id=pad,
        dtype=_dtype(config),
    )


def _read_qwen3(config: JsonFile, causal: bool | None) -> ArchitectureConfig:
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    _refuse_sliding_window(config)
    is_causal, source = _causal(config, causal, _DECODER_KEYS, default=config.text("model_type") == "qwen3")
    rope = read_rope(config)
    return ArchitectureConfig(
        architecture=_architecture(config, "Qwen3Model"),
        model_type=config.text("model_type"),
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        # The family's own default; hidden_size / num_heads would be 64 for the 0.6B model, whose heads have 128.
        head_dim=config.integer("head_dim", 128),
        intermediate_size=config.integer("intermediate_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=_activation(config, "silu"),
        max_positions=rope.max_positions,
        causal=is_causal,
        causal_source=source,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        attention_bias=config.flag("attention_bias", False),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        pad_token_id=config.count("pad_token_id") if "pad_token_id" in config else None,
        dtype=_dtype(config),
    )


# model_type -> (class name, base of rotary embedding, RMSNorm's epsilon) where config.json states none.
_LLAMAS = {
    "llama": ("LlamaModel", 10000.0, 1e-6),
    "mistral": ("MistralModel", 10000.0, 1e-6),
    "qwen2": ("Qwen2Model", 10000.0, 1e-6),
}


def _read_llama(config: JsonFile, causal: bool | None) -> ArchitectureConfig:
    """Llama and what differs from it by biases or a window."""
    model_type = config.text("model_type")
    name, theta, eps = _LLAMAS[model_type]
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    # Mistral means 8 by silence; its checkpoints all say so.
    kv_heads = config.integer("num_key_value_heads", None if model_type == "mistral" else heads)
    if heads % kv_heads:
        raise config.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if "head_dim" not in config and hidden % heads:
        raise config.error(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    if model_type == "qwen2":
        _refuse_sliding_window(config)
    is_causal, source = _causal(config, causal, _DECODER_KEYS, default=True)
    rope = read_rope(config, default_theta=theta)
    bias = model_type == "qwen2" or (model_type == "llama" and config.flag("attention_bias", False))
    return ArchitectureConfig(
        architecture=_architecture(config, name),
        model_type=model_type,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.integer("head_dim", hidden // heads),
        intermediate_size=config.integer("intermediate_size"),
        norm_eps=config.number("rms_norm_eps", eps),
        activation=_activation(config, "silu"),
        max_positions=rope.max_positions,
        causal=is_causal,
        causal_source=source,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        attention_bias=bias,
        output_bias=bias and model_type == "llama",
        mlp_bias=model_type == "llama" and config.flag("mlp_bias", False),
        window=_window(config, rope.max_positions) if model_type == "mistral" else None,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        pad_token_id=config.count("pad_token_id") if "pad_token_id" in config else None,
        dtype=_dtype(config),
    )


def _read_qwen3_5(config: JsonFile, causal: bool | None) -> ArchitectureConfig:
    """Qwen3.5's text model: config.json of its own, or the `text_config` beside a vision tower's.

    The three position axes of mrope are one for text, so its sections change nothing.
    """
    text = config.child("text_config") if "text_config" in config else config
    heads, kv_heads = text.integer("num_attention_heads", 16), text.integer("num_key_value_heads", 4)
    if heads % kv_heads:
        raise config.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if not text.flag("attn_output_gate", True):
        raise config.error("attn_output_gate is false: attention without its gate is not served for this family")
    activation = _activation(text, "silu")
    if activation != "silu":
        raise config.error(f"hidden_act {activation!r} is not served for this family, only 'silu'")
    rope = read_rope(text, default_share=0.25)
    head_dim, num_layers = text.integer("head_dim", 256), text.integer("num_hidden_layers")
    rotary_dim = int(head_dim * rope.share)
    if rotary_dim % 2:
        raise config.error(f"{rope.share:g} of head_dim {head_dim} is {rotary_dim}, and must be even to be turned")
    is_causal, source = _retrieval_attention(config, text, causal)
    # A generating class goes by the outer key, where there is one.
    tied = config if "tie_word_embeddings" in config else text
    return ArchitectureConfig(
        architecture=_architecture(config, "Qwen3_5TextModel"),
        model_type=config.text("model_type"),
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=text.integer("intermediate_size"),
        norm_eps=text.number("rms_norm_eps", 1e-6),
        activation=activation,
        max_positions=rope.max_positions,
        causal=is_causal,
        causal_source=source,
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        rotary_dim=rotary_dim,
        gated_delta=read_gated_delta(text, num_layers),
        attention_bias=text.flag("attention_bias", False),
        tie_word_embeddings=tied.flag("tie_word_embeddings", False),
        pad_token_id=text.count("pad_token_id") if "pad_token_id" in text else None,
        dtype=_dtype(config if "dtype" in config or "torch_dtype" in config else text),
    )


def _retrieval_attention(config: JsonFile, text: JsonFile, asked: bool | None) -> tuple[bool, str]:
    """(causal, where from) of a hybrid model's attending layers; a recurrence has one direction whatever is said.

    The keys stand in either of the two objects.
    """
    if asked is not None:
        return asked, "the caller's choice"
    said: dict[str, bool] = {}
    for level, before in [(config, "")] + ([(text, "text_config.")] if text is not config else []):
        for key in ("is_causal", "use_bidirectional_attention"):
            if key in level:
                said[before + key] = level.flag(key) == (key == "is_causal")
        contract = level.text(_CONTRACT, "")
        if contract not in ("", "causal", "bidirectional"):
            raise config.error(f"{_CONTRACT} is {contract!r}, and must be causal or bidirectional")
        if contract:
            said[before + _CONTRACT] = contract == "causal"
    return _settled(config, said, default=True)


_CONTRACT = "retrieval_attention_contract"
_DECODER_KEYS = {"is_causal": True, "use_bidirectional_attention": False, "is_decoder": True}
_READERS: dict[str, Callable[[JsonFile, bool | None], ArchitectureConfig]] = {
    "bert": _read_bert,
    "roberta": _read_bert,
    "xlm-roberta": _read_bert,
    "camembert": _read_bert,
    "qwen3": _read_qwen3,
    "bidirectional_pplx_qwen3": _read_qwen3,
    **dict.fromkeys(_LLAMAS, _read_llama),
    "qwen3_5": _read_qwen3_5,
    "qwen3_5_text": _read_qwen3_5,
}


def _causal(config: JsonFile, asked: bool | None, keys: dict[str, bool], *, default: bool) -> tuple[bool, str]:
    """(causal, where from). `keys` names the flags that state it, and what true means for each."""
    said = {key: config.flag(key) == meaning for key, meaning in keys.items() if key in config}
    if asked is not None:
        return asked, "the caller's choice"
    if said == {"is_decoder": False} and _architecture(config, "").endswith("ForCausalLM"):
        # Older writers put `is_decoder: false` into every config; it only means something beside another class name.
        said["architectures"] = True
    return _settled(config, said, default=default)


def _settled(config: JsonFile, said: dict[str, bool], *, default: bool) -> tuple[bool, str]:
    """`said` is what each key states; one of an inner object is written with a dot."""
    if len(set(said.values())) > 1:
        outer = {key: config.child(key.split(".")[0]) if "." in key else config for key in said}
        stated = ", ".join(f"{key} = {outer[key].data[key.split('.')[-1]]}" for key in said)
        raise config.error(
            f"the attention mode is contradictory ({stated}); settle it with --causal or --bidirectional"
        )
    for key, value in said.items():
        return value, f"config.json: {key}"
    return default, f"default of {config.text('model_type')}"


def _architecture(config: JsonFile, default: str) -> str:
    names = config.texts("architectures")
    return names[0] if names else default


def _activation(config: JsonFile, default: str) -> str:
    name = config.text("hidden_act", default)
    if name not in ACTIVATIONS:
        raise config.error(f"hidden_act {name!r} is not served; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _dtype(config: JsonFile) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32"))
    return name.removeprefix("torch.")


def _window(config: JsonFile, positions: int) -> int | None:
    """Mistral's, the same in all layers; a token counts itself among the `sliding_window` it sees."""
    if any(kind != "sliding_attention" for kind in config.texts("layer_types")):
        raise config.error("layer_types has layers without the window, which is not served for this family")
    if "sliding_window" in config.data and "sliding_window" not in config:
        return None  # null is none; 4096 is what silence means
    seen = config.integer("sliding_window", 4096)
    return None if seen >= positions else seen - 1


def _refuse_sliding_window(config: JsonFile) -> None:
    """A window is served as one for all layers only; a Qwen checkpoint that uses one has it in some layers."""
    slides = config.flag("use_sliding_window", False) and "sliding_window" in config
    some = config.count("max_window_layers", 0) < config.integer("num_hidden_layers")
    if (slides and some) or "sliding_attention" in config.texts("layer_types"):
        raise config.error("sliding-window layers are not served for this family")
