"""DLPack: how a framework describes its tensors to C code, without Python in between.

https://dmlc.github.io/dlpack/latest/python_spec.html
"""

from __future__ import annotations

import ctypes
import sys

MAJOR = 1
"""DLPack's major version whose DLTensor the native library reads."""
_CAPSULE = b"dlpack_exchange_api"


class _ExchangeApi(ctypes.Structure):
    """A DLPackExchangeAPI, as far as it is used here."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("major", "minor")),
        *((name, ctypes.c_void_p) for name in ("previous", "allocate", "export", "make")),
        ("describe", ctypes.c_void_p),
    )


class Interpreter(ctypes.Structure):
    """A `kvl_interpreter`: functions of this one."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            *("Py_IsInitialized", "PyGILState_Ensure", "PyGILState_Release"),
            *("Py_IncRef", "Py_DecRef", "PyList_SetItem"),
        )
    )

    @classmethod
    def current(cls) -> Interpreter:
        """The functions of the interpreter of this process, which is CPython."""
        names = [name for name, *_ in cls._fields_]
        functions = (getattr(ctypes.pythonapi, name) for name in names)
        return cls(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))


def describer_of(tensor_type: type) -> int:
    """The address of the function that describes a tensor of this type as a DLTensor.

    It takes the address of the object, as `id` returns it, and that of the DLTensor; the caller
    holds the GIL. 0 if the framework, or this interpreter, has none.
    """
    api = _api_of(tensor_type)
    return api.describe or 0 if api is not None else 0


def maker_of(tensor_type: type) -> int:
    """The address of the function that makes a tensor of this type of a DLManagedTensorVersioned.

    It takes the address of that, and where the new object's address goes; the caller holds the GIL.
    0 if the framework, or this interpreter, has none.
    """
    api = _api_of(tensor_type)
    return api.make or 0 if api is not None else 0


def _api_of(tensor_type: type) -> _ExchangeApi | None:
    capsule = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    if capsule is None or sys.implementation.name != "cpython":
        return None
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    try:
        api = _ExchangeApi.from_address(get_pointer(capsule, _CAPSULE))
    except ValueError:  # it is no such capsule: other libraries set the attribute, too
        return None
    return api if api.major == MAJOR else None
