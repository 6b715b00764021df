"""Grammars: which tokens the output of a request may continue with. Plain Python and numpy, no torch.

    StructuredOutput  --GrammarCompiler-->  GrammarState, one per request  --MaskPool-->  token masks  -->  sampler

llguidance, an optional package, compiles a grammar and computes masks. A mask has one bit per token: bit v % 32 of word v // 32 is
set if token v may come next. Special tokens and ids beyond the tokenizer's vocabulary are never allowed; an end-of-sequence token is
allowed exactly where the text may end. Added tokens that are not special, such as `<tool_call>`, are text.

Grammars come from clients. A schema of 1 KB can occupy the library for hours and a grammar of 40 KB can overflow the stack; a thread
can neither be stopped nor survive that. Every new grammar is therefore compiled in a child process first, under a deadline and a
memory limit; only one that compiled there is compiled here.

    new grammar -> quick lane: check for 0.25 s, compile  -- it takes longer -->  slow lane: check, compile

Most grammars compile in milliseconds, so slow ones cannot hold them up: each lane has checking processes and threads of its own. No
thread waits for a check. A compiled grammar needs neither lane, and one that all requests have left is dropped.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import resource
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from saccade.engine.structured import StructuredOutput
from saccade.errors import CheckpointError, RequestError, UserError
from saccade.processor.tokenizer import Tokenizer
from saccade.workers.fork_server import ForkServer
from saccade.workers.messages import encode_error, receive, send
from saccade.workers.pool import Job, Worker, WorkerPool
from saccade.workers.sandbox import ResourceLimits, seal

_JSON_WHITESPACE = r"[ \n\r\t]{1,32}"
"""White space between JSON tokens. Unbounded, a model may emit nothing else until `max_tokens`."""
_LIMITS = {"max_lexer_states": 50_000, "step_max_items": 20_000, "verbose_errors": False}
"""Limits of the library below its defaults: about 100 MB per lexer. The slowest mask of a hostile grammar took 0.35 s."""
_STACK_BYTES = 2**28
"""Stack of a compiling thread. The deepest grammars within the size limits of a request use up to 64 MB."""
_CHECK_STACK_BYTES = _STACK_BYTES * 7 // 8
_CHECK_MEMORY_BYTES = 2**32
"""Address space of a checking process."""
_CHECK_NICENESS = 10
"""A hostile grammar may take a core for seconds; running requests come first."""
_CHECK_CPU_S = 3600
"""CPU time of a checking process; then it is replaced."""
_QUICK_CHECK_S = 0.25
"""Time of a check in the quick lane."""
_OWN_LEXER_S = 0.02
"""A grammar that compiles faster than this gets several lexers."""

_stack_lock = threading.Lock()
_logger = logging.getLogger(__name__)
_T = TypeVar("_T")


# ------------------------------------------------------------------ library


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise UserError(
            "structured output needs llguidance, which is not installed. Install it: pip install 'saccade[structured]'"
        ) from error


class _Vocabulary:
    """The tokenizer as the library sees it, and the tokens that may be sampled at all."""

    def __init__(
        self, tokenizer_json: str, control_ids: Sequence[int], eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._library = _library()
        description = json.loads(tokenizer_json)
        num_tokens = _make_special(description, {*control_ids, *eos_ids})
        if not eos_ids or max(eos_ids) >= num_tokens or vocab_size < num_tokens:
            raise CheckpointError(
                f"the tokenizer has {num_tokens} tokens, the model {vocab_size}, and the output ends with {list(eos_ids)}; structured "
                "output needs an end-of-sequence token among those of the tokenizer, and a model that has them all"
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
        """A matcher at the start of the text. Computes the first mask, which is the slowest one."""
        matcher = self._library.LLMatcher(self.tokenizer, source, log_level=0, limits=self._limits)
        if not matcher.is_error():
            mask_W = np.empty_like(self.allowed_W)
            matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            if not matcher.is_error() and not (mask_W & self.allowed_W).any():
                raise RequestError(f"structured.{kind}: the text would begin with a control token")
        if matcher.is_error():
            _logger.debug("llguidance: %s", matcher.get_error())
            raise RequestError(f"structured.{kind}: {_explain(kind, matcher.get_error())}")
        return matcher

    def check(self, kind: str, source: str) -> None:
        """Compile, and take one step with some allowed tokens: a grammar that is too complex may show it only there."""
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
                _logger.debug("llguidance: %s", state.get_error())
                raise RequestError(f"structured.{kind}: it is too large or too complex")


def _packed(token_ids: set[int], vocab_size: int) -> NDArray[np.int32]:
    """A mask of these tokens."""
    is_set = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_set[list(token_ids)] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)


def _make_special(description: dict[str, Any], token_ids: set[int]) -> int:
    """Mark these tokens as special in a tokenizer.json, so that text never contains them; return the number of tokens."""
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


def _source(structured: StructuredOutput) -> str:
    """The grammar in the library's form."""
    if structured.json_schema is not None or structured.json_object:
        schema = {"type": "object"} if structured.json_object else json.loads(str(structured.json_schema))
        return json.dumps(
            {"grammars": [{"json_schema": {**schema, "x-guidance": {"whitespace_pattern": _JSON_WHITESPACE}}}]}
        )
    if structured.grammar is not None:
        return json.dumps({"grammars": [{"lark_grammar": structured.grammar}]})
    # As alternatives of a grammar rule more than 2000 choices would exceed a limit of the parser; in one regex they do not.
    escaped = (re.sub(r"[^A-Za-z0-9]", lambda c: f"\\x{{{ord(c[0]):x}}}", text) for text in structured.choice or ())
    regex = structured.regex if structured.regex is not None else "|".join(escaped)
    return json.dumps({"grammars": [{"lark_grammar": f"start: /{_library().regex_to_lark(regex, 'd')}/"}]})


