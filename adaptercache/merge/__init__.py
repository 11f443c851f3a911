"""An adapter into its base: when one adapter has an instance to itself."""

from adaptercache.merge.merging import merge
from adaptercache.merge.places import base_of_files

__all__ = ["base_of_files", "merge"]
