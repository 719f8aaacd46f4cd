"""POST /v1/tokenize and /v1/detokenize in vLLM's shape: the ids that the model would see, and ids back into text.

Lists come as lists, as SGLang has it. Costs no model time; knows neither replicas' work nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from rose.config.serving import GatewayConfig
from rose.errors import InvalidInput, RoseError
from rose.gateway.asgi import Call, Reply
from rose.gateway.generate_request import chat_messages, template_variables
from rose.gateway.generating import GenerateService
from rose.gateway.inputs import Input, Texts, Tokens, parse_input, renamed
from rose.gateway.json_body import off_loop, read_body
from rose.gateway.prompts import choose_prompt
from rose.gateway.schemas_tokenize import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from rose.gateway.service import check_tokens, timed
from rose.gateway.text_bounds import ANY
from rose.gateway.timing import deadline_of
from rose.proto import rose_pb2 as pb
from rose.proto.convert import IntArray

tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_encode = msgspec.json.Encoder().encode
PROMPT, TOKENS = "prompt", "tokens"
# Letters of a token, for the choice between the event loop and the pool; prose has three to six.
CHARS_PER_TOKEN = 4


class TokenizeRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, generate: GenerateService) -> None:
        self._generate = generate
        self._service = generate.service

    async def __call__(self, call: Call, body: bytes) -> Reply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.config
        deadline = deadline_of(call, config.default_timeout_s)
        request = await read_body(tokenize_decoder, body, config.max_request_tokens)
        card = self._service.card_for(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidInput("expected either a prompt or messages", param=PROMPT)
        of = self._of_texts if request.messages is None else self._of_messages
        found = await call.unless_gone(of(card, request, deadline))
        check_tokens(sum(map(len, found)), config.max_request_tokens, PROMPT)
        return Reply(200, await off_loop(body, self._answer, card, request, found))

    async def _of_messages(self, card: pb.ModelCard, request: TokenizeRequest, deadline: float) -> list[IntArray]:
        for name in ("prompt_name", "add_special_tokens", "split_special_tokens"):
            if getattr(request, name) is not None:
                raise InvalidInput(f"{name} is about a prompt, and messages were sent", param=name)
        ids, _ = await self._generate.chat_prompt(
            self._generate.card_for(request.model),
            chat_messages(request.messages or []),
            deadline,
            add_generation_prompt=request.add_generation_prompt is not False,
            variables=template_variables(request.chat_template_kwargs),
        )
        return [ids]

    async def _of_texts(self, card: pb.ModelCard, request: TokenizeRequest, deadline: float) -> list[IntArray]:
        for name in ("add_generation_prompt", "chat_template_kwargs"):
            if getattr(request, name) is not None:
                raise InvalidInput(f"{name} is about messages, and a prompt was sent", param=name)
        given = _parsed(card, request.prompt, PROMPT, self._service.config)
        if not isinstance(given, Texts):
            raise InvalidInput("the prompt is token ids already: expected a text or a list of texts", param=PROMPT)
        _, prefix = choose_prompt(card, request.prompt_name or "")
        try:
            ids, _ = await self._service.encode(
                [prefix + text for text in given.items] if prefix else given.items,
                deadline,
                split_special_tokens=bool(request.split_special_tokens),
                add_special_tokens=request.add_special_tokens is not False,
                bounds=ANY,  # whoever asks how long a text is does not know yet whether the model takes it
            )
        except RoseError as error:
            raise renamed(error, PROMPT, error.index) from None
        return ids

    def _answer(self, card: pb.ModelCard, request: TokenizeRequest, found: Sequence[IntArray]) -> bytes:
        listed = isinstance(request.prompt, list)
        numbers = [ids.tolist() for ids in found]
        answer = TokenizeResponse(
            count=_one_or_all([len(ids) for ids in numbers], listed),
            max_model_len=card.max_tokens,
            tokens=_one_or_all(numbers, listed),
        )
        if request.return_token_strs:
            known = {number: self._service.tokenizer.piece(number) for ids in numbers for number in set(ids)}
            answer.token_strs = _one_or_all([[known[number] for number in ids] for ids in numbers], listed)
        return _encode(answer)


class DetokenizeRoute:
    """The endpoint; one instance serves all requests."""

    def __init__(self, generate: GenerateService) -> None:
        self._texts = generate.texts
        self._service = generate.service

    async def __call__(self, call: Call, body: bytes) -> Reply:
        """Raises RoseError for everything that is not an answer."""
        config = self._service.config
        deadline = deadline_of(call, config.default_timeout_s)
        request = await read_body(detokenize_decoder, body, config.max_request_tokens)
        card = self._service.card_for(request.model)
        given = _parsed(card, request.tokens, TOKENS, config)
        if not isinstance(given, Tokens):
            raise InvalidInput("expected token ids or lists of them, got text", param=TOKENS)
        skip = bool(request.skip_special_tokens)

        def texts() -> list[str]:
            return [self._texts.text(ids.tolist(), skip_special_tokens=skip) for ids in given.items]

        chars = CHARS_PER_TOKEN * sum(map(len, given.items))
        found, _ = await call.unless_gone(timed(self._service.tokenizer.in_pool(texts, chars), deadline))
        listed = isinstance(request.tokens[0], list)
        return Reply(200, _encode(DetokenizeResponse(prompt=_one_or_all(found, listed))))


def _parsed(card: pb.ModelCard, value: Any, field: str, config: GatewayConfig) -> Input:
    try:
        return parse_input(
            value, vocab_size=card.vocab_size, max_items=config.max_items, max_ids=config.max_request_tokens
        )
    except RoseError as error:
        raise renamed(error, field, error.index) from None


def _one_or_all(found: list[Any], listed: bool) -> Any:
    return found if listed else found[0]
