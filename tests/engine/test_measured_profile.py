"""An engine serves as its profile says: the backend by load, threads, graphs; and as ever where there is none."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from rose.attention_backends import auto
from rose.attention_backends.auto import AutoBackend
from rose.attention_backends.choose import Load
from rose.config import EngineConfig, read_model_folder
from rose.config.profile import AttentionGrid, ModelNumbers, Point, Profile, write_profile
from rose.config.profile_files import Found
from rose.convert import load_generative, load_model
from rose.engine import build_engine
from rose.engine.build import INFLECTION_TOKENS, _measured
from rose.engine.generation.build import build_generation_engine
from rose.engine.profiles import attention_shape, model_shape, preferred, this_machine
from rose.errors import StartupError
from rose.kernels import tiles
from tests.support.tiny_checkpoints import tiny_bert
from tests.support.tiny_language_models import tiny_lm

CPU = torch.device("cpu")
CONFIG = EngineConfig(online_tokens=96, bulk_tokens=256, max_sequences=16, max_tokens=64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return read_model_folder(tiny_bert(tmp_path_factory.mktemp("profile") / "model"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def point(us: dict[str, float]) -> Point:
    return Point(tokens=512, sequences=1, max_length=512, us=us)


def profile(model, folder, **excluded: str) -> Profile:
    shape = attention_shape(model.attention_spec(CPU, torch.float32))
    numbers = ModelNumbers(shape=model_shape(folder.architecture, shape), name="tiny", num_threads=1)
    grid = AttentionGrid(shape=shape, points=(point({"flashinfer2": 1.0, "torch_sdpa": 2.0}),), excluded=excluded)
    return Profile(machine=this_machine(CPU), source="a test", grids=(grid,), models=(numbers,))


def built(model, config=CONFIG, **options):
    engine = build_engine(model, config, **options)
    engine.close()
    return engine


class Named:
    def __init__(self, name, spec) -> None:
        self.name = name


def test_each_load_goes_where_the_profile_says(model, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(auto, "try_backend", Named)
    write_profile(profile(model, folder), tmp_path / "p.json")
    with_it = built(model, replace(CONFIG, profile=str(tmp_path / "p.json")), num_threads=1)
    without = built(model, replace(CONFIG, profile="none"), num_threads=1)
    load = Load(512, 1, 512)
    assert isinstance(with_it.backend, AutoBackend)
    assert isinstance(without.backend, AutoBackend)
    assert with_it.backend.explain(load).backend == "flashinfer2"
    assert without.backend.explain(load).backend == "flash_attention4"


def test_what_was_wrong_when_it_was_measured_is_not_used(model, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(auto, "try_backend", Named)
    write_profile(profile(model, folder, flashinfer2="wrong at 1 x 64"), tmp_path / "p.json")
    engine = built(model, replace(CONFIG, profile=str(tmp_path / "p.json")), num_threads=1)
    assert "flashinfer2" not in engine.backend_names
    assert isinstance(engine.backend, AutoBackend)
    assert engine.backend.left_out["flashinfer2"] == "wrong at 1 x 64"


def test_it_is_found_by_itself_in_the_users_folder(model, folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ROSE_CACHE", str(tmp_path))
    assert built(model, num_threads=1).backend.measured == ()  # type: ignore[attr-defined]
    write_profile(profile(model, folder), tmp_path / "profiles" / "cpu.json")
    assert len(built(model, num_threads=1).backend.measured) == 1  # type: ignore[attr-defined]


def test_a_backend_asked_for_by_name_is_that_backend(model, folder, tmp_path) -> None:
    write_profile(profile(model, folder), tmp_path / "p.json")
    config = replace(CONFIG, profile=str(tmp_path / "p.json"))
    assert built(model, config, backend="torch_sdpa", num_threads=1).backend.name == "torch_sdpa"


def test_a_corrupt_file_is_told_of_and_the_engine_serves(model, tmp_path, caplog) -> None:
    (tmp_path / "p.json").write_text('{"version": 1')
    with caplog.at_level(logging.WARNING):
        engine = built(model, replace(CONFIG, profile=str(tmp_path / "p.json")), num_threads=1)
    assert engine.backend_names == ("torch_sdpa",)
    assert "the profile cannot be used, and defaults serve" in caplog.text
    assert str(tmp_path / "p.json") in caplog.text


def test_a_file_that_is_not_there_is_refused(model, tmp_path) -> None:
    with pytest.raises(StartupError, match="--profile: there is no file"):
        build_engine(model, replace(CONFIG, profile=str(tmp_path / "no.json")))


def test_threads_of_the_profile_unless_others_are_asked_for(model, folder) -> None:
    def threads(asked: int | None, measured: int | None) -> int:
        numbers = replace(profile(model, folder).models[0], num_threads=measured)
        engine = build_engine(model, CONFIG, num_threads=asked, profile=Found(numbers=numbers))
        try:
            return engine.executor.launch(torch.get_num_threads).result()
        finally:
            engine.close()

    assert threads(None, 1) == 1
    assert threads(None, 2) == 2
    assert threads(1, 2) == 1


def test_graphs_and_padding_of_the_profile(model, folder) -> None:
    numbers = profile(model, folder).models[0]
    assert _measured(Found()) == (INFLECTION_TOKENS, 1024)
    assert _measured(Found(numbers=numbers)) == (INFLECTION_TOKENS, 1024)
    assert _measured(Found(numbers=replace(numbers, inflection_tokens=4096, fine_tokens=512))) == (4096, 512)


def test_generating_takes_the_backend_that_is_fastest_overall(tmp_path) -> None:
    folder = read_model_folder(tiny_lm(tmp_path / "lm", "qwen3"), task="generate")
    model = load_generative(folder)
    shape = attention_shape(model.attention_spec(CPU, torch.float32))
    assert shape.layout == "paged"
    us = {"triton_paged": 1.0, "torch_paged": 2.0}
    grid = AttentionGrid(shape=shape, points=(point(us),), excluded={"flashinfer_paged": "wrong"})
    config = EngineConfig(max_tokens=64, max_running=2)
    # triton_paged does not serve on a CPU: the next one does.
    engine = build_generation_engine(model, config, num_threads=1, profile=Found(grid=grid))
    try:
        assert engine.backend_names == ("torch_paged",)
    finally:
        engine.executor.close()


def test_a_product_is_served_otherwise_only_where_that_is_clearly_faster() -> None:
    products = {
        "linear:2560x640": {"64": {"table": 10.0, "library": 9.0}, "128": {"table": 10.0, "library": 9.8}},
        "partial:640x640": {"64": {"table": 10.0, "library": 12.0, "heuristic": 9.0}},
        "gated:1x1": {"large": {"table": 10.0}, "64": {"library": 9.0, "heuristic": 8.9}},
    }
    assert preferred(products) == {
        "linear:2560x640": {"64": "library"},
        "partial:640x640": {"64": "heuristic"},
        "gated:1x1": {"64": "heuristic"},  # the table's own gave no time: it failed or was wrong
    }
    before = tiles.choose("linear", 2560, 640, 64)
    assert before is not None
    try:
        tiles.prefer(preferred(products))
        assert tiles.choose("linear", 2560, 640, 64) is None
        assert tiles.choose("linear", 2560, 640, 128) == tiles.heuristic("linear", 2560, 640, 128)
        assert tiles.choose("partial", 640, 640, 64) == tiles.heuristic("partial", 640, 640, 64)
    finally:
        tiles.prefer({})
    assert tiles.choose("linear", 2560, 640, 64) == before


def test_this_machine_is_called_by_its_cpu_and_versions() -> None:
    here = this_machine(CPU)
    assert here.device.endswith("logical CPUs")
    assert here.packages["torch"] == torch.__version__
    assert here.driver == ""
