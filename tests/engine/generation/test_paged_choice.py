"""Which paged backend `auto` takes: one that agrees with the reference on this machine, best first."""

from __future__ import annotations

import pytest

from rose.attention_backends.torch_paged import TorchPaged
from rose.attention_backends.triton_paged import TritonPaged
from rose.config import EngineConfig
from rose.convert import load_generative
from rose.engine.generation import build
from rose.engine.generation.build import build_generation_engine
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

    def choose(backend="auto"):
        engine = build_generation_engine(
            model, EngineConfig(max_tokens=folder.max_tokens, kv_cache_bytes=1 << 20), backend=backend
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
