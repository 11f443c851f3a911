"""LoRA for a mixed batch, straight from the paged arena. Usable without the cache."""

from adaptercache.kernels.apply import add_lora
from adaptercache.kernels.segments import LoraBatch
from adaptercache.kernels.stack import LoraStack

__all__ = ["LoraBatch", "LoraStack", "add_lora"]
