"""Qwen3 in Python: the C API of qwen3.h through ctypes.

    from qwen3 import Model

    model = Model("Qwen3-0.6B")                   # a Hugging Face folder, a GGUF file or a model.bin
    print(model.ask("What is a warp?"))
    chat = model.context()                        # a conversation: what was said stays in its KV cache
    for text in chat.stream("And a block?", temperature=0):
        print(text, end="", flush=True)

A Model may be used by any number of threads, a Context by one at a time. Errors raise Qwen3Error."""
from __future__ import annotations

import ctypes
import os
import pathlib
import queue
import threading
from typing import Callable, Iterator, Sequence

__all__ = ["Context", "Model", "Qwen3Error", "version"]


class Qwen3Error(RuntimeError):
    """A call of the library failed; the text is its one line."""


class _Sampling(ctypes.Structure):  # qwen3_sampling
    _fields_ = [("temperature", ctypes.c_float), ("top_k", ctypes.c_int), ("top_p", ctypes.c_float),
                ("min_p", ctypes.c_float), ("repeat_penalty", ctypes.c_float), ("presence_penalty", ctypes.c_float),
                ("frequency_penalty", ctypes.c_float), ("seed", ctypes.c_uint64), ("max_tokens", ctypes.c_int)]


_Show = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t, ctypes.c_void_p)


def _load() -> ctypes.CDLL:
    """The library beside this file, or the one that QWEN3_LIBRARY names."""
    p, i, n, ints = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.POINTER(ctypes.c_int)
    text, how = ctypes.c_char_p, ctypes.POINTER(_Sampling)
    library = ctypes.CDLL(os.environ.get("QWEN3_LIBRARY") or str(pathlib.Path(__file__).with_name("libqwen3.so")))
    for name, result, arguments in (
            ("version", i, []), ("error", text, []), ("open", p, [text, text, text]), ("close", None, [p]),
            ("vocabulary", i, [p]), ("context_limit", i, [p]), ("tokenize", ctypes.c_long, [p, text, n, i, ints, n]),
            ("detokenize", ctypes.c_long, [p, ints, n, p, n]),
            ("prompt", ctypes.c_long, [p, text, text, i, ints, n]), ("context_new", p, [p, i]),
            ("context_free", None, [p]), ("tokens", i, [p]), ("rewind", i, [p, i]), ("feed", i, [p, ints, n]),
            ("logits", ctypes.POINTER(ctypes.c_float), [p, ctypes.POINTER(n)]), ("default_sampling", _Sampling, [i]),
            ("draw", i, [p, how]), ("generate", i, [p, how, _Show, p]), ("ask", i, [p, text, how, _Show, p])):
        function = getattr(library, "qwen3_" + name)
        function.restype, function.argtypes = result, arguments
    return library


_library = _load()


def version() -> int:
    """QWEN3_VERSION of the library."""
    return int(_library.qwen3_version())


def _utf8(text: str) -> bytes:
    data = text.encode()
    if b"\0" in data:
        raise Qwen3Error("the text has a character NUL")
    return data


def _check(result: int) -> int:
    if result < 0:
        raise Qwen3Error(_library.qwen3_error().decode())
    return result


def _ids(call: Callable[[object, int], int]) -> list[int]:
    """The ids of a call that is handed room for them: first how many there are."""
    count = _check(call(None, 0))
    out = (ctypes.c_int * count)()
    _check(call(out, count))
    return list(out)


def _array(ids: Sequence[int]) -> ctypes.Array[ctypes.c_int]:
    return (ctypes.c_int * len(ids))(*ids)


def _sampling(thinking: bool, options: dict[str, float]) -> _Sampling:
    """Qwen's advice, changed by options named as the fields of qwen3_sampling."""
    how: _Sampling = _library.qwen3_default_sampling(int(thinking))
    for name, value in options.items():
        if name not in (field[0] for field in _Sampling._fields_):
            raise TypeError(f"no such option: {name}")
        setattr(how, name, value)
    return how


def _tokenizer(path: pathlib.Path) -> pathlib.Path | None:
    """The package's own tokenizer.bin, Qwen3's, unless the model has one beside it."""
    own = pathlib.Path(__file__).with_name("tokenizer.bin")
    folder = path if path.is_dir() else path.parent
    return own if own.exists() and not (folder / "tokenizer.bin").exists() else None


