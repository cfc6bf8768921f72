"""The cache's pages of one layer, as the kernels take them."""

from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.model.ops.ops import KVCache


def cache_pages(cache: KVCache, layer: int) -> CachePages:
    pages = cache.of(layer)
    if (token_scales := cache.token_scales(layer)) is not None:
        return CachePages(*pages, k_scales=token_scales[0], v_scales=token_scales[1])
    return CachePages(*pages, *cache.scales[layer]) if cache.is_rounded else CachePages(*pages)
