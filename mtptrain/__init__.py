"""mtptrain: trains draft heads for speculative decoding and measures their acceptance length."""

__version__ = "0.1.0"
