"""Kernels of our own, each one file with its eager reference beside it. What they are written in is imported when one
is used. Their functions are copied into ``optimized.py`` as they stand, as are all helpers of techniques."""

from fettle.kernels.block_products import BLOCK_PRODUCTS, block_products, packed_blocks, unpacked_blocks
from fettle.kernels.decomposed_attention import DECOMPOSED_ATTENTION

__all__ = ["BLOCK_PRODUCTS", "DECOMPOSED_ATTENTION", "block_products", "packed_blocks", "unpacked_blocks"]
