"""Mechanism: fits a draft on stored features with Lightning."""
