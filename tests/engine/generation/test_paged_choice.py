"""Which paged backend `auto` takes: one that agrees with the reference on this machine, best first."""

from __future__ import annotations

import pytest
import torch

from rose.attention_backends.torch_paged import TorchPaged
from rose.attention_backends.triton_paged import TritonPaged
from rose.config import EngineConfig
from rose.config.profile import AttentionGrid, Point
from rose.config.profile_files import Found
from rose.convert import load_generative
from rose.engine.generation import build
from rose.engine.generation.build import build_generation_engine
from rose.engine.profiles import attention_shape
from rose.errors import StartupError
from tests.engine.generation.driving import generate, prompts


@pytest.fixture
def chosen(folder, monkeypatch):
    """The engine's backend, where triton_paged (by its kernels' references) says that it serves."""
    monkeypatch.setattr(TritonPaged, "supports", lambda self, spec: None)
    model = load_generative(folder)
    checked: list[str] = []
    check = build.check_backend

    def remember(name, spec):
        checked.append(name)
        return check(name, spec)

    monkeypatch.setattr(build, "check_backend", remember)

    def choose(backend="auto", us=None, excluded=None):
        """With a profile of one point where times or exclusions are given."""
        shape = attention_shape(model.attention_spec("cpu", torch.float32))
        points = () if us is None else (Point(tokens=1024, sequences=8, max_length=128, us=us),)
        grid = None if excluded is None else AttentionGrid(shape=shape, points=points, excluded=excluded)
        engine = build_generation_engine(
            model,
            EngineConfig(max_tokens=folder.max_tokens, kv_cache_bytes=1 << 20),
            backend=backend,
            profile=Found(grid=grid),
        )
        return engine, checked

    return choose


def test_the_first_that_is_right(chosen, reference):
    engine, checked = chosen()
    assert (engine.backend_names, checked) == (("triton_paged",), ["triton_paged"])
    ids = prompts([9])[0]
    assert generate(engine, [ids], max_new_tokens=5)[0].tokens == reference.greedy(ids.tolist(), 5)
    engine.close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda out: out * 1.01, "left out: wrong in prompts on 4/2 heads of 32, float32, causal"),
        (lambda out: out * float("nan"), "left out: not finite in prompts on"),
        (lambda out: out[999], "left out: failed on 4/2 heads of 32, float32, causal: IndexError"),
    ],
    ids=["wrong", "NaN", "raises"],
)
def test_one_that_is_wrong_here_is_passed_over_with_its_reason(chosen, reference, monkeypatch, caplog, answer, words):
    plan = TritonPaged.plan

    def spoiled(self, batch, slot=0):
        made = plan(self, batch, slot)
        run = made.run
        made.run = lambda *args: answer(run(*args))
        return made

    monkeypatch.setattr(TritonPaged, "plan", spoiled)
    engine, _ = chosen()
    assert engine.backend_names == ("torch_paged",)
    assert f"attention backend triton_paged is {words}" in caplog.text
    ids = prompts([9])[0]
    assert generate(engine, [ids], max_new_tokens=5)[0].tokens == reference.greedy(ids.tolist(), 5)
    engine.close()


def test_what_is_asked_for_by_name_is_taken_unchecked(chosen):
    engine, checked = chosen("triton_paged")
    assert (engine.backend_names, checked) == (("triton_paged",), [])
    engine.close()


def test_none_is_left(chosen, monkeypatch):
    monkeypatch.setattr(TritonPaged, "supports", lambda self, spec: "not today")
    monkeypatch.setattr(TorchPaged, "supports", lambda self, spec: "neither")
    with pytest.raises(
        StartupError, match=r"auto does not serve this model: triton_paged: not today;.*torch_paged: neither"
    ):
        chosen()


EXCLUDED = {"triton_paged": "wrong at 8 x 4096 on this device"}


@pytest.mark.parametrize("us", [None, {"torch_paged": 9.0}, {"triton_paged": 1.0, "torch_paged": 9.0}], ids=str)
def test_what_a_profile_excludes_is_not_taken_however_well_it_does_here(chosen, caplog, us):
    engine, checked = chosen(us=us, excluded=EXCLUDED)
    assert (engine.backend_names, checked) == (("torch_paged",), [])
    told = "triton_paged is left out: a profile of this device excludes it: wrong at 8 x 4096 on this device"
    assert f"attention backend {told}" in caplog.text
    engine.close()


def test_the_last_resort_is_left_even_if_a_profile_excludes_it(chosen):
    us = {"triton_paged": 9.0, "torch_paged": 1.0}
    engine, _ = chosen(us=us, excluded={"torch_paged": "failed at 256 x 4096: out of memory"})
    assert engine.backend_names == ("triton_paged",), "others come first then, however slow"
    engine.close()
    engine, _ = chosen(excluded={**EXCLUDED, "torch_paged": "failed at 256 x 4096: out of memory"})
    assert engine.backend_names == ("torch_paged",)
    engine.close()


def test_the_profiles_reason_is_among_those_told_where_none_is_left(chosen, monkeypatch):
    monkeypatch.setattr(TorchPaged, "supports", lambda self, spec: "neither")
    with pytest.raises(
        StartupError,
        match=r"auto does not serve this model: triton_paged: a profile of this device excludes it: wrong at 8 x"
        r" 4096 on this device;.*torch_paged: neither",
    ):
        chosen(excluded=EXCLUDED)


def test_what_a_profile_excludes_is_taken_where_it_is_asked_for_by_name(chosen):
    engine, _ = chosen("triton_paged", excluded=EXCLUDED)
    assert engine.backend_names == ("triton_paged",)
    engine.close()


def test_a_profile_may_name_a_backend_of_another_version(chosen):
    engine, _ = chosen(us={"paged_of_tomorrow": 1.0, "torch_paged": 2.0, "triton_paged": 3.0}, excluded={})
    assert engine.backend_names == ("torch_paged",)
    engine.close()
