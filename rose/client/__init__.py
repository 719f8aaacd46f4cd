"""The light link's client side, blocking and asyncio; free of torch.

Client       one request at a time, the least latency
AsyncClient  many requests in flight on one connection, on asyncio or uvloop
"""

from rose.client.async_client import AsyncClient
from rose.client.generation import Generated, TokenLogprobs, Usage
from rose.client.result import EmbedResult, Timing
from rose.client.sync_client import Client

__all__ = ["AsyncClient", "Client", "EmbedResult", "Generated", "Timing", "TokenLogprobs", "Usage"]
