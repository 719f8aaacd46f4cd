"""A whole folder: sentence-transformers files in both of their schemas, limits, prompts, and what is refused."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys

import pytest

from rose.config import DenseConfig, read_model_folder
from rose.config.pooling_facts import end_fact
from rose.errors import CheckpointError
from tests.support.tiny_checkpoints import (
    LEGACY_FLAGS,
    Dense,
    edit_json,
    read_json,
    tiny_bert,
    tiny_qwen3,
    tiny_xlm_roberta,
    write_json,
)
from tests.support.tiny_families import tiny_pplx

OURS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("mode", OURS)
def test_pooling_in_both_schemas(tmp_path, legacy, mode):
    folder = read_model_folder(tiny_bert(tmp_path / "m", pooling=mode, legacy=legacy))
    assert folder.pooling.modes == (OURS[mode],)
    assert folder.pooling.source == "1_Pooling/config.json"
    assert folder.normalize
    assert folder.dimension == 64


@pytest.mark.parametrize("legacy", [True, False])
def test_several_modes_are_concatenated(tmp_path, legacy):
    folder = read_model_folder(tiny_bert(tmp_path / "m", pooling=["mean", "max"], legacy=legacy))
    # The booleans carry no order: the format's own (cls, max, mean, ...) counts. A list carries one.
    assert folder.pooling.modes == (("max", "mean") if legacy else ("mean", "max"))
    assert folder.dimension == 128


def test_no_active_mode_means_mean(tmp_path):
    path = tiny_bert(tmp_path / "m")
    write_json(
        path / "1_Pooling/config.json", {"word_embedding_dimension": 64} | dict.fromkeys(LEGACY_FLAGS.values(), False)
    )
    pooling = read_model_folder(path).pooling
    assert pooling.modes == ("mean",)
    assert "names none" in pooling.source


def test_include_prompt(tmp_path):
    assert read_model_folder(tiny_bert(tmp_path / "a")).pooling.include_prompt
    assert not read_model_folder(tiny_bert(tmp_path / "b", include_prompt=False)).pooling.include_prompt


def test_cls_pooling_is_obeyed_and_never_guessed(tmp_path):
    """Report C83 (jundot/omlx#2594): a folder that does not state its pooling was served with mean pooling."""
    path = tiny_bert(tmp_path / "m", pooling="cls")
    assert read_model_folder(path).pooling.modes == ("cls",)
    # 1_Pooling without modules.json still states it.
    (path / "modules.json").rename(tmp_path / "modules.json")
    shutil.rmtree(path / "2_Normalize")
    assert read_model_folder(path).pooling.modes == ("cls",)
    # Neither, or only modules.json: refused, with the flag that settles it.
    shutil.rmtree(path / "1_Pooling")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"does not say how tokens are pooled.*--pooling mean, cls or last"):
            read_model_folder(path)
        folder = read_model_folder(path, pooling="cls")
        assert folder.pooling.modes == ("cls",)
        assert folder.pooling.source == "the caller's choice"
        shutil.copy(tmp_path / "modules.json", path)


def test_asked_pooling_wins_and_says_what_it_overrode(tmp_path):
    pooling = read_model_folder(tiny_bert(tmp_path / "m", pooling="cls"), pooling="mean").pooling
    assert pooling.modes == ("mean",)
    assert pooling.source == "the caller's choice (1_Pooling/config.json: cls)"
    with pytest.raises(CheckpointError, match="pooling 'median' is not served; there are cls, max"):
        read_model_folder(tmp_path / "m", pooling="median")


def test_modules_without_modules_json_are_refused(tmp_path):
    path = tiny_bert(tmp_path / "m", dense=[Dense(64, 96)])
    (path / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"2_Dense, 3_Normalize but no modules\.json"):
        read_model_folder(path)


def test_dense_chain(tmp_path):
    chain = [
        Dense(64, 96, activation=None),  # absent means Tanh
        Dense(96, 80, bias=False, activation="torch.nn.modules.linear.Identity"),
        Dense(80, 80, activation="torch.nn.modules.activation.GELU", residual=True),
    ]
    folder = read_model_folder(tiny_bert(tmp_path / "m", dense=chain, normalize=False, legacy=False))
    assert folder.dense == (
        DenseConfig(folder="2_Dense", in_features=64, out_features=96, bias=True, activation="tanh"),
        DenseConfig(folder="3_Dense", in_features=96, out_features=80, bias=False, activation=None),
        DenseConfig(folder="4_Dense", in_features=80, out_features=80, bias=True, activation="gelu", residual=True),
    )
    assert not folder.normalize
    assert folder.dimension == 80


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"in_features": 60}, "64 values arrive at 2_Dense, and its in_features is 60"),
        ({"activation_function": "torch.nn.modules.activation.PReLU"}, "PReLU' is not served"),
        ({"activation_function": "my_code.Tanh"}, "my_code.Tanh' is not served"),
        ({"module_input_name": "token_embeddings"}, "on 'token_embeddings' is not served"),
        ({"out_features": None}, "out_features is missing"),
    ],
)
def test_dense_that_is_not_served(tmp_path, changes, words):
    path = tiny_bert(tmp_path / "m", dense=[Dense(64, 96)])
    edit_json(path / "2_Dense/config.json", **changes)
    with pytest.raises(CheckpointError, match=words):
        read_model_folder(path)


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (["Transformer", "Pooling", "Normalize", "Dense"], "a Dense module at this place"),
        (["Transformer", "Dense", "Pooling"], "a Pooling module at this place"),
        (["Transformer", "Pooling", "Pooling"], "a Pooling module at this place"),
        (["Transformer", "SpladePooling"], "SpladePooling' is not served"),
        (["Router", "Pooling"], "Router' is not served"),
    ],
)
def test_chain_that_is_not_served(tmp_path, types, words):
    path = tiny_bert(tmp_path / "m", dense=[Dense(64, 96)])
    folders = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense"}
    modules = [
        {"idx": i, "path": folders.get(t, ""), "type": f"sentence_transformers.models.{t}"} for i, t in enumerate(types)
    ]
    write_json(path / "modules.json", modules)
    with pytest.raises(CheckpointError, match=words):
        read_model_folder(path)