class Model:
    """Weights, tokenizer and device. device: "cpu", "cuda", or None: a GPU where there is one."""

    def __init__(self, path: str | os.PathLike[str], tokenizer: str | os.PathLike[str] | None = None,
                 device: str | None = None) -> None:
        self._handle: int | None = None
        tokenizer = tokenizer or _tokenizer(pathlib.Path(path))
        self._handle = _library.qwen3_open(os.fsencode(path), os.fsencode(tokenizer) if tokenizer else None,
                                           _utf8(device) if device else None)
        if not self._handle:
            raise Qwen3Error(_library.qwen3_error().decode())
        self.vocabulary: int = _library.qwen3_vocabulary(self._handle)  # ids that exist
        self.context_limit: int = _library.qwen3_context_limit(self._handle)  # tokens that it was trained for

    def __del__(self) -> None:
        _library.qwen3_close(self._handle)

    def tokenize(self, text: str, special: bool = False) -> list[int]:
        """Ids. special: "<|im_end|>" and the like become their ids; never do that with a user's text."""
        data = text.encode()
        return _ids(lambda out, room: _library.qwen3_tokenize(self._handle, data, len(data), special, out, room))

    def detokenize(self, ids: Sequence[int]) -> str:
        array = _array(ids)
        size = _check(_library.qwen3_detokenize(self._handle, array, len(ids), None, 0))
        out = ctypes.create_string_buffer(size)
        _check(_library.qwen3_detokenize(self._handle, array, len(ids), out, size))
        return out.raw.decode()

    def prompt(self, question: str, system: str | None = None, thinking: bool = False) -> list[int]:
        """The ids of Qwen3's chat template."""
        data, before = _utf8(question), None if system is None else _utf8(system)
        return _ids(lambda out, room: _library.qwen3_prompt(self._handle, before, data, thinking, out, room))

    def context(self, tokens: int = 0) -> Context:
        """A conversation of up to `tokens` tokens; 0: 4,096, or the model's limit if that is less."""
        return Context(self, tokens)

    def ask(self, question: str, system: str | None = None, thinking: bool = False, **options: float) -> str:
        """One answer. options: max_tokens, temperature, top_k, top_p, min_p, seed, ... as in qwen3_sampling."""
        return "".join(self.stream(question, system, thinking, **options))

    def stream(self, question: str, system: str | None = None, thinking: bool = False,
               **options: float) -> Iterator[str]:
        """The same, in pieces as they come."""
        how, ids = _sampling(thinking, options), self.prompt(question, system, thinking)
        context = self.context(min(len(ids) + (how.max_tokens or 4096), self.context_limit))
        context.feed(ids)
        return context._generate(how)


class Context:
    """A KV cache and the tokens in it."""

    def __init__(self, model: Model, tokens: int = 0) -> None:
        self._handle: int | None = None
        self._handle = _library.qwen3_context_new(model._handle, tokens)
        if not self._handle:
            raise Qwen3Error(_library.qwen3_error().decode())

    def __del__(self) -> None:
        _library.qwen3_context_free(self._handle)

    def __len__(self) -> int:
        return _check(_library.qwen3_tokens(self._handle))

    def feed(self, ids: Sequence[int]) -> None:
        _check(_library.qwen3_feed(self._handle, _array(ids), len(ids)))

    def rewind(self, tokens: int) -> None:
        """Forgets all but the first ones."""
        _check(_library.qwen3_rewind(self._handle, tokens))

    def logits(self) -> list[float]:
        """The score of every id as the next token."""
        count = ctypes.c_size_t()
        scores = _library.qwen3_logits(self._handle, ctypes.byref(count))
        if not scores:
            raise Qwen3Error(_library.qwen3_error().decode())
        return list(scores[:count.value])

    def draw(self, **options: float) -> int:
        """Samples one id; it is not in the context until it is fed."""
        return _check(_library.qwen3_draw(self._handle, ctypes.byref(_sampling(False, options))))

    def ask(self, question: str, **options: float) -> str:
        """The conversation's next answer."""
        return "".join(self.stream(question, **options))

    def stream(self, question: str, **options: float) -> Iterator[str]:
        how, data = _sampling(False, options), _utf8(question)
        return self._pieces(lambda show: _library.qwen3_ask(self._handle, data, ctypes.byref(how), show, None))

    def generate(self, **options: float) -> Iterator[str]:
        """An answer after what was fed."""
        return self._generate(_sampling(False, options))

    def _generate(self, how: _Sampling) -> Iterator[str]:
        return self._pieces(lambda show: _library.qwen3_generate(self._handle, ctypes.byref(how), show, None))

    def _pieces(self, call: Callable[[object], int]) -> Iterator[str]:
        """A call in a thread of its own, whose callback hands over the pieces. Leaving the loop ends the answer."""
        pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        left = threading.Event()

        def show(text: ctypes.Array[ctypes.c_char], size: int, _: object) -> int:
            pieces.put(ctypes.string_at(text, size).decode())
            return int(left.is_set())

        def run() -> None:
            try:
                _check(call(_Show(show)))
                pieces.put(None)
            except BaseException as error:  # is raised where the pieces are taken
                pieces.put(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            left.set()
            thread.join()
