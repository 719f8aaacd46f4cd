"""A model's chat template: messages into the one text that the model continues.

The text is that of transformers' apply_chat_template, character by character. Knows messages and the template's file;
knows neither token ids nor requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError

from rose.config.generation import GenerationConfig
from rose.errors import CheckpointError, InvalidInput
from rose.gateway.inputs import shorten
from rose.gateway.template_sandbox import Budget, OverBudget, Refusal, TemplateSandbox, write

FIELD = "messages"
# A conversation of a hundred messages takes about a millisecond.
RENDER_SECONDS = 1.0
# What a caller's chat_template_kwargs may not replace.
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
# An assistant's thinking, by the names that templates read.
REASONING = "reasoning_content"
_WHY_CHARS = 300


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template that has been read.

    Attributes:
        file: where it stands, for errors.
        source: its text.
        tokens: "bos_token" and the like, as far as the folder names them.
    """

    file: str
    source: str
    tokens: Mapping[str, str]
    compiled: Template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        max_chars: int,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """The text.

        Args:
            messages: role, content and what else the template reads of each; plain values.
            variables: further ones that the template knows (enable_thinking).

        Raises:
            InvalidInput: the template refuses the messages, or cannot take them, or makes more than `max_chars` of
                them, or takes too long for it.
        """
        given = {
            **self.tokens,
            **(variables or {}),
            "messages": [_with_reasoning(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return write(self.compiled, Budget(seconds, max_chars), given)
        except Refusal as error:
            raise InvalidInput(f"the model's chat template refuses the messages: {_why(error)}", param=FIELD) from None
        except OverBudget as error:
            raise InvalidInput(
                f"the model's chat template ({self.file}) does not end with these messages: {error}", param=FIELD
            ) from None
        except RecursionError:
            raise InvalidInput(
                f"the model's chat template ({self.file}) calls itself without end with these messages", param=FIELD
            ) from None
        except Exception as error:  # noqa: BLE001 (an expression of a template can raise anything)
            raise InvalidInput(
                f"the model's chat template ({self.file}) does not take the messages: {type(error).__name__}: "
                f"{_why(error)}",
                param=FIELD,
            ) from None


def read_chat_template(generation: GenerationConfig, folder: Path) -> ChatTemplate | None:
    """The template for plain chats, or None where there is none.

    Args:
        folder: of the tokenizer's files, for errors.

    Raises:
        CheckpointError: one that is no jinja2, with its file, line and reason.
    """
    source = generation.templates.get("default")
    if source is None:
        return None
    own = folder / "chat_template.jinja"
    path = own if own.is_file() else folder / "tokenizer_config.json"
    try:
        compiled = TemplateSandbox().from_string(source)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template in {path} cannot be read: line {error.lineno}: {_why(error)}"
        ) from None
    except (TemplateError, RecursionError) as error:
        raise CheckpointError(f"the chat template in {path} cannot be read: {_why(error)}") from None
    return ChatTemplate(path.name, source, generation.special_tokens, compiled)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, with an assistant's thinking also under the older name for it."""
    reasoning = message.get(REASONING)
    return dict(message) if reasoning is None else {"thinking": reasoning, **message}


def _why(error: BaseException) -> str:
    return shorten(str(error) or type(error).__name__, _WHY_CHARS)