def test_dropout_does_nothing(tmp_path):
    path = tiny_bert(tmp_path / "m")
    modules = read_json(path / "modules.json")
    modules.insert(2, {"idx": 9, "path": "", "type": "sentence_transformers.models.Dropout"})
    write_json(path / "modules.json", modules)
    assert read_model_folder(path).normalize


def test_module_path_outside_the_folder_is_refused(tmp_path):
    path = tiny_bert(tmp_path / "m")
    modules = read_json(path / "modules.json")
    modules[1]["path"] = "../1_Pooling"
    write_json(path / "modules.json", modules)
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        read_model_folder(path)


def test_backbone_in_a_subfolder(tmp_path):
    """As early sentence-transformers saved it."""
    path = tiny_bert(tmp_path / "m")
    (path / "0_Transformer").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (path / name).rename(path / "0_Transformer" / name)
    modules = read_json(path / "modules.json")
    modules[0]["path"] = "0_Transformer"
    write_json(path / "modules.json", modules)
    folder = read_model_folder(path)
    assert folder.backbone_path == path / "0_Transformer"
    assert folder.tokenizer_sha256 is not None


def test_prompts(tmp_path):
    prompts = {"query": "Instruct: find it\nQuery:", "document": ""}
    folder = read_model_folder(tiny_qwen3(tmp_path / "m", prompts=prompts, default_prompt_name="query"))
    assert dict(folder.prompts) == prompts  # no space added, none taken away
    assert folder.default_prompt_name == "query"
    assert folder.similarity == "cosine"
    edit_json(tmp_path / "m/config_sentence_transformers.json", default_prompt_name="passage")
    with pytest.raises(CheckpointError, match="'passage' is none of its prompts: query, document"):
        read_model_folder(tmp_path / "m")


@pytest.mark.parametrize("kind", ["CrossEncoder", "SparseEncoder"])
def test_other_kinds_of_model_are_refused(tmp_path, kind):
    path = tiny_bert(tmp_path / "m", prompts={})
    edit_json(path / "config_sentence_transformers.json", model_type=kind)
    with pytest.raises(CheckpointError, match=f"a {kind} is not served"):
        read_model_folder(path)


def test_max_tokens_is_the_least_of_the_limits(tmp_path):
    assert read_model_folder(tiny_bert(tmp_path / "positions", max_positions=90)).max_tokens == 90
    assert read_model_folder(tiny_bert(tmp_path / "sentence", max_seq_length=70)).max_tokens == 70
    path = tiny_bert(tmp_path / "tokenizer", max_seq_length=70)
    edit_json(path / "tokenizer_config.json", model_max_length=50)
    assert read_model_folder(path).max_tokens == 50
    edit_json(path / "tokenizer_config.json", model_max_length=10**30)  # how "no limit" is written
    assert read_model_folder(path).max_tokens == 70


def test_position_offset_is_taken_off_the_limit(tmp_path):
    """The position table of XLM-R has two more rows than tokens it can place."""
    path = tiny_xlm_roberta(tmp_path / "m", max_positions=100)
    edit_json(path / "tokenizer_config.json", model_max_length=102)
    assert read_json(path / "config.json")["max_position_embeddings"] == 102
    assert read_model_folder(path).max_tokens == 100


def test_pplx_folder(tmp_path):
    """No Normalize, its own quantiser, a tokenizer limit far beyond the model's."""
    path = tiny_qwen3(tmp_path / "m", bidirectional=True, max_positions=200)
    assert read_json(path / "tokenizer_config.json")["model_max_length"] == 131072
    folder = read_model_folder(path)
    assert folder.max_tokens == 200
    assert (folder.pooling.modes, folder.normalize, folder.quantizer) == (("mean",), False, "tanh_int8")
    assert not folder.architecture.causal
    assert folder.architecture.causal_source == "config.json: use_bidirectional_attention"


