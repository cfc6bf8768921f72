"""Attention to latents (MLA, arXiv 2405.04434): one vector of a token stands for the keys and
values of all heads. Pure.
"""

from loraplex.server.model.spec.linear_spec import LinearSpec
from loraplex.server.model.spec.model_spec import AttentionSpec, NormSpec


class LatentSpec(AttentionSpec, frozen=True, kw_only=True):
    """Attention whose cache keeps, once for all heads, a normed latent and a rotated part of keys.

    `kv_b` makes of a latent each head's key without rotation, of `nope` features, and its value. So
    heads see the cache as one head of keys, whose first `latent` features are the values.

    qkv: gives latent and part, the role `kv_a`. head_dim: of both together. q_a, q_a_norm: the
    products before `q_b`; None = it reads what `kv_a` reads. q_b: each head's query, the rotated
    part last.
    """

    q_a: LinearSpec | None
    q_a_norm: NormSpec | None
    q_b: LinearSpec
    kv_b: LinearSpec
    latent_norm: NormSpec
    latent: int
    nope: int
    value_dim: int

    @property
    def turned(self) -> int:
        """Features of the rotated part."""
        return self.head_dim - self.latent

    @property
    def q_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def kv_size(self) -> int:
        return self.head_dim // 2

    @property
    def free_norms(self) -> tuple[NormSpec | None, NormSpec | None]:
        return self.q_a_norm, None

    @property
    def inner_norms(self) -> tuple[NormSpec, ...]:
        of_q = () if self.q_a_norm is None else (self.q_a_norm,)
        return *of_q, self.latent_norm

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        first = () if self.q_a is None else (self.q_a,)
        return *first, self.qkv, self.q_b, self.kv_b, self.o
