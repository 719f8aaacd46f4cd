"""What is fixed before serving starts: the model folder as read, and the numbers the engine and the front run with.

Frozen, resolved once, free of torch. Knows files and numbers; knows neither weights nor requests.
"""

from rose.config.architecture import ArchitectureConfig
from rose.config.folder import DenseConfig, ModelFolder, PoolingConfig, read_model_folder
from rose.config.generation import GenerationConfig
from rose.config.reranker import RerankerConfig
from rose.config.serving import EngineConfig, GatewayConfig, ServerConfig
from rose.config.task import ServedTask, served_task
from rose.config.token_heads import TokenHeadConfig

__all__ = [
    "ArchitectureConfig",
    "DenseConfig",
    "EngineConfig",
    "GatewayConfig",
    "GenerationConfig",
    "ModelFolder",
    "PoolingConfig",
    "RerankerConfig",
    "ServedTask",
    "ServerConfig",
    "TokenHeadConfig",
    "read_model_folder",
    "served_task",
]
