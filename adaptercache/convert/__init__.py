"""Adapters of other trainers, written as PEFT saves its own: without loss, or not at all."""

from adaptercache.convert.conversion import convert_to_peft

__all__ = ["convert_to_peft"]
