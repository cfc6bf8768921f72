"""The cache's pages of one layer, as the kernels take them."""

from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.model.ops.ops import KVCache


def cache_pages(cache: KVCache, layer: int) -> CachePages:
    pages = cache.of(layer)
    return CachePages(*pages, *cache.scales[layer]) if cache.is_fp8 else CachePages(*pages)