def test_tokenizer_digest_and_lower_case(tmp_path):
    path = tiny_bert(tmp_path / "m", max_seq_length=64)
    folder = read_model_folder(path)
    assert folder.tokenizer_sha256 == hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    assert not folder.do_lower_case
    edit_json(path / "sentence_bert_config.json", do_lower_case=True)
    (path / "tokenizer.json").unlink()
    folder = read_model_folder(path)
    assert folder.tokenizer_sha256 is None
    assert folder.do_lower_case


def test_matryoshka_dimensions(tmp_path):
    folder = read_model_folder(tiny_bert(tmp_path / "m", config={"matryoshka_dimensions": [64, 32, 16]}))
    assert folder.matryoshka_dimensions == (16, 32, 64)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{not json", "config.json cannot be read"),
        ("config.json", "[1, 2]", "config.json holds a list where an object is expected"),
        ("config.json", "\udcff".encode("utf-8", "surrogateescape"), "config.json cannot be read"),
        ("modules.json", "{}", "modules.json must hold a list of modules"),
        ("modules.json", "[]", "modules.json must hold a list of modules"),
        ("modules.json", '["Transformer"]', "modules.json holds a string where an object"),
        ("modules.json", '[{"path": ""}]', "type is missing"),
        ("1_Pooling/config.json", '{"pooling_mode": "median"}', "pooling_mode 'median' is not served"),
        ("1_Pooling/config.json", '{"pooling_mode": 3}', "must be a list of strings"),
        ("1_Pooling/config.json", '{"pooling_mode_best_token": true}', "pooling_mode_best_token is not served"),
        ("1_Pooling/config.json", '{"word_embedding_dimension": 65}', "pooling module takes 65"),
        ("1_Pooling/config.json", '{"pooling_mode": "cls", "embedding_dimension": 9}', "pooling module takes 9"),
    ],
)
def test_broken_files_are_named(tmp_path, file, content, words):
    path = tiny_bert(tmp_path / "m")
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=words):
        read_model_folder(path)


def test_no_folder(tmp_path):
    with pytest.raises(CheckpointError, match="nothing-here is not a folder"):
        read_model_folder(tmp_path / "nothing-here")


def test_reading_needs_no_torch(tmp_path):
    """The front reads folders too, and runs where torch is not installed."""
    tiny_bert(tmp_path / "m", dense=[Dense(64, 96)], prompts={"query": "q: "})
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from rose.config import read_model_folder\n"
        f"print(read_model_folder({str(tmp_path / 'm')!r}).dimension)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "96", done.stderr


@pytest.mark.parametrize("beside", ["model", "nothing"])
def test_an_adapter_is_never_left_out_in_silence(tmp_path, beside):
    path = tiny_qwen3(tmp_path / "m") if beside == "model" else tmp_path / "m"
    path.mkdir(exist_ok=True)
    write_json(path / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "base", "r": 4})
    with pytest.raises(CheckpointError, match=r"holds an adapter .* `rose convert .*/m --to embedder`"):
        read_model_folder(path)


REMOTE = {"AutoConfig": "configuration_qwen.QwenConfig", "AutoModel": "modeling_qwen.Qwen2Model"}


def test_code_of_the_checkpoints_own_does_not_say_what_a_token_sees(tmp_path):
    """Report C86 (vllm#16892): gte-Qwen2 was bidirectional by its code alone."""
    path = tiny_qwen3(tmp_path / "m", config={"auto_map": REMOTE})
    with pytest.raises(CheckpointError, match=r"modeling_qwen.Qwen2Model.* settle it with --causal or --bidirectional"):
        read_model_folder(path)
    assert not read_model_folder(path, causal=False).architecture.causal
    assert read_model_folder(path, task="generate").architecture.causal
    edit_json(path / "config.json", is_causal=False)
    assert not read_model_folder(path).architecture.causal


def test_code_of_its_own_beside_a_class_that_says_it(tmp_path):
    """pplx-embed names its code too, and is known."""
    path = tiny_pplx(tmp_path / "pplx", config={"auto_map": REMOTE, "use_bidirectional_attention": None})
    assert not read_model_folder(path).architecture.causal
    assert read_model_folder(tiny_bert(tmp_path / "bert", config={"auto_map": REMOTE})).pooling is not None


def test_a_promised_end_token_that_is_not_added_is_told(tmp_path):
    """Report C85 (sentence-transformers#2591): the last token of the text would be pooled."""
    path = tiny_qwen3(tmp_path / "m", pooling="lasttoken")
    ((_, added),) = end_fact(read_model_folder(path))
    assert added == repr("<|endoftext|>")
    tokenizer = read_json(path / "tokenizer.json")
    write_json(path / "tokenizer.json", tokenizer | {"post_processor": None})
    edit_json(path / "tokenizer_config.json", add_eos_token=True)
    ((_, told),) = end_fact(read_model_folder(path))
    assert told == (
        "none; the text's own last token is pooled "
        "(tokenizer_config.json: add_eos_token promises one, and it is not added)"
    )
    assert end_fact(read_model_folder(tiny_bert(tmp_path / "bert"))) == []
