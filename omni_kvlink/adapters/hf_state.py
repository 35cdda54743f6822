"""Attributes of transformers' caches from 4.50 to 5.24: sent, irrelevant, or refused.

An attribute in none of the three lists is refused by name, as it may hold what the next token
depends on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from omni_kvlink.errors import SchemaError


class Attributes(NamedTuple):
    """The attributes of objects of one class, in any version."""

    sent: frozenset[str]
    """Attributes that a received object has as the sent one had them."""
    irrelevant: frozenset[str]
    """Attributes that follow from those, or from the class, or are the receiving model's own."""
    refused: frozenset[str]
    """Attributes that say that values lie elsewhere; an object that has set one is not sent."""

    def check(self, holder: object, holder_name: str) -> None:
        """Raise SchemaError if the object has an attribute that is not sent, and may count."""
        values = vars(holder)
        for name in values.keys() - self.sent - self.irrelevant:
            if name not in self.refused:
                raise SchemaError(
                    f"{holder_name} has an attribute {name!r} that is not known here, and may be a "
                    "state that is not sent: delete it, or use transformers 4.50 to 5.24"
                )
            if values[name]:
                raise SchemaError(f"{holder_name} has {name} set: its values lie elsewhere")


CACHE = Attributes(
    sent=frozenset({"layers", "key_cache", "value_cache"}),
    irrelevant=frozenset(
        {
            "_seen_tokens",  # 4.50: the length of the first layer
            "layer_class_to_replicate",  # the class of layers to come, which holds no value
            "layer_classes",  # 4.54 and 4.55: the same, and what they are made with
            "layer_init_kwargs",
            "num_hidden_layers",
            "is_compileable",
        }
    ),
    refused=frozenset({"cache_processor", "offloading", "only_non_sliding", "prefetch_stream"}),
)
"""The attributes of a `DynamicCache`."""

LAYER = Attributes(
    sent=frozenset({"keys", "values", "cumulative_length", "record_past"}),
    irrelevant=frozenset(
        {
            "sliding_window",  # the receiving model's, compared with the tokens that are here
            "_sliding_window_tensor",
            "is_initialized",  # these follow from K and V
            "device",
            "dtype",
            "is_compileable",  # constants of a class
            "is_croppable",
            "is_sliding",
            "supports_early_init",
            "layer_type",
            "_layer_type",
        }
    ),
    refused=frozenset(),
)
"""The attributes of the layers of the classes `LAYER_CLASSES`."""

CACHE_CLASS = "DynamicCache"
LAYER_CLASSES = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Exactly these classes are sent: others, subclasses too, hold more than K and V."""


def check_cache(cache: Any) -> None:
    """Raise SchemaError unless a cache is a `DynamicCache` that holds its values itself."""
    if type(cache).__name__ != CACHE_CLASS or getattr(cache, "offloading", False):
        raise SchemaError(
            f"a {type(cache).__name__}; wanted a {CACHE_CLASS} without offloading, and no "
            "subclass: those hold more than K and V, or hold it elsewhere"
        )
    CACHE.check(cache, f"the {CACHE_CLASS}")


def check_layer(layer: Any, index: int) -> None:
    """Raise SchemaError unless a layer is of one of `LAYER_CLASSES`, all of whose state is sent."""
    kind = type(layer).__name__
    if kind not in LAYER_CLASSES:
        raise SchemaError(f"layer {index} is a {kind}; wanted one of {', '.join(LAYER_CLASSES)}")
    LAYER.check(layer, f"layer {index}, a {kind},")
