"""A model folder behind the real engine and a reactor in a thread, as `python -m rose.server` puts them together."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from rose.config import EngineConfig, ServerConfig, read_model_folder
from rose.convert import load_model
from rose.engine import build_engine
from rose.proto.address import parse_address
from rose.server.card import model_card
from rose.server.listener import Listener
from rose.server.run import build_reactor
from rose.server.selfcheck import self_check

BUDGETS = EngineConfig(online_tokens=256, bulk_tokens=512, max_tokens=128, max_sequences=16)


class Served:
    """Serves from construction until `close`.

    Attributes:
        model: the same model, for calling it by hand while nothing else runs.
    """

    def __init__(self, path: Path, address: str = "127.0.0.1:0", budgets: EngineConfig = BUDGETS) -> None:
        self.folder = read_model_folder(path)
        self.model = load_model(self.folder)
        types = self.folder.architecture.type_vocab_size
        self.engine = build_engine(self.model, budgets, num_threads=1, type_vocab_size=types)
        self_check(self.engine, self.model)
        listener = Listener(parse_address(address))
        self.address = str(listener.address)
        backend = ", ".join(self.engine.backend_names)
        names = {"served_name": "tiny", "dtype": "float32", "device": "cpu", "backend": backend}
        card = model_card(self.folder, self.model, budgets, ServerConfig(), **names)
        self.reactor = build_reactor(
            self.engine, self.model, card, listener, budgets, ServerConfig(), torch.device("cpu"), types
        )
        self.reactor.listen()
        self.thread = threading.Thread(target=self.reactor.run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.reactor.stop()
        self.reactor.stop()
        self.thread.join(10)
        self.engine.close()
