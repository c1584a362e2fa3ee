"""Block attention: softmax attention over one rectangle, with the log-sum-exp that a merge needs.

Contract of every kernel here: ``(q_BLHD, k_BLGD, v_BLGD) -> (out_BLHD, lse_BLH)`` with H % G == 0
and no empty dimension; query head h reads KV head h // (H / G). `lse` is the natural-log
log-sum-exp of the scaled scores, in float32 (float64 for float64). A row that sees nothing has
out 0 and lse -inf. Inputs may be strided as long as the last dimension is dense.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_EFFICIENT_CUDA = torch.ops.aten._scaled_dot_product_efficient_attention


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of one block.

    Args:
        q: [B, Lq, H, D]; scores are scaled by 1 / sqrt(D).
        k: [B, Lk, G, D].
        v: [B, Lk, G, D].
        causal: Row i sees keys 0 … i (top-left aligned).
        mask: bool [Lq, Lk], True where allowed; not together with `causal`.

    Returns:
        out [B, Lq, H, D] in q's dtype, lse [B, Lq, H].

    Raises:
        ValueError: An empty dimension, H % G != 0, or both `causal` and `mask`.
    """
    if not (q.numel() and k.numel()):
        raise ValueError(f"empty block: q {tuple(q.shape)}, k {tuple(k.shape)}; skip it instead")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{q.shape[2]} query heads on {k.shape[2]} KV heads: H % G must be 0")
    if causal and mask is not None:
        raise ValueError("causal and mask exclude each other: put the triangle into the mask")
    if q.device.type == "cpu":
        return _flash_cpu(q, k, v, causal, mask)
    if q.dtype == torch.float64:
        return _math(q, k, v, causal, mask)
    return _efficient_cuda(q, k, v, causal, mask)


def _flash_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """torch's CPU flash op: native GQA, strided views, natural-log LSE."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    bias = None if mask is None else _bias(mask, q.dtype)
    out, lse = _FLASH_CPU(q, k, v, 0.0, causal, attn_mask=bias)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if mask is None else (out, _dead_rows(lse, mask))


def _efficient_cuda(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """torch's memory-efficient op on CUDA; it knows no GQA, and pads the LSE's rows."""
    rows, group = q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    bias = None
    if mask is not None:
        # The op wants rows of the bias to start at multiples of 16 bytes.
        width = -(-mask.shape[1] // 16) * 16
        padded = torch.zeros(mask.shape[0], width, dtype=torch.bool, device=mask.device)
        padded[:, : mask.shape[1]] = mask
        bias = _bias(padded, q.dtype)[:, : mask.shape[1]].expand(*q.shape[:2], *mask.shape)
    out, lse, *_ = _EFFICIENT_CUDA(q, k, v, bias, True, 0.0, causal)
    out, lse = out.transpose(1, 2), lse[..., :rows].transpose(1, 2)
    return (out, lse) if mask is None else (out.nan_to_num(0.0), _dead_rows(lse, mask))


def _math(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Plain matrix products: any device, any dtype, Lq x Lk scores in memory."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return (weights @ v.to(wide)).to(q.dtype).transpose(1, 2), lse.transpose(1, 2)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive form of a bool mask. The op needs the query's dtype; any other is silently wrong."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _dead_rows(lse: Tensor, mask: Tensor) -> Tensor:
    """-inf where a row sees nothing: torch's op says 0 there, which a merge takes for a weight."""
    return lse.masked_fill(~mask.any(-1)[None, :, None], -math.inf)
