"""Read a text model from a GGUF file: config, dequantized weights, tokenizer and chat template.

GGUF stores Llama's query and key rows for interleaved RoPE; they are permuted back to the half-split order. Only
byte-level BPE tokenizers are converted; others need a checkpoint folder with `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.errors import CheckpointError
from saccade.model.families import text_family

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}

_CONTROL, _USER_DEFINED = 3, 4  # token types of the GGUF specification

_GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def _open(path: Path) -> Any:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """View a memory map as a plain array: slices are three times as fast, and a vocabulary has 200,000."""

        @property
        def data(self) -> Any:
            return self._array

        @data.setter
        def data(self, mapped: Any) -> None:
            self._array = np.asarray(mapped)

    return Reader(path)


class GGUFModel:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _open(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file. Check the path") from error
        except (ValueError, OSError, IndexError) as error:
            raise CheckpointError(f"{path}: not a readable GGUF file: {error}. Download it again") from error
        self.architecture = str(self._field("general.architecture"))
        self._stored = {tensor.name: tensor for tensor in self._reader.tensors}

    def text_config(self) -> dict[str, Any]:
        """The sizes as fields of a Hugging Face `config.json`."""
        text_family(self.architecture)  # refuse unsupported architectures first
        arch = self.architecture
        return {
            "model_type": arch,
            "hidden_size": self._field(f"{arch}.embedding_length"),
            "num_hidden_layers": self._field(f"{arch}.block_count"),
            "num_attention_heads": self._field(f"{arch}.attention.head_count"),
            "num_key_value_heads": self._field(f"{arch}.attention.head_count_kv"),
            "intermediate_size": self._field(f"{arch}.feed_forward_length"),
            "max_position_embeddings": self._field(f"{arch}.context_length"),
            "rms_norm_eps": self._field(f"{arch}.attention.layer_norm_rms_epsilon"),
            "rope_theta": self._field(f"{arch}.rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "vocab_size": len(self._field("tokenizer.ggml.tokens")),
            "tie_word_embeddings": "output.weight" not in self._stored,
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id"),
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = self._field(f"{self.architecture}.rope.scaling.type", "none")
        return None if kind == "none" and "rope_freqs.weight" not in self._stored else {"rope_type": kind}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, by its name in Hugging Face's text layout. GGUF counts dims from the innermost."""
        return {
            self._hugging_face_name(name): tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._stored.items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in Hugging Face's text layout, dequantized fp32 tensor), one at a time."""
        from gguf import dequantize

        for name, stored in self._stored.items():
            array = dequantize(stored.data, stored.tensor_type).astype(np.float32, copy=False)
            if self.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
                key = "head_count" if ".attn_q." in name else "head_count_kv"
                array = _to_half_split(array, self._field(f"llama.attention.{key}"))
            yield self._hugging_face_name(name), torch.from_numpy(np.array(array, order="C"))

    def _hugging_face_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem == "output":
            return f"lm_head.{kind}"
        if stem in _TOP_NAMES:
            return f"model.{_TOP_NAMES[stem]}.{kind}"
        parts = stem.split(".")
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{kind}"
        raise CheckpointError(f"{self.path}: tensor {name} is not part of a {self.architecture} decoder")

    def chat_template(self) -> str:
        """The chat template."""
        template = self._field("tokenizer.chat_template", None)
        if template is None:
            raise CheckpointError(f"{self.path}: no chat template inside. Use an instruct model's GGUF")
        return str(template)

    def tokenizer(self) -> dict[str, Any]:
        """The equivalent `tokenizer.json`."""
        kind, tokens = self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.tokens")
        if kind != "gpt2":
            raise CheckpointError(
                f"{self.path}: tokenizer model {kind!r} is not supported. Use a checkpoint folder with tokenizer.json"
            )
        merges, types = self._field("tokenizer.ggml.merges"), self._field("tokenizer.ggml.token_type")
        normalizer, splits, ignore_merges = self._pre_tokenizer(str(self._field("tokenizer.ggml.pre", "default")))
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                added_token(token, token_id, special=kind == _CONTROL)
                for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
                if kind in (_CONTROL, _USER_DEFINED)
            ],
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": {token: token_id for token_id, token in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in merges],
                "ignore_merges": ignore_merges,
            },
        }

    def _pre_tokenizer(self, name: str) -> tuple[dict[str, Any] | None, list[dict[str, Any]], bool]:
        """Normalizer, pre-tokenizers and `ignore_merges`, by the GGUF name of the pre-tokenizer."""
        bytes_only = _GPT2_SPLIT | {"use_regex": False}
        if name == "smollm":
            return None, [{"type": "Digits", "individual_digits": True}, _GPT2_SPLIT], False
        if name in ("gpt-2", "default"):
            return None, [_GPT2_SPLIT], False
        if name == "qwen2":
            return {"type": "NFC"}, [_split(_QWEN2_PATTERN), bytes_only], False
        if name == "llama-bpe":
            return None, [_split(_LLAMA3_PATTERN), bytes_only], True
        raise CheckpointError(
            f"{self.path}: pre-tokenizer {name!r} is not supported. Use a checkpoint folder with tokenizer.json"
        )

    _NEEDED: Any = object()

    def _field(self, name: str, default: Any = _NEEDED) -> Any:
        field = self._reader.get_field(name)
        if field is not None:
            return field.contents()
        if default is self._NEEDED:
            raise CheckpointError(f"{self.path}: {name} is missing; not a supported decoder")
        return default


def added_token(content: str, token_id: int, *, special: bool) -> dict[str, Any]:
    """One entry of `added_tokens` in `tokenizer.json`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _to_half_split(array: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows (head, pair, 2) to (head, 2, pair): interleaved to half-split RoPE."""
    paired = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return paired.swapaxes(1, 2).reshape(array.shape)
