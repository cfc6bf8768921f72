"""The cache's pages of one layer, as the kernels take them."""

from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.model.ops.ops import KVCache


def cache_pages(cache: KVCache, layer: int) -> CachePages:
    pages, parts = cache.of(layer), cache.parts(layer)
    if not cache.is_rounded:
        return CachePages(*pages, parts=parts)
    k_scales, v_scales = cache.token_scales(layer) or (None, None)
    return CachePages(*pages, *cache.scales[layer], k_scales, v_scales, parts)
