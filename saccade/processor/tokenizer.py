"""Text to token ids and back, with text and control tokens kept apart.

A *control token* (`<|im_start|>`, `<|image_pad|>`, ...) gets into a prompt only through the chat template or the
processor. `encode_text` never produces one, whatever the text spells: it uses the vocabulary of `tokenizer.json`
without the control tokens, which are kept in a table by name.

SentencePiece tokenizers write a space before a text: before the first of a prompt, or before each one between control
tokens, as `tokenizer.json` says. Text between two control tokens is therefore encoded once and its tokens are divided
by their offsets (`encode_parts`); a part that must be encoded separately gets no further space.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import tokenizers

from saccade.errors import CheckpointError, RequestError
from saccade.processor.folder import read_json


class Tokenizer:
    """The tokenizer of one checkpoint folder."""

    def __init__(self, description: dict[str, Any]) -> None:
        """`description` is the content of `tokenizer.json`."""
        # White-space tokens of some tokenizers are vocabulary, not control tokens.
        control = [token for token in description.get("added_tokens", []) if token["content"].strip()]
        self.control_ids: dict[str, int] = {token["content"]: token["id"] for token in control}
        self._control_names = {token_id: name for name, token_id in self.control_ids.items()}
        self.special_ids = frozenset(token["id"] for token in control if token.get("special"))
        """Control tokens that decoded text leaves out."""
        self._control_pattern = re.compile("|".join(map(_control_regex, _longest_first(control)))) if control else None
        text_tokens = [token for token in description.get("added_tokens", []) if not token["content"].strip()]
        plain = description | {"added_tokens": text_tokens, "post_processor": None, "truncation": None, "padding": None}
        self._text = tokenizers.Tokenizer.from_str(json.dumps(plain))
        unprefixed = _without_prefix(plain)
        self._continued = self._text if unprefixed == plain else tokenizers.Tokenizer.from_str(json.dumps(unprefixed))
        """Encodes text that continues another, without a space before it."""
        is_prefixed_once = '"prepend_scheme": "first"' in json.dumps(description.get("pre_tokenizer"))
        self._after_control = self._continued if is_prefixed_once else self._text
        # The library numbers added tokens itself: without the control tokens before them their ids are too low.
        self._true_ids = {self._text.token_to_id(token["content"]): token["id"] for token in text_tokens}
        self._all = tokenizers.Tokenizer.from_str(json.dumps(description))
        self.prefix_ids = _prefix_ids(self._all)
        """Tokens that `tokenizer.json` puts before every prompt, such as `<s>`."""
        self._unknown_id = self._text.token_to_id(str(description["model"].get("unk_token")))
        self._fallback_bytes: dict[int, int] = {}
        """Tokens of single bytes, for characters without a token."""
        if "ByteFallback" in json.dumps(description.get("decoder")):
            tokens = {f"<0x{byte:02X}>": byte for byte in range(256)}
            self._fallback_bytes = {
                i: byte for token, byte in tokens.items() if (i := self._all.token_to_id(token)) is not None
            }
        self._byte_of = _byte_alphabet() if "ByteLevel" in json.dumps(description.get("decoder")) else {}

    @staticmethod
    def load(folder: Path) -> Tokenizer:
        """Read `tokenizer.json` of a checkpoint folder."""
        path = folder / "tokenizer.json"
        description = read_json(path)
        if not description:
            raise CheckpointError(
                f"{folder}: no tokenizer.json. Check the path; a checkpoint folder needs a fast tokenizer"
            )
        try:
            return Tokenizer(description)
        except Exception as error:  # the library raises plain Exception for what it cannot parse
            raise CheckpointError(f"{path}: not a tokenizer: {error}. Copy it from the original again") from error

    def to_json(self) -> str:
        """Content of a `tokenizer.json` that loads as an equal tokenizer."""
        return self._all.to_str()

    @property
    def vocab_size(self) -> int:
        """The highest token id plus one."""
        return max(self._all.get_vocab(with_added_tokens=True).values()) + 1

    def control_id(self, name: str) -> int:
        """Id of a control token."""
        if name not in self.control_ids:
            raise CheckpointError(f"tokenizer.json has no control token {name}. It has: {', '.join(self.control_ids)}")
        return self.control_ids[name]

    def is_control(self, token_id: int) -> bool:
        """Whether a token is a control token."""
        return token_id in self._control_names

    def encode_text(self, text: str) -> list[int]:
        """Encode text. The result has no control token, even if the text spells one."""
        return self.encode_parts([text])[0]

    def encode_parts(
        self, texts: Sequence[str], *, is_first: bool = True, cuts: Sequence[bool] | None = None
    ) -> list[list[int]]:
        """Encode adjacent texts as one text and return the tokens of each. `is_first`: no token precedes them.

        A token that spans several texts belongs to the last of them. `cuts` marks texts whose start no token may span;
        by default each one. If a token would, what is before and after that start is encoded separately.
        """
        encoder = self._text if is_first else self._after_control
        return self._encode_parts(encoder, texts, [True] * len(texts) if cuts is None else cuts)

    def _encode_parts(
        self, encoder: tokenizers.Tokenizer, texts: Sequence[str], cuts: Sequence[bool]
    ) -> list[list[int]]:
        encoding = self._encode(encoder, "".join(texts))
        spans = encoding.offsets if len(texts) > 1 else []
        starts = list(accumulate(map(len, texts[:-1])))
        ended = [bisect_right(spans, start, key=itemgetter(1)) for start in starts]  # tokens before each start
        borders = enumerate(zip(starts, ended, strict=True), start=1)
        spanned = [n for n, (start, i) in borders if cuts[n] and i < len(spans) and spans[i][0] < start]
        if not spanned:
            ids = self._ids(encoding)
            return [ids[first:end] for first, end in pairwise([0, *ended, len(ids)])]
        parts: list[list[int]] = []
        for first, end in pairwise([0, *spanned, len(texts)]):
            parts += self._encode_parts(self._continued if first else encoder, texts[first:end], cuts[first:end])
        return parts

    def _encode(self, encoder: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
        try:
            return encoder.encode(text, add_special_tokens=False)
        except TypeError as error:  # half of a surrogate pair
            raise RequestError("the text is not valid Unicode (half of a surrogate pair). Remove it") from error

    def _ids(self, encoding: tokenizers.Encoding) -> list[int]:
        """The ids of encoded text, none of which may be a control token."""
        ids = [self._true_ids.get(token_id, token_id) for token_id in encoding.ids]
        if not self._control_names.keys().isdisjoint(ids):
            spelled = {self._control_names[i] for i in ids if i in self._control_names and i != self._unknown_id}
            if spelled:
                raise RequestError(
                    f"the text spells {', '.join(sorted(spelled))}, which this tokenizer cannot keep as text. Remove it"
                )
        return ids

    def split_control(self, text: str) -> list[tuple[str, int | None]]:
        """Split *trusted* text at its control tokens: (piece, id of the control token or None for text)."""
        if self._control_pattern is None:
            return [(text, None)] if text else []
        pieces: list[tuple[str, int | None]] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            if match.start() > end:
                pieces.append((text[end : match.start()], None))
            pieces.append((match.group(), self.control_ids[match.group().strip()]))
            end = match.end()
        if end < len(text):
            pieces.append((text[end:], None))
        return pieces

    def control_edges(self) -> str:
        """First and last characters of all control tokens: text without them cannot be part of one."""
        return "".join(sorted({edge for name in self.control_ids for edge in (name[0], name[-1])}))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode token ids, without special tokens unless asked for. Ids outside the vocabulary are ignored."""
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        if not self._fallback_bytes.keys().isdisjoint(kept):
            return self._decode_with_bytes(kept)
        text: str = self._all.decode(kept, skip_special_tokens=False)
        return text

    def _decode_with_bytes(self, ids: Sequence[int]) -> str:
        """Decode tokens, some of which are bytes.

        (The library drops a whole run of bytes if one of them is invalid: text would change when more tokens follow.)
        """
        pieces: list[str] = []
        for is_bytes, run in groupby(ids, key=self._fallback_bytes.__contains__):
            if is_bytes:
                pieces.append(bytes(self._fallback_bytes[i] for i in run).decode(errors="replace"))
            else:
                pieces += [token for i in run if (token := self._all.id_to_token(i)) is not None]
        text: str = self._all.decoder.decode(pieces)
        return text

    def token_bytes(self, token_id: int) -> bytes | None:
        """Bytes of a token, which may be part of a character; None for a control token or an unknown id."""
        token = self._all.id_to_token(token_id)
        if token is None or token_id in self._control_names:
            return None
        if self._byte_of and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", token):
            return bytes.fromhex(match[1])
        return bytes(token.replace("\u2581", " ").encode())


def _prefix_ids(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The tokens that the post-processor puts before a text."""
    encoded = tokenizer.encode("a")
    added = list(encoded.special_tokens_mask)
    return tuple(encoded.ids[: added.index(0)] if 0 in added else ())


def _without_prefix(description: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without the space that it writes before a text."""
    never = {"prepend_scheme": "never", "add_prefix_space": False}

    def change(step: Any) -> Any:
        if isinstance(step, list):
            return [changed for one in step if (changed := change(one)) is not None]
        if not isinstance(step, dict):
            return step
        if step.get("type") == "Prepend":
            return None
        return {name: never[name] if name in never else change(value) for name, value in step.items()}

    return description | {name: change(description.get(name)) for name in ("normalizer", "pre_tokenizer")}


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character that byte-level tokenizers write it as: itself if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _longest_first(control: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(control, key=lambda token: len(token["content"]), reverse=True)


def _control_regex(token: dict[str, Any]) -> str:
    """The token with the white space it absorbs (`lstrip`, `rstrip` in tokenizer.json)."""
    before, after = (r"\s*" if token.get(side) else "" for side in ("lstrip", "rstrip"))
    return before + re.escape(str(token["content"])) + after
