"""The dtypes of the format: torch's names, safetensors' codes, bytes of an element."""

from __future__ import annotations

KV_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
}
"""torch's names of the dtypes that a KV cache may have, with safetensors' codes for them."""

DTYPES = {
    **KV_DTYPES,
    "float64": "F64",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
"""The same for a `TensorTransferData`; complex and sub-byte dtypes are not part of the format."""

DLPACK = {
    **{f"F{bits}": (2, bits) for bits in (16, 32, 64)},
    **{f"I{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    "BF16": (4, 16),
    "BOOL": (6, 8),
    "F8_E4M3": (10, 8),
    "F8_E5M2": (12, 8),
}
"""Code and bits of a DLDataType, by safetensors' dtype code."""

ITEMSIZE = {code: bits // 8 for code, (_, bits) in DLPACK.items()}
"""Bytes of one element, by safetensors' dtype code."""
