"""A tiny Qwen3 behind a generating engine, and transformers' answers to compare with."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rose.attention_backends.triton_paged import TritonPaged
from rose.config import EngineConfig, ModelFolder, read_model_folder
from rose.convert import load_generative
from rose.engine.execution import CpuExecutor
from rose.engine.generation.build import build_generation_engine
from rose.engine.generation.engine import GenerationEngine
from rose.engine.generation.forward import DRAWN
from rose.engine.generation.request import Finish, GenerateRequest, NewToken, Sampling
from rose.engine.graphs import LazyGraphs
from rose.errors import RoseError
from tests.support.tiny_language_models import tiny_lm

PAGE = 4


def make_folder(path: Path, **shape) -> ModelFolder:
    return read_model_folder(tiny_lm(path, "qwen3", **shape))


class Reference:
    """transformers on the same weights, in fp32 on the CPU, one sequence at a time."""

    def __init__(self, folder: ModelFolder) -> None:
        assert folder.generation is not None
        self.model = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
        self.limit, self.ends = folder.generation.vocab_limit, folder.generation.end_ids
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens, whatever they are."""
        known = self._known.setdefault(tuple(prompt), [])
        if len(known) < count:
            padding = list(range(self.limit, self.model.config.vocab_size))
            out = self.model.generate(
                torch.tensor([list(prompt)]),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=0,
                eos_token_id=None,
                pad_token_id=0,
                suppress_tokens=padding,
            )
            known[:] = out[0, len(prompt) :].tolist()
        return known[:count]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab_limit] fp32: after each token."""
        return self.model(torch.tensor([list(ids)])).logits[0, :, : self.limit]


def prompts(lengths: Sequence[int], seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(5, 450, n, dtype=np.int32) for n in lengths]


def build(
    folder: ModelFolder,
    device: str,
    *,
    pages: int = 400,
    model=None,
    end_ids=None,
    backend: str = "torch_paged",
    **limits,
) -> GenerationEngine:
    """An engine in fp32 with a cache of `pages` pages; with graphs unless `graph_bytes` is 0, on the CPU those of
    `RerunCapturer`.

    Args:
        backend: "torch_paged", or "triton_paged": its kernels' references, which read lengths where the kernels do, so
            that batches with prompts are captured too.
    """
    generation = folder.generation
    assert generation is not None
    shape = folder.architecture
    page_size = limits.setdefault("page_size", PAGE)
    page = 2 * shape.num_layers * page_size * shape.num_kv_heads * shape.head_dim * 4
    config = EngineConfig(
        **{"max_tokens": folder.max_tokens, "max_running": 8, "kv_cache_bytes": pages * page, "graph_bytes": 1 << 30}
        | limits
    )
    captures = device == "cpu" and config.graph_bytes > 0
    with (
        patch("rose.engine.generation.build._executor", _executor_with_graphs) if captures else nullcontext(),
        patch.object(TritonPaged, "supports", lambda self, spec: None),
    ):
        return build_generation_engine(
            model or load_generative(folder, device, torch.float32),
            config,
            device,
            torch.float32,
            backend=backend,
            num_threads=1,
            end_ids=generation.end_ids if end_ids is None else end_ids,
            vocab_limit=generation.vocab_limit,
        )


@dataclass
class Answer:
    """What one request was answered with."""

    tokens: list[int] = field(default_factory=list)
    news: list[NewToken] = field(default_factory=list)
    finish: Finish = Finish.NONE
    error: RoseError | None = None

    @property
    def cached(self) -> int:
        return self.news[0].cached_tokens if self.news else 0


class Driver:
    """Steps an engine until nothing is left to do, and sorts what it brings."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}
        self._next = 0

    def add(self, ids: np.ndarray, *, deadline: float | None = None, **sampling) -> int:
        self._next += 1
        settings = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 12, **sampling}
        self.engine.add(GenerateRequest(self._next, ids, Sampling(**settings), deadline))
        self.answers[self._next] = Answer()
        return self._next

    def step(self) -> None:
        assert self.engine.in_flight <= 2
        step = self.engine.step()
        seen: set[int] = set()
        for new in step.tokens:
            answer = self.answers[new.request_id]
            assert answer.finish is Finish.NONE, "a token behind the end"
            assert answer.error is None
            answer.tokens.append(new.token)
            answer.news.append(new)
            answer.finish = new.finish
            seen.add(new.request_id)
        for request_id, error in step.failed.items():
            assert self.answers[request_id].finish is Finish.NONE
            self.answers[request_id].error = error

    def wait(self) -> None:
        """Until a step has something to do, instead of asking again and again."""
        engine = self.engine
        if engine.in_flight and not engine.ready():
            due = engine.wake_at()
            if due is None:
                engine._flights[0].ticket.wait()
            else:
                time.sleep(min(1e-3, max(0.0, due - time.monotonic())))

    def run(self, limit: int = 10_000) -> dict[int, Answer]:
        for _ in range(limit):
            if self.engine.idle:
                return self.answers
            self.wait()
            self.step()
        raise AssertionError("the engine does not come to an end")


def generate(engine: GenerationEngine, items: Sequence[np.ndarray], **sampling) -> list[Answer]:
    """All at once, together."""
    driver = Driver(engine)
    ids = [driver.add(item, **sampling) for item in items]
    answers = driver.run()
    return [answers[i] for i in ids]


def staggered(
    engine: GenerationEngine, work: Sequence[tuple[np.ndarray, Mapping[str, object]]], seed: int
) -> list[Answer]:
    """Requests that arrive at any time, and others beside them that are aborted at any time."""
    draw, driver = random.Random(seed), Driver(engine)
    mine: list[int] = []
    strangers: list[int] = []
    waiting = list(work)
    while waiting or not engine.idle:
        if waiting and draw.random() < 0.4:
            ids, sampling = waiting.pop(0)
            mine.append(driver.add(ids, **sampling))
        if waiting and draw.random() < 0.2:
            strangers.append(
                driver.add(prompts([draw.randrange(1, 40)], draw.randrange(1 << 30))[0], max_new_tokens=40)
            )
        if strangers and draw.random() < 0.15:
            engine.abort(strangers.pop(draw.randrange(len(strangers))))
        driver.wait()
        driver.step()
    return [driver.answers[i] for i in mine]


class RerunGraph:
    """Stands for a graph on the CPU: a replay runs the captured forward again, into outputs that stay in place."""

    bytes = 1

    def __init__(self, fn) -> None:
        self._fn = fn
        self.outputs: dict[str, torch.Tensor] = {}

    def replay(self) -> None:
        drawn = self._fn()[DRAWN]
        if self.outputs:
            self.outputs[DRAWN].copy_(drawn)
        else:
            self.outputs[DRAWN] = drawn.clone()

    def release(self) -> None:
        pass


class RerunCapturer:
    def capture(self, key, fn):
        return RerunGraph(fn)


def _executor_with_graphs(device, config, num_threads):
    graphs = LazyGraphs(device, capturer=RerunCapturer(), max_bytes=config.graph_bytes)
    return CpuExecutor(num_threads=num_threads), graphs
