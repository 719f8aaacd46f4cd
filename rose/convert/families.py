"""The rule tables, one per family of checkpoints.

A tensor that no rule mentions keeps its name; what neither a rule nor the model knows is refused.
"""

from __future__ import annotations

from rose.convert.rules import Drop, Family, Fuse, Rename

BERT = Family(
    anchor="encoder.layer.0.output.dense.weight",
    prefixes=("", "bert.", "roberta.", "model.", "model.bert.", "model.roberta."),
    rules=(
        Fuse(
            tuple(f"encoder.layer.{{n}}.attention.self.{part}.{{kind}}" for part in ("query", "key", "value")),
            "encoder.layer.{n}.attention.self.qkv_proj.{kind}",
        ),
        # Names that TensorFlow gave the LayerNorm, still found in early conversions.
        Rename("{path*}.LayerNorm.gamma", "{path*}.LayerNorm.weight"),
        Rename("{path*}.LayerNorm.beta", "{path*}.LayerNorm.bias"),
        Drop("embeddings.position_ids", "0, 1, 2, ...: a buffer that older versions stored"),
        Drop("embeddings.token_type_ids", "zeros, likewise"),
        Drop("pooler.{rest*}", "the [CLS] pooler of next-sentence prediction; no embedder reads it"),
    ),
    outside=(
        Drop("cls.{rest*}", "head of masked-language modelling"),
        Drop("lm_head.{rest*}", "the same in the RoBERTa family"),
    ),
    tied=("cls.predictions.decoder.weight", "embeddings.word_embeddings.weight"),
)

QWEN3 = Family(
    anchor="layers.0.mlp.down_proj.weight",
    prefixes=("", "model.", "language_model.", "model.language_model."),
    rules=(
        Fuse(
            tuple(f"layers.{{n}}.self_attn.{part}_proj.{{kind}}" for part in ("q", "k", "v")),
            "layers.{n}.self_attn.qkv_proj.{kind}",
        ),
        Fuse(
            tuple(f"layers.{{n}}.mlp.{part}_proj.{{kind}}" for part in ("gate", "up")),
            "layers.{n}.mlp.gate_up_proj.{kind}",
        ),
        Drop("{path*}.rotary_emb.inv_freq", "computed from rope_theta"),
        Drop("rotary_emb.inv_freq", "likewise, in newer versions"),
    ),
    outside=(
        Drop("lm_head.weight", "logits over the vocabulary: an embedder needs none, and a tied one is the embedding"),
    ),
    tied=("lm_head.weight", "embed_tokens.weight"),
)

QWEN3_5 = Family(
    anchor=QWEN3.anchor,
    prefixes=QWEN3.prefixes,
    rules=(
        *QWEN3.rules,
        Fuse(
            tuple(f"layers.{{n}}.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
            "layers.{n}.linear_attn.in_proj.weight",
        ),
    ),
    outside=(
        *QWEN3.outside,
        Drop("model.visual.{rest*}", "the vision tower; only texts are served"),
        Drop("visual.{rest*}", "the vision tower; only texts are served"),
        Drop("mtp.{rest*}", "layers that guess further tokens ahead, which nothing here asks"),
    ),
    tied=QWEN3.tied,
)

# Heads that score a sequence, by the registry's name -> where the checkpoint has them, with or without the prefix.
HEADS: dict[str, tuple[Rename, ...]] = {
    "bert": (
        Rename("pooler.dense.{kind}", "pooler.dense.{kind}"),
        Rename("classifier.{kind}", "classifier.{kind}"),
    ),
    "roberta": (
        Rename("classifier.dense.{kind}", "dense.{kind}"),
        Rename("classifier.out_proj.{kind}", "out_proj.{kind}"),
    ),
    "last": (Rename("score.{kind}", "{kind}"),),
}

FAMILIES: dict[str, Family] = {"bert": BERT, "qwen3": QWEN3, "llama": QWEN3, "qwen3_5": QWEN3_5}
