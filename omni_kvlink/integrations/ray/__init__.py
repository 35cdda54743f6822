"""Passes tensors between Ray actors by reference, over the links of this library.

`omni_kvlink.integrations.ray.register()` makes the transport known to Ray, and methods that return
tensors have `@ray.method(tensor_transport="kvlink")`.
"""

from omni_kvlink.integrations.ray.registration import register as register
