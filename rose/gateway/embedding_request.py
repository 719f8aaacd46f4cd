"""The body of an embeddings request, read and checked into what to compute and how to write it.

Knows JSON values and the model card; knows neither text processing nor answers.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rose.errors import InvalidInput, Unsupported
from rose.gateway.forms import Form, vector_form
from rose.gateway.inputs import parse_input, show
from rose.gateway.named_outputs import Named, check_kinds
from rose.gateway.outputs import check_outputs, check_trained, output_cards
from rose.gateway.schemas import EmbeddingRequest
from rose.gateway.service import EmbedJob
from rose.proto import rose_pb2 as pb

PRIORITIES: dict[str | None, pb.Priority.ValueType] = {None: pb.ONLINE, "online": pb.ONLINE, "bulk": pb.BULK}
CUT_FIELD = "truncate=true"
decoder = msgspec.json.Decoder(EmbeddingRequest)


class Plan(NamedTuple):
    """What to compute, and how its answer is written.

    Attributes:
        cut: length that vectors still have to be cut to when they come; 0 where the engine does it, or nobody.
        named: what the items carry, where the request says so.
    """

    job: EmbedJob
    form: Form
    cut: int
    named: Named | None


class Usual:
    """Which form vectors take, and which outputs of the model that needs, as far as they depend on a request's options.

    Most requests ask alike, so what is found is kept as long as the card stays the same.
    """

    def __init__(self) -> None:
        self._known: tuple[pb.ModelCard | None, dict[object, tuple[Form, tuple[str, ...]]]] = (None, {})

    def find(self, card: pb.ModelCard, encoding: str | None, dtype: str | None) -> tuple[Form, tuple[str, ...]]:
        """Raises as `make_plan`."""
        of, known = self._known
        if of is not card:
            known = {}
            self._known = (card, known)
        found = known.get((encoding, dtype))
        if found is None:
            form = vector_form(card, encoding, dtype)
            _check_one_row_a_text(card, form)
            found = known[encoding, dtype] = (form, _sources(card, form))
        return found


def make_plan(
    request: EmbeddingRequest,
    card: pb.ModelCard,
    usual: Usual,
    max_items: int,
    max_ids: int,
    deadline: float,
    *,
    strict: bool,
) -> Plan:
    """
    Args:
        max_items, max_ids: see `parse_input`.
        strict: refuse dimensions the model was not trained for.

    Raises:
        InvalidInput, PayloadTooLarge: as parse_input does, and for a form, an output or dimensions that cannot be had.
        Unsupported: a model whose default output is no vector a text.
    """
    named: Named | None = None
    if request.outputs is None:
        form, outputs = usual.find(card, request.encoding_format, request.output_dtype)
        dimensions = check_form_dimensions(request.dimensions, card, form, strict=strict)
    else:
        form = vector_form(card, request.encoding_format, request.output_dtype)
        dimensions = check_form_dimensions(request.dimensions, card, form, strict=strict)
        named = _named(request, request.outputs, card, form)
        outputs = named.sources()
    split = bool(request.split_long_inputs)
    # The engine cuts where all that it computes is to be cut, and nothing is averaged afterwards.
    cut = 0 if form.engine_cuts and outputs in ((), (form.source,)) and not split else dimensions
    cut_to = request.truncate_prompt_tokens
    if cut_to is None and request.truncate:
        cut_to = -1
    if split and cut_to is not None:
        raise InvalidInput("long inputs are split or cut, not both", param="split_long_inputs")
    job = EmbedJob(
        input=parse_input(request.input, vocab_size=card.vocab_size, max_items=max_items, max_ids=max_ids),
        outputs=outputs,
        dimensions=0 if cut else dimensions,
        prompt_name=request.prompt_name,
        prompt=request.prompt,
        cut_to=cut_to,
        cut_field=CUT_FIELD,
        split_special_tokens=bool(request.split_special_tokens),
        split_long_inputs=split,
        priority=PRIORITIES[request.priority],
        deadline=deadline,
    )
    return Plan(job, form, cut, named)


def check_form_dimensions(dimensions: int | None, card: pb.ModelCard, form: Form, *, strict: bool) -> int:
    """0 for all of them. Raises InvalidInput for dimensions that this form cannot have."""
    if dimensions is not None and dimensions < 1:
        raise InvalidInput(f"dimensions of {show(dimensions)}: expected 1 or more, or null for all", param="dimensions")
    if dimensions or form.dtype != "float32":
        form.check(dimensions or 0)
    if strict:
        check_trained(card, dimensions or 0, form.dimension)
    return dimensions or 0


def _named(request: EmbeddingRequest, outputs: list[str], card: pb.ModelCard, form: Form) -> Named:
    if not outputs:
        raise InvalidInput("the list is empty: name at least one output, or leave it out", param="outputs")
    check_outputs(card, outputs)
    check_kinds(card, outputs)
    default = next((output.name for output in output_cards(card, ())), "")
    if default not in outputs:
        for name, given in (("dimensions", request.dimensions), ("output_dtype", request.output_dtype)):
            if given:
                raise InvalidInput(f"{name} is about the output {default!r}, which was not asked for", param=name)
    return Named(tuple(outputs), default, form, request.sparse_format or "ids")


def _sources(card: pb.ModelCard, form: Form) -> tuple[str, ...]:
    """Nothing for the default output: replicas know it themselves."""
    default = output_cards(card, ())
    return () if default and default[0].name == form.source else (form.source,)


def _check_one_row_a_text(card: pb.ModelCard, form: Form) -> None:
    for output in output_cards(card, (form.source,)):
        if output.per_token:
            raise Unsupported(f"the output {output.name!r} has one vector a token: ask for it in `outputs`")
        check_kinds(card, (output.name,))
