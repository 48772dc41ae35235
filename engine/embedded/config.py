"""The shape of a Llama-architecture model, as both loaders read it and the model and the KV pool use it."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import ModelFileError

# A file may claim anything: sizes beyond these are refused before memory is allocated for them.
_LIMITS = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 15,
    "num_layers": 512,
    "num_heads": 512,
    "num_kv_heads": 512,
    "head_dim": 1024,
    "intermediate_size": 1 << 18,
    "max_context_tokens": 1 << 22,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model's shape. Counts are numbers of rows, heads or tokens; ``rope_theta`` and the epsilon have no unit."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context_tokens: int
    rms_norm_eps: float
    rope_theta: float
    tied_head: bool  # the output head is the embedding table

    def check(self, where: str) -> None:
        """Raises ``ModelFileError`` naming ``where`` when a size is absurd or sizes do not fit together."""
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 1 <= value <= limit:
                raise ModelFileError(f"{where}: {name} is {value}; accepted: 1 to {limit}")
        if self.num_heads % self.num_kv_heads:
            raise ModelFileError(
                f"{where}: {self.num_heads} heads are not a multiple of {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ModelFileError(f"{where}: head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        if not 0 < self.rms_norm_eps < 1 or not 1 <= self.rope_theta < 1e12:
            raise ModelFileError(
                f"{where}: rms_norm_eps {self.rms_norm_eps} or rope_theta {self.rope_theta} is out of range"
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim
