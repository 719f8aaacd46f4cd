"""What the sentence-transformers files say comes after the backbone: pooling, Dense chain, normalisation, quantiser,
or the yes/no score of a language model.

Reads modules.json and N_*/config.json in both of their schemas. Knows module types by the last part of their dotted
name, because the packages that write them have moved more than once; knows neither weights nor architectures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from rose.config.json_file import JsonFile, read_json
from rose.errors import CheckpointError

# sentence-transformers name -> rose.kernels.pool.PoolMode, in the order in which several are concatenated.
POOL_MODES = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
# Boolean of the older schema -> sentence-transformers name, in the same order.
POOL_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Class name at the end of `activation_function` -> our name.
DENSE_ACTIVATIONS: dict[str, str | None] = {
    "Identity": None,
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}
_SETTLE_POOLING = "settle it with --pooling mean, cls or last"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How token rows become one vector.

    Attributes:
        modes: in order; several are concatenated. Names of rose.kernels.pool.PoolMode.
        include_prompt: whether the prompt's tokens take part.
        source: the file or flag it was read from, for the start-up print.
    """

    modes: tuple[str, ...]
    include_prompt: bool = True
    source: str

    @property
    def told(self) -> str:
        """In words, without the source."""
        return " + ".join(self.modes) + ("" if self.include_prompt else ", without the prompt")

    @property
    def excludes_prompt(self) -> bool:
        """Whether leaving the prompt out changes anything: a text's last token is never the prompt's."""
        return not self.include_prompt and self.modes != ("last",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """One Dense module after pooling; `folder` holds its weights (`linear.weight`, `linear.bias`).

    Attributes:
        activation: "tanh", "relu", "gelu", "silu", "sigmoid" or None.
        residual: the input is added to the output, through `residual.weight` where the widths differ.
    """

    folder: str
    in_features: int
    out_features: int
    bias: bool
    activation: str | None
    residual: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScoreConfig:
    """A language model's logits as a score.

    Attributes:
        true_token_id, false_token_id: the score is the difference of their logits, or the first alone.
        source: the file it was read from.
    """

    true_token_id: int
    false_token_id: int | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceModules:
    """The chain of modules.json behind the backbone.

    Attributes:
        subfolder: where the backbone's own files lie, relative to the folder ("" or "0_Transformer").
        pooling: None where no file states one.
        pooling_width: width of the rows it pools, or None where no file states one.
        quantizer: the last step of the vector's integer form, a name of rose.kernels.pool.Finish, or None.
        logit_score: instead of pooling, for rerankers that are language models.
    """

    subfolder: str = ""
    pooling: PoolingConfig | None = None
    pooling_width: int | None = None
    dense: tuple[DenseConfig, ...] = ()
    normalize: bool = False
    quantizer: str | None = None
    logit_score: LogitScoreConfig | None = None


def read_modules(root: Path) -> SentenceModules:
    """Read modules.json, or, where there is none, 1_Pooling/config.json alone.

    Raises:
        CheckpointError: malformed JSON, an unknown module type, or an order that is not
            Transformer, Pooling, Dense ..., Normalize.
    """
    path = root / "modules.json"
    if not path.exists():
        return _without_modules_json(root)
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise CheckpointError(f"{path} must hold a list of modules")
    chain = SentenceModules()
    stage = 0
    for entry in entries:
        module = JsonFile.of(path, entry)
        kind = module.text("type").rsplit(".", 1)[-1]
        if kind not in _STAGES:
            raise CheckpointError(f"{path}: module type {module.text('type')!r} is not served")
        if _STAGES[kind] < stage or (_STAGES[kind] == stage and kind not in ("Dense", "Dropout")):
            raise CheckpointError(f"{path}: a {kind} module at this place in the chain is not served")
        stage = _STAGES[kind]
        chain = _append(chain, kind, root, _inside(module))
    if chain.logit_score is not None and (chain.pooling or chain.dense or chain.normalize or chain.quantizer):
        raise CheckpointError(f"{path}: a LogitScore module behind anything but a Transformer is not served")
    return chain


# Dropout does nothing once trained, wherever between pooling and normalisation it stands.
_STAGES = {
    "Transformer": 1,
    "Pooling": 2,
    "Dense": 3,
    "Dropout": 3,
    "Normalize": 4,
    "FlexibleQuantizer": 5,
    "LogitScore": 6,
}


def _append(chain: SentenceModules, kind: str, root: Path, folder: str) -> SentenceModules:
    config_path = root / folder / "config.json"
    if kind == "Transformer":
        return replace(chain, subfolder=folder)
    if kind == "Pooling":
        return _with_pooling(chain, config_path, root)
    if kind == "Dense":
        return replace(chain, dense=(*chain.dense, _read_dense(JsonFile.read(config_path), folder)))
    if kind == "Normalize":
        _refuse_other_features(JsonFile.read_if_there(config_path), "Normalize")
        return replace(chain, normalize=True)
    if kind == "FlexibleQuantizer":
        return replace(chain, quantizer="tanh_int8")
    if kind == "LogitScore":
        return replace(chain, logit_score=_read_logit_score(JsonFile.read(config_path), f"{folder}/config.json"))
    return chain


def _read_logit_score(config: JsonFile, source: str) -> LogitScoreConfig:
    return LogitScoreConfig(
        true_token_id=config.count("true_token_id"),
        false_token_id=config.count("false_token_id") if "false_token_id" in config else None,
        source=source,
    )


def _without_modules_json(root: Path) -> SentenceModules:
    extra = sorted(entry.name for entry in root.glob("[0-9]_*") if entry.is_dir() and entry.name != "1_Pooling")
    if extra:
        raise CheckpointError(f"{root} has {', '.join(extra)} but no modules.json to say how they are chained")
    return _with_pooling(SentenceModules(), root / "1_Pooling" / "config.json", root)


def _with_pooling(chain: SentenceModules, path: Path, root: Path) -> SentenceModules:
    if not path.exists():
        return chain
    config = JsonFile.read(path)
    key = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    width = config.integer(key) if key in config else None
    return replace(chain, pooling=_read_pooling(config, str(path.relative_to(root))), pooling_width=width)


def _read_pooling(config: JsonFile, source: str) -> PoolingConfig:
    """Either schema of a Pooling module's config.json: booleans, or `pooling_mode` as a name or a list of names."""
    stated = config.data.get("pooling_mode")
    if stated is not None:
        names = (stated,) if isinstance(stated, str) else config.texts("pooling_mode")
    else:
        active = [key for key, value in config.data.items() if key.startswith("pooling_mode_") and value]
        unknown = [key for key in active if key not in POOL_FLAGS]
        if unknown:
            raise config.error(f"{unknown[0]} is not served; there are {', '.join(POOL_FLAGS)}")
        names = tuple(name for key, name in POOL_FLAGS.items() if key in active)
    for name in names:
        if name not in POOL_MODES:
            raise config.error(f"pooling_mode {name!r} is not served; there are {', '.join(POOL_MODES)}")
    if not names:
        names, source = ("mean",), f"{source} names none, which means mean"
    modes = tuple(POOL_MODES[name] for name in names)
    return PoolingConfig(modes=modes, include_prompt=config.flag("include_prompt", True), source=source)


def asked_pooling(mode: str, stated: PoolingConfig | None) -> PoolingConfig:
    """The pooling a caller asked for, which wins over the files; the source says what they had.

    Raises:
        CheckpointError: an unknown mode.
    """
    name = POOL_MODES.get(mode, mode)
    if name not in POOL_MODES.values():
        raise CheckpointError(f"pooling {mode!r} is not served; there are {', '.join(POOL_MODES.values())}")
    beside = "" if stated is None else f" ({stated.source}: {' + '.join(stated.modes)})"
    include = True if stated is None else stated.include_prompt
    return PoolingConfig(modes=(name,), include_prompt=include, source=f"the caller's choice{beside}")


def missing_pooling(root: Path, *, could_rerank: bool) -> CheckpointError:
    """
    Args:
        could_rerank: it has a language model's head, of which yes and no are a score.
    """
    otherwise = ", or say --task rerank if it scores pairs" if could_rerank else ""
    return CheckpointError(f"{root} does not say how tokens are pooled into a vector; {_SETTLE_POOLING}{otherwise}")


def _read_dense(config: JsonFile, folder: str) -> DenseConfig:
    _refuse_other_features(config, "Dense")
    # Tanh is what the format means by silence.
    name = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    last = name.rsplit(".", 1)[-1]
    if not name.startswith("torch.nn.") or last not in DENSE_ACTIVATIONS:
        raise config.error(f"activation_function {name!r} is not served; there are {', '.join(DENSE_ACTIVATIONS)}")
    return DenseConfig(
        folder=folder,
        in_features=config.integer("in_features"),
        out_features=config.integer("out_features"),
        bias=config.flag("bias", True),
        activation=DENSE_ACTIVATIONS[last],
        residual=config.flag("use_residual", False),
    )


def _refuse_other_features(config: JsonFile, kind: str) -> None:
    for key in ("module_input_name", "module_output_name"):
        name = config.text(key, "sentence_embedding")
        if name != "sentence_embedding":
            raise config.error(f"a {kind} module on {name!r} is not served, only on the sentence's vector")


def _inside(module: JsonFile) -> str:
    """The module's folder, which has to lie inside the model's."""
    folder = PurePosixPath(module.text("path", ""))
    if folder.is_absolute() or ".." in folder.parts:
        raise module.error(f"path {str(folder)!r} leads out of the folder")
    return "" if str(folder) == "." else str(folder)
