"""Convert the tokenizer and grammars to llguidance's form, and its errors to ours.

Special tokens and ids beyond the tokenizer's vocabulary are never allowed. An end-of-sequence token is allowed exactly
where the text may end. Added tokens that are not special, such as `<tool_call>`, are text.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.engine.structured import StructuredOutput
from saccade.errors import CheckpointError, RequestError, UserError

logger = logging.getLogger(__name__)

_JSON_WHITESPACE = r"[ \n\r\t]{1,32}"
"""White space between JSON tokens. It is bounded because a model may emit nothing else until `max_tokens`."""
_LIMITS = {"max_lexer_states": 50_000, "step_max_items": 20_000, "verbose_errors": False}
"""Limits of the library, below its defaults: about 100 MB per lexer, and well below a second per mask."""


def library() -> Any:
    """The llguidance package. UserError: it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise UserError(
            "structured output needs llguidance, which is not installed. Install it: pip install 'saccade[structured]'"
        ) from error


class Vocabulary:
    """The tokenizer in the library's form, and the tokens that may be sampled at all."""

    def __init__(
        self, tokenizer_json: str, control_ids: Sequence[int], eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._library = library()
        description = json.loads(tokenizer_json)
        num_tokens = _make_special(description, {*control_ids, *eos_ids})
        if not eos_ids or max(eos_ids) >= num_tokens or vocab_size < num_tokens:
            raise CheckpointError(
                f"the tokenizer has {num_tokens} tokens, the model {vocab_size}, and the output ends with "
                f"{list(eos_ids)}; structured output needs an end-of-sequence token among those of the tokenizer, and "
                "a model that has them all"
            )
        try:
            self.tokenizer = self._library.LLTokenizer(
                json.dumps(description), n_vocab=vocab_size, eos_token=list(eos_ids)
            )
        except ValueError as error:
            raise CheckpointError(f"structured output cannot use this tokenizer: {error}") from error
        self._limits = self._library.LLParserLimits(**_LIMITS)
        self.allowed_W = _packed({*range(num_tokens)} - {*control_ids} | {*eos_ids}, vocab_size)
        self.eos_W = _packed(set(eos_ids), vocab_size)

    def compile(self, kind: str, source: str) -> Any:
        """Compile a matcher at the start of the text, and compute its first mask, which is the slowest one."""
        matcher = self._library.LLMatcher(self.tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            mask_W = np.empty_like(self.allowed_W)
            matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if not matcher.is_error() and not (mask_W & self.allowed_W).any():
                raise RequestError(f"structured.{kind}: the text would begin with a control token")
        if matcher.is_error():
            logger.debug("llguidance: %s", matcher.get_error())
            raise RequestError(f"structured.{kind}: {explain(kind, matcher.get_error())}")
        return matcher

    def check(self, kind: str, source: str) -> None:
        """Compile, and advance by some allowed tokens: some grammars exceed a limit only then."""
        matcher = self.compile(kind, source)
        mask_W = np.empty_like(self.allowed_W)
        matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        is_allowed = np.unpackbits((mask_W & self.allowed_W & ~self.eos_W).view(np.uint8), bitorder="little")
        token_ids = np.flatnonzero(is_allowed)
        for token_id in {*token_ids[:1].tolist(), *token_ids[-1:].tolist()}:
            state = matcher.deep_copy()
            if state.consume_token(token_id):
                state.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if state.is_error():
                logger.debug("llguidance: %s", state.get_error())
                raise RequestError(f"structured.{kind}: it is too large or too complex")


def _packed(token_ids: set[int], vocab_size: int) -> NDArray[np.int32]:
    """A mask of these tokens."""
    is_set = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_set[list(token_ids)] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)


def _make_special(description: dict[str, Any], token_ids: set[int]) -> int:
    """Mark these tokens as special in a tokenizer.json, so that text never has them; returns the number of tokens."""
    vocab = description["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((row[0], i) for i, row in enumerate(vocab))
    names = {i: name for name, i in pairs}
    added = {token["id"]: token for token in description["added_tokens"]}
    ids = names.keys() | added.keys()
    if len(ids) != max(ids) + 1:
        raise CheckpointError("structured output needs a tokenizer whose ids have no gaps")
    for token_id in sorted(token_ids & ids):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        token = added.get(token_id) or {"id": token_id, "content": names[token_id], **flags}
        added[token_id] = token | {"special": True}
    description["added_tokens"] = [added[token_id] for token_id in sorted(added)]
    return len(ids)


def source_of(structured: StructuredOutput) -> str:
    """The grammar in the library's form."""
    if structured.json_schema is not None or structured.json_object:
        schema = {"type": "object"} if structured.json_object else json.loads(str(structured.json_schema))
        return json.dumps(
            {"grammars": [{"json_schema": {**schema, "x-guidance": {"whitespace_pattern": _JSON_WHITESPACE}}}]}
        )
    if structured.grammar is not None:
        return json.dumps({"grammars": [{"lark_grammar": structured.grammar}]})
    # All choices are one regex: more than 2000 alternatives of a grammar rule would exceed a limit of the parser.
    escaped = (re.sub(r"[^A-Za-z0-9]", lambda c: f"\\x{{{ord(c[0]):x}}}", text) for text in structured.choice or ())
    regex = structured.regex if structured.regex is not None else "|".join(escaped)
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{library().regex_to_lark(regex, 'd')}/"}]})


_REASONS = (
    (
        r"too (big|large|many|deep)|max is|fuel|recursion limit|panic|Unable to determine|precomputation",
        "it is too large or too complex",
    ),
    (r"Unimplemented keys: \[([^\]]*)\]", r"{1} is not supported"),
    (r"Unknown format: ([\w-]+)", r"format {1} is not supported"),
    (r"oneOf", "oneOf is supported only where its branches exclude each other. Use anyOf"),
    (r"[pP]roperties only supported", "minProperties and maxProperties need every property to be required"),
    (r"Unsatisfiable|NoExtension", "no text matches it"),
    (r"Pointer '.*' does not exist", "a $ref refers to a definition that does not exist"),
    (r"look-?around|backreference", "look-around, word boundaries and backreferences are not supported"),
)
"""Patterns of the library's errors, and the messages for the client. The library's own text is only logged."""


def explain(kind: str, message: str) -> str:
    """The message for the client that explains an error of the library."""
    for pattern, reason in _REASONS:
        if found := re.search(pattern, message):
            return reason.format(*(found[0], *found.groups()))
    if kind == "grammar" and (found := re.search(r"(\d+)\((\d+)\):", message)):
        return f"error in line {found[1]}, column {found[2]}"
    return f"not a valid {kind.replace('_', ' ')}"
