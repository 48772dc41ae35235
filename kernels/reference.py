"""Each operation in the plainest PyTorch, in float32: what ``kernels.ops`` is tested against.

Nothing here is fast, and the engine never calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.kernels.packing import DenseWeight, Int8Weight, Weight


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zhang and Sennrich, arXiv 1910.07467. ``x`` is ``[num_tokens, hidden]``."""
    x = x.float()
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.float()


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding on pairs (i, i + head_dim/2) (Su et al., arXiv 2104.09864; Llama's pairing).

    ``x`` is ``[num_tokens, num_heads, head_dim]``.
    """
    half = x.shape[-1] // 2
    out = torch.empty_like(x, dtype=torch.float32)
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = torch.tensor(position * theta ** (-2 * i / x.shape[-1]), dtype=torch.float64)
            a, b = x[token, :, i].double(), x[token, :, i + half].double()
            out[token, :, i] = (a * angle.cos() - b * angle.sin()).float()
            out[token, :, i + half] = (b * angle.cos() + a * angle.sin()).float()
    return out


def linear(x: Tensor, weight: Weight) -> Tensor:
    """``x @ weight.T`` with ``x`` ``[num_tokens, in_features]``, element by stored element."""
    return x.float() @ dequantize(weight).T


def dequantize(weight: Weight) -> Tensor:
    """The stored weight's exact meaning in float32."""
    if isinstance(weight, DenseWeight):
        return weight.values.float()
    if isinstance(weight, Int8Weight):
        return weight.values.float() * weight.scales.float()[:, None]
    out_features, half = weight.nibbles.shape
    dense = torch.empty(out_features, half * 2)
    for k in range(half * 2):
        nibble = (weight.nibbles[:, k // 2] >> (4 * (k % 2))) & 15
        scale, zero = weight.scales_and_zeros[k // 32].float().unbind(-1)
        dense[:, k] = (nibble.float() - 8) * scale + zero
    return dense


def round_activations(x: Tensor) -> Tensor:
    """``[num_tokens, in_features]`` as the native products see it: int8 against 32 columns' largest magnitude."""
    groups = x.float().reshape(x.shape[0], -1, 32)
    peaks = groups.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(peaks > 0, 127 / peaks, torch.zeros_like(peaks))
    return ((groups * inverse).round() * (peaks / 127)).reshape(x.shape)


def swiglu(gate_up: Tensor) -> Tensor:
    """Shazeer, arXiv 2002.05202. ``gate_up`` is ``[num_tokens, 2 * intermediate]``, the gate first."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def attention(query: Tensor, keys: Tensor, values: Tensor, first_position: int) -> Tensor:
    """Causal attention of one sequence over contiguous keys and values.

    Args:
        query: ``[query_len, num_heads, head_dim]``; row i is at position ``first_position + i``.
        keys: ``[context_len, num_kv_heads, head_dim]``.
        values: The same shape.
    """
    group = query.shape[1] // keys.shape[1]
    out = torch.empty_like(query, dtype=torch.float32)
    for i in range(query.shape[0]):
        seen = first_position + i + 1
        for head in range(query.shape[1]):
            k, v = keys[:seen, head // group].float(), values[:seen, head // group].float()
            weights = torch.softmax(k @ query[i, head].float() / query.shape[-1] ** 0.5, dim=0)
            out[i, head] = weights @ v
    return out