_REASONS = (
    (r"too (big|large|many|deep)|max is|fuel|recursion limit|panic|Unable to determine|precomputation", "it is too large or too complex"),
    (r"Unimplemented keys: \[([^\]]*)\]", r"{1} is not supported"),
    (r"Unknown format: ([\w-]+)", r"format {1} is not supported"),
    (r"oneOf", "oneOf is supported only where its branches exclude each other. Use anyOf"),
    (r"[pP]roperties only supported", "minProperties and maxProperties need every property to be required"),
    (r"Unsatisfiable|NoExtension", "no text matches it"),
    (r"Pointer '.*' does not exist", "a $ref refers to a definition that does not exist"),
    (r"look-?around|backreference", "look-around, word boundaries and backreferences are not supported"),
)  # fmt: skip
"""Errors of the library and the messages for the client. The library's own text stays in the log."""


def _explain(kind: str, message: str) -> str:
    for pattern, reason in _REASONS:
        if found := re.search(pattern, message):
            return reason.format(*(found[0], *found.groups()))
    if kind == "grammar" and (found := re.search(r"(\d+)\((\d+)\):", message)):
        return f"error in line {found[1]}, column {found[2]}"
    return f"not a valid {kind.replace('_', ' ')}"


def _with_stack(num_bytes: int, start: Callable[[], _T]) -> _T:
    """Call `start`, which starts a thread; the thread gets a stack of this size."""
    with _stack_lock:
        before = threading.stack_size(num_bytes)
        try:
            return start()
        finally:
            threading.stack_size(before)


# ------------------------------------------------------------------ checking process


def _make_checker(config: dict[str, Any]) -> tuple[Callable[[socket.socket], None], None]:
    """`initialize` of the fork server."""
    return partial(_check_grammars, _Vocabulary(**config)), None


