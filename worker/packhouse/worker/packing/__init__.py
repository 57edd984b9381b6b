"""Packing: one file a strategy, each a pure function on arrays, and what they share."""
