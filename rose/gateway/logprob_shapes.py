"""Log probabilities as the two dialects write them.

Knows tokens' bytes and the dialects' JSON; knows neither requests nor text processing.
"""

from __future__ import annotations

from collections.abc import Sequence

from rose.gateway.answer import TokenInfo
from rose.gateway.detokenize import TokenTexts
from rose.gateway.schemas_generate import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

# JSON has no minus infinity; OpenAI writes this for what cannot be.
LEAST = -9999.0


def completion_logprobs(infos: Sequence[TokenInfo], texts: TokenTexts, offset: int = 0) -> CompletionLogprobs:
    """
    Args:
        offset: of the answer in the text that is shown.
    """
    return CompletionLogprobs(
        text_offset=[offset + info.offset for info in infos],
        token_logprobs=[max(info.logprob, LEAST) for info in infos],
        tokens=[_spelled(texts.bytes_of(info.token)) for info in infos],
        top_logprobs=[
            # The drawn token is always there; where several ids have one spelling, the likeliest counts.
            {
                _spelled(texts.bytes_of(token)): max(logprob, LEAST)
                for token, logprob in ((info.token, info.logprob), *reversed(info.top))
            }
            for info in infos
        ],
    )


def chat_logprobs(infos: Sequence[TokenInfo], texts: TokenTexts) -> ChatLogprobs:
    return ChatLogprobs([_token(info, texts) for info in infos])


def _token(info: TokenInfo, texts: TokenTexts) -> TokenLogprob:
    raw = texts.bytes_of(info.token)
    top = [(texts.bytes_of(token), logprob) for token, logprob in info.top]
    return TokenLogprob(
        token=_read(raw),
        logprob=max(info.logprob, LEAST),
        bytes=list(raw),
        top_logprobs=[TopLogprob(_read(one), max(logprob, LEAST), list(one)) for one, logprob in top],
    )


def _read(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _spelled(raw: bytes) -> str:
    """The text of a token; its bytes where it is no whole character, so that no two tokens are spelled alike."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