def _check_grammars(vocabulary: _Vocabulary, connection: socket.socket) -> None:
    """Compile one grammar after another and reply whether that worked."""
    resource.setrlimit(resource.RLIMIT_AS, (_CHECK_MEMORY_BYTES, _CHECK_MEMORY_BYTES))
    os.nice(_CHECK_NICENESS)
    seal(ResourceLimits(memory_bytes=_CHECK_MEMORY_BYTES, file_bytes=0, cpu_s=_CHECK_CPU_S))
    while (request := receive(connection)) is not None:
        with ThreadPoolExecutor(1) as executor:
            compiled = _with_stack(_CHECK_STACK_BYTES, lambda: executor.submit(vocabulary.check, **request))
        try:
            compiled.result()
            send(connection, {})
        except RequestError as error:
            send(connection, encode_error(error))


class _NoChannel:
    """Grammars travel through the socket."""

    fds = ()


class _SlowGrammarError(RequestError):
    """A check in the quick lane did not end in time."""


class _Check(Job[_NoChannel, bool]):
    """Compile a grammar in a child process, which may crash or be killed."""

    def __init__(self, kind: str, source: str, timeout_s: float, *, is_quick: bool) -> None:
        super().__init__()
        self.timeout_s, self._message = timeout_s, {"kind": kind, "source": source}
        self._is_quick = is_quick
        self.max_crashes = 1 if is_quick else Job.max_crashes

    def send(self, worker: Worker[_NoChannel]) -> None:
        send(worker.connection, self._message)

    def receive(self, message: dict[str, Any], worker: Worker[_NoChannel]) -> bool:
        return True

    def error(self, reason: str) -> RequestError:
        kind = _SlowGrammarError if self._is_quick else RequestError
        return kind(f"structured.{self._message['kind']}: it is too large or too complex to be compiled")

    def __str__(self) -> str:
        return f"the compilation of a {self._message['kind']}"


# ------------------------------------------------------------------ compiler


class _Grammar:
    """A compiled grammar.

    States copied from one matcher share its lexer, whose automaton grows as it is used, under a lock. A grammar that compiles
    quickly gets several matchers, so that masks of requests with the same schema are computed in parallel.
    """

    def __init__(self, key: bytes, vocabulary: _Vocabulary, structured: StructuredOutput) -> None:
        self.key, self.vocabulary, self.kind, self._structured = key, vocabulary, structured.kind, structured
        self.waiting: list[Future[GrammarState]] = []
        """Requests that wait until it is compiled."""
        self.check: Future[bool] | None = None
        """In a child process."""
        self.is_growing = False
        self.is_broken = False
        """A lexer ran into a limit, which its copies share."""
        self._matchers: list[Any] = []
        self._seconds = 0.0
        self._num_states = 0

    @property
    def is_compiled(self) -> bool:
        return bool(self._matchers)

    def can_grow(self, max_matchers: int) -> bool:
        """Whether another matcher is worth compiling."""
        return self._seconds < _OWN_LEXER_S and len(self._matchers) < max_matchers

    def source(self) -> str:
        return _source(self._structured)

    def grow(self) -> None:
        """Compile one more matcher."""
        begin = time.perf_counter()
        self._matchers.append(self.vocabulary.compile(self.kind, self.source()))
        self._seconds = time.perf_counter() - begin

    def new_state(self) -> GrammarState:
        """A state at the start of the text; takes 0.01 ms."""
        matcher = self._matchers[self._num_states % len(self._matchers)]
        self._num_states += 1
        return GrammarState(self, matcher)


