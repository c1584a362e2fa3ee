"""Merge two partial attentions of the same queries over disjoint keys.

out = (e^a · out_a + e^b · out_b) / (e^a + e^b), with a, b the two log-sum-exps. Source: the online
softmax (Milakov and Gimelshein, arXiv 1805.02867), blockwise as in Ring Attention
(arXiv 2310.01889).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_(acc: Tensor, acc_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge (out, lse) into (acc, acc_lse), in place.

    Exact for -inf on either side or both: a side that saw nothing has no weight, and two such
    sides stay out 0, lse -inf. Finite inputs never overflow, however far apart: only the difference
    to the larger is exponentiated.

    Args:
        acc: [..., D] float32 or float64.
        acc_lse: [...] natural log.
        out: [..., D], any float dtype.
        lse: [...] natural log.
    """
    merged = torch.logaddexp(acc_lse, lse)
    shift = merged.masked_fill(merged == -math.inf, 0.0)
    weight = torch.exp(lse.sub(shift)).unsqueeze(-1)
    # The two weights add up to 1, so that one interpolation does both products in one pass.
    acc.lerp_(out.to(acc.dtype), weight)
    acc_lse.copy_(merged)
