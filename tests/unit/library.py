"""The C API of qwen3.h through Python's ctypes. Usage: library.py LIBQWEN3.so MODEL QUESTION; prints the greedy answer."""
import ctypes
import sys


class Sampling(ctypes.Structure):
    _fields_ = [("temperature", ctypes.c_float), ("top_k", ctypes.c_int), ("top_p", ctypes.c_float),
                ("min_p", ctypes.c_float), ("repeat", ctypes.c_float), ("presence", ctypes.c_float),
                ("frequency", ctypes.c_float), ("seed", ctypes.c_uint64), ("max_tokens", ctypes.c_int)]


Show = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t, ctypes.c_void_p)
q = ctypes.CDLL(sys.argv[1])
q.qwen3_error.restype = ctypes.c_char_p
q.qwen3_open.restype = q.qwen3_context_new.restype = ctypes.c_void_p
q.qwen3_default_sampling.restype = Sampling
q.qwen3_context_new.argtypes = [ctypes.c_void_p, ctypes.c_int]
q.qwen3_ask.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(Sampling), Show, ctypes.c_void_p]
q.qwen3_context_free.argtypes = q.qwen3_close.argtypes = [ctypes.c_void_p]

assert not q.qwen3_open(b"/nonexistent", None, None) and b"/nonexistent" in q.qwen3_error()
model = q.qwen3_open(sys.argv[2].encode(), None, b"cpu")
context = q.qwen3_context_new(model, 0) if model else None
if not context:
    sys.exit(q.qwen3_error().decode())
greedy = q.qwen3_default_sampling(0)
greedy.temperature = 0
pieces = []
show = Show(lambda text, size, _: pieces.append(text[:size]) or 0)
if q.qwen3_ask(context, sys.argv[3].encode(), ctypes.byref(greedy), show, None) < 0:
    sys.exit(q.qwen3_error().decode())
print(b"".join(pieces).decode())
q.qwen3_context_free(context)
q.qwen3_close(model)
