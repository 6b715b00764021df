"""Matrix products by cuBLASLt without a workspace, through the library that torch has loaded: see `linear.py`.

torch gives cuBLAS a workspace. With it, cuBLAS's heuristics choose kernels that count their tiles in memory: each needs
a memset before it, 2 us of a CUDA graph. Without it they choose kernels of the same speed that need none. torch has one
workspace size for the whole process, and products of few tokens need it, so those of many are launched here.

Matrices are stored by rows, which cuBLASLt reads as the columns of their transposes: out' [N, T] = W x', with W given
as [D, N], transposed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_TYPES = {torch.bfloat16: 14, torch.float16: 2}
"""cudaDataType_t."""
_FP32, _COMPUTE_FP32 = 0, 68
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER = 3, 7, 8
"""cublasLtMatmulDescAttributes_t."""
_EPILOGUE_BIAS = 4
_MAX_WORKSPACE, _MIN_ALIGNMENTS = 1, (5, 6, 7, 8)
"""cublasLtMatmulPreferenceAttributes_t: bytes of workspace and of alignment of the four matrices."""
ALIGNMENT = 16
"""Matrices and their rows begin at multiples of this many bytes."""

_BEST_ALIGNMENT = 256
_MAX_SHAPES = 4096
"""Shapes whose descriptions are kept, for the life of the process; torch computes further ones."""

Key = tuple[int, int, int, int, torch.dtype, bool, int]
"""Tokens, outputs, inputs, row stride of x, dtype, whether there is a bias, alignment of the matrices in bytes."""


class CublasLtError(Exception):
    """A call of the library failed."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_size", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class _Product:
    """Description, layouts and algorithm of the products of one shape."""

    def __init__(self, library: Any, handle: ctypes.c_void_p, key: Key) -> None:
        num_tokens, N, D, x_stride, dtype, has_bias, alignment = key
        self.description = ctypes.c_void_p()
        _check(library.cublasLtMatmulDescCreate(ctypes.byref(self.description), _COMPUTE_FP32, _FP32))
        _set(library.cublasLtMatmulDescSetAttribute, self.description, _TRANSPOSE_A, ctypes.c_int32(1))
        if has_bias:
            _set(library.cublasLtMatmulDescSetAttribute, self.description, _EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        self.weight, self.x, self.out = (
            _layout(library, dtype, *sizes) for sizes in ((D, N, D), (D, num_tokens, x_stride), (N, num_tokens, N))
        )
        self.algorithm = self._choose(library, handle, alignment)

    def _choose(self, library: Any, handle: ctypes.c_void_p, alignment: int) -> Any:
        preference, found = ctypes.c_void_p(), ctypes.c_int()
        _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        try:
            set_one = library.cublasLtMatmulPreferenceSetAttribute
            _set(set_one, preference, _MAX_WORKSPACE, ctypes.c_uint64(0))
            for attribute in _MIN_ALIGNMENTS:
                _set(set_one, preference, attribute, ctypes.c_uint32(alignment))
            result = _Heuristic()
            layouts = self.weight, self.x, self.out, self.out
            status = library.cublasLtMatmulAlgoGetHeuristic(
                handle, self.description, *layouts, preference, 1, ctypes.byref(result), ctypes.byref(found)
            )
            _check(status)
        finally:
            library.cublasLtMatmulPreferenceDestroy(preference)
        if found.value != 1 or result.state != 0 or result.workspace_size:
            raise CublasLtError("no algorithm without a workspace")
        return result.algorithm


class CublasLt:
    """The library on one device. Descriptions are kept by shape: a model with its captured sizes has some hundred."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        _check(library.cublasLtCreate(ctypes.byref(self._handle)))
        self._products: dict[Key, _Product | None] = {}  # None: it has no algorithm
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._lock = threading.Lock()  # the address of the bias is part of the description

    def _product(self, key: Key) -> _Product:
        if key not in self._products:
            if len(self._products) >= _MAX_SHAPES:
                raise CublasLtError(f"{_MAX_SHAPES} other shapes are kept")
            try:
                self._products[key] = _Product(self._library, self._handle, key)
            except CublasLtError:
                self._products[key] = None
                raise
        product = self._products[key]
        if product is None:
            raise CublasLtError("no algorithm was found before")
        return product

    def linear(self, x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None) -> Tensor:
        """x W' + bias on the current stream. CublasLtError: it cannot be computed here."""
        (num_tokens, D), N = x_TD.shape, len(weight_ND)
        out_TN = x_TD.new_empty((num_tokens, N))
        is_best = all(tensor.data_ptr() % _BEST_ALIGNMENT == 0 for tensor in (x_TD, weight_ND, out_TN))
        alignment = _BEST_ALIGNMENT if is_best else ALIGNMENT
        key = num_tokens, N, D, x_TD.stride(0), x_TD.dtype, bias_N is not None, alignment
        library, stream = self._library, ctypes.c_void_p(torch.cuda.current_stream(x_TD.device).cuda_stream)
        with self._lock:
            product = self._product(key)
            if bias_N is not None:
                bias = ctypes.c_void_p(bias_N.data_ptr())
                _set(library.cublasLtMatmulDescSetAttribute, product.description, _BIAS_POINTER, bias)
            weight, x, out = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight_ND, x_TD, out_TN))
            one, zero = ctypes.byref(self._one), ctypes.byref(self._zero)
            matrices = weight, product.weight, x, product.x, zero, out, product.out, out, product.out
            workspace = None, ctypes.c_size_t(0)
            status = library.cublasLtMatmul(
                self._handle, product.description, one, *matrices, ctypes.byref(product.algorithm), *workspace, stream
            )
        _check(status)
        return out_TN


def _layout(library: Any, dtype: torch.dtype, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    """A matrix stored by columns."""
    layout, sizes = ctypes.c_void_p(), (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride))
    _check(library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), _TYPES[dtype], *sizes))
    return layout


def _set(function: Any, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _check(function(target, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))))


def _check(status: int) -> None:
    if status != 0:
        raise CublasLtError(f"cuBLASLt returned status {status}")


def _loaded_library() -> Any:
    """The cuBLASLt that torch has loaded into this process. None: it is not found."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if torch.version.cuda is not None and maps.exists() else []
    paths = sorted({line.split(maxsplit=5)[5] for line in lines if "libcublasLt.so" in line})
    return ctypes.CDLL(paths[0]) if paths else None


@functools.cache
def cublaslt(device: torch.device) -> CublasLt | None:
    """The library on a GPU. None: torch's own products are used. A product of torch loads the library first."""
    try:
        with torch.cuda.device(device):
            torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
            library = _loaded_library()
            return None if library is None else CublasLt(library)
    except (OSError, AttributeError, CublasLtError) as error:
        logger.warning("cuBLASLt cannot be called directly, torch's products are used: %r", error)
        return None
