"""adaptercache: a tiered LoRA adapter cache and memory manager for LLM serving."""

import logging

from adaptercache.base_model import BaseModel
from adaptercache.batch import Request
from adaptercache.cache import AdapterCache
from adaptercache.checkpoint import ReadOptions
from adaptercache.errors import (
    AdapterCacheError,
    AdapterInvalid,
    AdapterNotFound,
    AdapterUnsupported,
    CacheClosed,
    CapacityError,
    LoadFailed,
)
from adaptercache.identity import AdapterKey, Digest
from adaptercache.layout import KVLayout, LoraLayout
from adaptercache.lease import Admission, Lease
from adaptercache.prefix import prefix_keys
from adaptercache.stats import Stats, Tier
from adaptercache.tiers.remote import DirectorySource, Source

logging.getLogger(__name__).addHandler(logging.NullHandler())  # what to print is yours to say

__all__ = [
    "AdapterCache",
    "AdapterCacheError",
    "AdapterInvalid",
    "AdapterKey",
    "AdapterNotFound",
    "AdapterUnsupported",
    "Admission",
    "BaseModel",
    "CacheClosed",
    "CapacityError",
    "Digest",
    "DirectorySource",
    "KVLayout",
    "Lease",
    "LoadFailed",
    "LoraLayout",
    "ReadOptions",
    "Request",
    "Source",
    "Stats",
    "Tier",
    "prefix_keys",
]