class _Lane:
    """Checking processes, and threads that compile what was checked."""

    def __init__(self, fork_server: ForkServer, num_workers: int, check_s: float, *, is_quick: bool) -> None:
        self._check_s, self._is_quick = check_s, is_quick
        self._checkers = WorkerPool(fork_server, num_workers, _NoChannel)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="grammar")

    @property
    def checker_pids(self) -> list[int]:
        """Process ids of the running checking processes."""
        return self._checkers.pids

    def check(self, grammar: _Grammar) -> Future[bool]:
        """Compile a grammar in a child process."""
        return self._checkers.submit(_Check(grammar.kind, grammar.source(), self._check_s, is_quick=self._is_quick))

    def run(self, call: Callable[[], None]) -> None:
        """Call it in a thread of this lane, which has a large stack. No effect when the lane is closed."""
        with contextlib.suppress(RuntimeError):
            _with_stack(_STACK_BYTES, lambda: self._threads.submit(call))

    def close(self) -> None:
        """Stop threads and child processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._checkers.close()


class GrammarCompiler:
    """Compiles grammars in threads of its own and keeps the most recently used ones. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        timeout_s: float = 5.0,
        num_threads: int = 2,
        max_cached: int = 256,
        max_pending: int = 256,
        max_lexers: int = 8,
    ) -> None:
        """Takes about a second for 150,000 tokens. `vocab_size` is the model's, `max_lexers` the lexers of one grammar."""
        config: dict[str, Any] = {
            "tokenizer_json": tokenizer.to_json(),
            "control_ids": sorted(tokenizer.special_ids),
            "eos_ids": sorted(eos_ids),
            "vocab_size": vocab_size,
        }
        self._vocabulary = _Vocabulary(**config)
        self._max_cached, self._max_pending, self._max_lexers = max_cached, max_pending, max_lexers
        self._lock = threading.Lock()
        """Guards the cache, the number of grammars waiting or being compiled, and who waits for them."""
        self._cache: OrderedDict[bytes, _Grammar] = OrderedDict()
        self._num_pending = 0
        fork_server = ForkServer(_make_checker, config)
        self._quick = _Lane(fork_server, num_threads, min(_QUICK_CHECK_S, timeout_s), is_quick=True)
        self._slow = _Lane(fork_server, 1, timeout_s, is_quick=False)

    @property
    def num_words(self) -> int:
        """Words of a mask: ceil(vocab_size / 32)."""
        return len(self._vocabulary.allowed_W)

    @property
    def num_cached(self) -> int:
        """Compiled grammars kept."""
        return len(self._cache)

    @property
    def checker_pids(self) -> list[int]:
        """Process ids of the running checking processes."""
        return [pid for lane in (self._quick, self._slow) for pid in lane.checker_pids]

    def compile(self, structured: StructuredOutput) -> Future[GrammarState]:
        """A state at the start of the text. Fails with a `RequestError` that says what is wrong with the grammar.

        The grammar is dropped when all who wait for it have cancelled.
        """
        key = hashlib.sha256(json.dumps(structured.to_dict()).encode()).digest()
        future: Future[GrammarState] = Future()
        with self._lock:
            grammar = self._cache.get(key)
            is_new = grammar is None or grammar.is_broken
            if grammar is None or is_new:
                if self._num_pending >= self._max_pending:
                    future.set_exception(RequestError("too many grammars are waiting to be compiled. Try again later"))
                    return future
                grammar = self._cache[key] = _Grammar(key, self._vocabulary, structured)
                self._num_pending += 1
            self._cache.move_to_end(key)
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
            is_compiled = grammar.is_compiled
            if not is_compiled:
                grammar.waiting.append(future)
        if is_compiled:
            future.set_result(grammar.new_state())
            self._grow(grammar)
            return future
        future.add_done_callback(partial(self._leave, grammar))
        if is_new:
            self._quick.run(partial(self._check, grammar, self._quick))
        return future

    def close(self) -> None:
        """Stop the threads and child processes. Grammars not compiled yet are cancelled."""
        self._quick.close()
        self._slow.close()

    def _check(self, grammar: _Grammar, lane: _Lane) -> None:
        try:
            grammar.check = lane.check(grammar)
        except Exception as error:
            self._end(grammar, error)
            return
        grammar.check.add_done_callback(partial(self._checked, grammar, lane))
        if not grammar.waiting:
            grammar.check.cancel()

    def _checked(self, grammar: _Grammar, lane: _Lane, check: Future[bool]) -> None:
        """Runs in the thread of the checking processes."""
        error = CancelledError() if check.cancelled() or not grammar.waiting else check.exception()
        if error is None:
            lane.run(partial(self._compile, grammar))
        elif isinstance(error, _SlowGrammarError):
            self._slow.run(partial(self._check, grammar, self._slow))
        else:
            self._end(grammar, error)

    def _compile(self, grammar: _Grammar) -> None:
        """Compile a checked grammar: a matcher for each request that waits for it, if that is quick."""
        try:
            grammar.grow()
            while grammar.can_grow(min(self._max_lexers, len(grammar.waiting))):
                grammar.grow()
        except BaseException as error:
            self._end(grammar, error)
        else:
            self._end(grammar, None)

    def _end(self, grammar: _Grammar, error: BaseException | None) -> None:
        """Answer all who wait for a grammar."""
        with self._lock:
            waiting, grammar.waiting = grammar.waiting, []
            self._num_pending -= 1
            if error is not None:
                self._remove(grammar)
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if error is None:
                future.set_result(grammar.new_state())
            else:
                future.set_exception(copy.copy(error))  # each has a traceback of its own

    def _leave(self, grammar: _Grammar, future: Future[GrammarState]) -> None:
        """Drop a grammar that is not compiled when its last request is cancelled. One that is being checked ends with the check."""
        if not future.cancelled():
            return
        with self._lock:
            if future not in grammar.waiting:
                return
            grammar.waiting.remove(future)
            is_last = not grammar.waiting
            if is_last:
                self._remove(grammar)
        if is_last and grammar.check is not None:
            grammar.check.cancel()

    def _remove(self, grammar: _Grammar) -> None:
        if self._cache.get(grammar.key) is grammar:
            del self._cache[grammar.key]

    def _grow(self, grammar: _Grammar) -> None:
        """Compile one more matcher of a compiled grammar in use, if that is worth it."""
        with self._lock:
            if grammar.is_growing or not grammar.can_grow(self._max_lexers):
                return
            grammar.is_growing = True
        self._quick.run(partial(self._compile_more, grammar))

    @staticmethod
    def _compile_more(grammar: _Grammar) -> None:
        with contextlib.suppress(RequestError):  # it has one that works
            grammar.grow()
        grammar.is_growing = False


