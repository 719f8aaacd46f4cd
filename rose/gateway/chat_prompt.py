"""Messages to token ids: the template, then the tokenizer, with no control token that a message made up.

Knows the template and the tokenizer; knows neither requests nor replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rose.errors import InvalidInput
from rose.gateway.chat_marks import ControlMarks
from rose.gateway.chat_template import FIELD, ChatTemplate
from rose.gateway.text_bounds import most_chars
from rose.gateway.tokenizer import TextTokenizer
from rose.proto.convert import IntArray

Message = Mapping[str, Any]
VARIABLES = "chat_template_kwargs"
# Lists in lists of a template's variable: all that follows goes through them by recursion.
MAX_DEPTH = 32


class ChatPrompt:
    """One model's way from messages to ids."""

    def __init__(self, template: ChatTemplate, tokenizer: TextTokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens().values()
        self._marks = ControlMarks(
            special=(text for text, special in added if special),
            # Gemma's line ends are added tokens too, and mean nothing but themselves.
            template=(text for text, special in added if not special and text.strip() and text in template.source),
        )

    async def ids(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> IntArray:
        """
        Args:
            messages: as `ChatTemplate.render` takes them.
            max_tokens: that the model takes; what could never be so few is not even rendered.

        Raises:
            InvalidInput: as `ChatTemplate.render`, or messages or variables of too many characters.
            Overloaded: the tokenizer's pool has enough to do.
        """
        most = most_chars(max_tokens)
        chars = sum(len(text) for message in messages for text in message.values() if isinstance(text, str))
        if chars > most:
            raise InvalidInput(
                f"the messages have {chars} characters; the limit is {most} characters, since the model takes "
                f"{max_tokens} tokens",
                param=FIELD,
            )

        chars += _size(variables or {}, most)

        def work() -> IntArray:
            return self._ids(messages, add_generation_prompt, dict(variables or {}), most)

        return await self._tokenizer.in_pool(work, chars)

    def _ids(
        self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any], most: int
    ) -> IntArray:
        marked = self._marks.mark(messages, variables)
        if marked is None:
            text = self._template.render(
                messages, add_generation_prompt=add_generation_prompt, variables=variables, max_chars=most
            )
            return self._tokenizer.encode_rendered(text, None)
        text = self._template.render(
            marked.messages,
            add_generation_prompt=add_generation_prompt,
            variables=marked.variables,
            max_chars=most,
        )
        rendered = marked.unmark(text)
        return self._tokenizer.encode_rendered(rendered.text, rendered.forged)


def _size(variables: Mapping[str, Any], most: int) -> int:
    """Characters of a template's variables; whatever is no text counts as one.

    Raises:
        InvalidInput: more than `most`, or nested too deeply.
    """
    size = 0
    left: list[tuple[Any, int]] = [(variables, 0)]
    while left:
        value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise InvalidInput(f"a variable is nested more than {MAX_DEPTH} levels deep", param=VARIABLES)
        size += len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            left += ((one, depth + 1) for one in value.values())
            size += sum(map(len, value))
        elif isinstance(value, list):
            left += ((one, depth + 1) for one in value)
        if size + len(left) > most:
            raise InvalidInput(f"the variables hold more than {most} characters and values", param=VARIABLES)
    return size
