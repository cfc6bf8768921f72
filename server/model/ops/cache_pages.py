"""The cache's pages of one layer, as the kernels take them."""

from loraplex.server.kernels.attention.pages import CachePages
from loraplex.server.model.ops.ops import KVCache


def cache_pages(cache: KVCache, layer: int) -> CachePages:
    pages, parts = cache.of(layer), cache.parts(layer)
    if (token_scales := cache.token_scales(layer)) is not None:
        k_scales, v_scales = token_scales
        return CachePages(*pages, k_scales=k_scales, v_scales=v_scales, parts=parts)
    if cache.is_rounded:
        return CachePages(*pages, *cache.scales[layer], parts=parts)
    return CachePages(*pages, parts=parts)