# ------------------------------------------------------------------ state and masks


class GrammarState:
    """How far the output of one request has come in its grammar. Use it from one thread at a time."""

    def __init__(self, grammar: _Grammar, matcher: Any) -> None:
        self.error: str | None = None
        """Why the request cannot continue: the grammar exceeded a limit. Its masks then allow only the end of the sequence."""
        self.lexer_id = id(matcher)
        """Equal for states that share a lexer."""
        self.matcher = matcher.deep_copy()
        self.vocabulary = grammar.vocabulary
        self._grammar = grammar

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and nothing may follow but the end of the sequence."""
        return bool(self.matcher.is_stopped()) and self.error is None

    def accept(self, token_ids: Iterable[int]) -> bool:
        """Advance by sampled tokens. False if one of them was not allowed, a limit was reached or the library failed: see `error`."""
        if self.error is not None:
            return False
        try:
            is_accepted = all(self.matcher.consume_token(token_id) for token_id in token_ids)
        except BaseException as error:  # a panic of the library is no Exception
            self.fail_by(error)
            return False
        if not is_accepted:
            self.fail("the output left the grammar, or the grammar became too complex")
        return is_accepted

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        if not self.matcher.rollback(num_tokens):
            self.fail("the output cannot be taken back")

    def fill_mask(self, out_W: NDArray[np.int32]) -> None:
        """Write the mask of the next token: ceil(vocab_size / 32) contiguous words."""
        self.matcher.unsafe_compute_mask_ptr(out_W.ctypes.data, out_W.nbytes)
        _finish_masks(out_W[None], [self], [0])

    def fail(self, reason: str) -> None:
        """Set `error`; the grammar is compiled again for the next request, as its lexer may be unusable."""
        self.error = self.error or f"structured.{self._grammar.kind}: {reason}"
        self._grammar.is_broken = True

    def check(self) -> None:
        """Set `error` if the library cannot continue."""
        if self.error is not None:
            return
        try:
            is_error = self.matcher.is_error()
        except BaseException as error:
            self.fail_by(error)
        else:
            if is_error:
                self.fail("the grammar became too complex")

    def fail_by(self, error: BaseException) -> None:
        """Set `error` because the library raised this."""
        _logger.warning("llguidance failed on a %s: %r", self._grammar.kind, error, exc_info=error)
        self.fail("the grammar cannot be continued")


class MaskPool:
    """Computes the masks of many states in parallel, off the caller's thread."""

    def __init__(self, num_threads: int | None = None) -> None:
        """By default half of the cores, at most 8."""
        num_threads = num_threads or max(1, min(8, (os.cpu_count() or 2) // 2))
        self._library_executor = _library().LLExecutor(num_threads)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def fill(
        self,
        out_NW: NDArray[np.int32],
        states: Sequence[GrammarState],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> Future[None]:
        """Write the masks of the next tokens into contiguous rows: row n is that of state n.

        With drafts state n has 1 + len(drafts[n]) rows one after another: the mask of its next token and one behind each draft
        token, as far as the grammar accepts them. Neither states nor rows may be used until the future is done; then a state whose
        `error` is set has failed.
        """
        assert out_NW.flags.c_contiguous, "masks are written through a pointer"
        return self._thread.submit(self._fill, out_NW, states, drafts or [()] * len(states))

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()

    def _fill(self, out_NW: NDArray[np.int32], states: Sequence[GrammarState], drafts: Sequence[Sequence[int]]) -> None:
        first_rows = [0, *np.cumsum([1 + len(draft) for draft in drafts]).tolist()]
        assert first_rows.pop() == len(out_NW), "one row per state and draft token"
        work = [entry for entry in zip(states, first_rows, drafts, strict=True) if entry[0].error is None]
        work.sort(key=lambda entry: entry[0].lexer_id)  # neighbours go to the same thread: no waiting for a lexer
        try:
            self._compute(out_NW, work)
        except BaseException:  # a panic of the library is no Exception; it does not say whose mask failed
            for entry in work:
                try:
                    self._compute(out_NW, [entry])
                except BaseException as error:
                    entry[0].fail_by(error)
        for state, row, draft in zip(states, first_rows, drafts, strict=True):
            if state.error is not None:
                out_NW[row : row + 1 + len(draft)] = 0
        _finish_masks(out_NW, states, first_rows)

    def _compute(self, out_NW: NDArray[np.int32], work: Sequence[tuple[GrammarState, int, Sequence[int]]]) -> None:
        """Write the masks of states with their first rows and drafts."""
        rows_at = (out_NW.ctypes.data, out_NW.shape[1] * 4, len(out_NW))
        if plain := [(state.matcher, row) for state, row, draft in work if not draft]:
            self._library_executor.unsafe_compute_mask_ptr(plain, *rows_at)
        if drafted := [(state.matcher, row, list(draft)) for state, row, draft in work if draft]:
            for _, row, draft in drafted:
                out_NW[row : row + 1 + len(draft)] = 0  # rows behind a refused draft token are not written
            self._library_executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *rows_at)


def _finish_masks(out_NW: NDArray[np.int32], states: Sequence[GrammarState], first_rows: Sequence[int]) -> None:
    """Remove control tokens, which a Lark grammar can name, and mark states that cannot continue."""
    if not states:
        return
    vocabulary = states[0].vocabulary
    np.bitwise_and(out_NW, vocabulary.allowed_W, out=out_NW)
    is_empty_N = np.logical_not(out_NW.any(axis=1))
    out_NW[is_empty_N] = vocabulary.eos_W
    for state, row in zip(states, first_rows, strict=True):
        state.check()
        if is_empty_N[row]:
            state.fail("no token can follow")


class GrammarMasks(NamedTuple):
    """Allowed next tokens of requests with a grammar."""

    request_ids: tuple[str, ...]
    words: NDArray[np.int32]
    """[requests, ceil(vocabulary / 32)]: one bit per token."""


class Grammars:
    """The grammars of an engine core: compiled off its thread, their masks computed in parallel."""

    def __init__(self, make_compiler: Callable[[], GrammarCompiler]) -> None:
        self._make_compiler = make_compiler
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._pool: MaskPool | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def compile(self, structured: StructuredOutput) -> Future[GrammarState]:
        """A state at the start of the text. Fails with a `UserError` that says what is wrong. Cancelling it ends the work."""
        if self._compiler is not None:
            return self._compiler.compile(structured)
        future: Future[GrammarState] = Future()
        self._executor.submit(self._compile, structured, future)
        return future

    def prepare(self) -> None:
        """Set the compiler up in a thread, which takes two seconds for 150,000 tokens; else the first request does. No effect without
        llguidance."""
        if importlib.util.find_spec("llguidance") is not None:
            self._executor.submit(self._open_compiler)

    def _open_compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._compiler is None:
                self._compiler, self._pool = self._make_compiler(), MaskPool()
            return self._compiler

    def _compile(self, structured: StructuredOutput, future: Future[GrammarState]) -> None:
        """Compile a grammar once the compiler is set up."""
        try:
            compiled = self._open_compiler().compile(structured)
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        future.add_done_callback(lambda done: compiled.cancel() if done.cancelled() else None)
        compiled.add_done_callback(lambda done: _copy_result(done, future))

    def masks(self, states: Mapping[str, GrammarState]) -> Future[GrammarMasks]:
        """Compute the masks of the next tokens, by request id. Until that is done the states may not be used."""
        assert self._compiler is not None, "a state was compiled"
        assert self._pool is not None, "a state was compiled"
        mask_NW = np.empty((len(states), self._compiler.num_words), np.int32)
        computed: Future[GrammarMasks] = Future()
        filled = self._pool.fill(mask_NW, list(states.values()))
        filled.add_done_callback(lambda done: _pass_on(done, computed, GrammarMasks(tuple(states), mask_NW)))
        return computed

    def close(self) -> None:
        """Stop threads and child processes."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()
        if self._pool is not None:
            self._pool.close()


class NextMasks:
    """The masks of requests' next tokens, from when the tokens before them are read until they are sampled."""

    def __init__(self, grammars: Grammars, clock: Callable[[], float]) -> None:
        self._grammars, self._clock = grammars, clock
        self._computed: dict[str, Future[GrammarMasks]] = {}  # several requests share one
        self.last_duration_s = 0.0
        """How long the last ones took."""

    def start(self, states: Mapping[str, GrammarState]) -> None:
        """Compute the masks of those that have none, off this thread. Until that is done their states may not be used."""
        missing = {request_id: state for request_id, state in states.items() if request_id not in self._computed}
        if missing:
            begin, computed = self._clock(), self._grammars.masks(missing)
            computed.add_done_callback(lambda _: self._set_duration(self._clock() - begin))
            self._computed |= dict.fromkeys(missing, computed)

    def are_ready(self, request_ids: Iterable[str]) -> bool:
        """Whether the masks of all of them are computed."""
        return all(one in self._computed and self._computed[one].done() for one in request_ids)

    def take(self, request_ids: Sequence[str]) -> GrammarMasks | None:
        """The masks of requests that are sampled now; waits for them."""
        found = [self._computed.pop(request_id).result() for request_id in request_ids]
        if not found or (all(masks is found[0] for masks in found) and len(found) == len(found[0].request_ids)):
            return found[0] if found else None
        rows = [masks.words[masks.request_ids.index(one)] for one, masks in zip(request_ids, found, strict=True)]
        return GrammarMasks(tuple(request_ids), np.stack(rows))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._computed.pop(request_id, None)

    def _set_duration(self, seconds: float) -> None:
        self.last_duration_s = seconds


def _pass_on(done: Future[None], computed: Future[GrammarMasks], masks: GrammarMasks) -> None:
    if (error := done.exception()) is not None:
        computed.set_exception(error)
    else:
        computed.set_result(masks)


def _copy_result(done: Future[GrammarState], future: Future[GrammarState]) -> None:
    if done.cancelled() or not future.set_running_or_notify_cancel():
        return
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())
