"""Mechanism: draft and target in lock-step over one pool of KV pages."""
