"""Block attention and the merge, against plain attention in float64."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from usp_viz.kernels.block import _math, block_attention
from usp_viz.kernels.merge import merge_

INF = math.inf
CLOSE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Rounding of the output, for values N(0, 1)."""
CLOSE_LSE = {
    torch.float64: 1e-12,
    torch.float32: 3e-6,
    torch.float16: 5e-3,
    torch.bfloat16: 2e-2,
}
"""The CPU op takes the scores of half types from a product it rounds."""


def plain(q: Tensor, k: Tensor, v: Tensor, allowed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention by its definition, float64: out [B, Lq, H, D], lse [B, Lq, H]."""
    q64, k64, v64 = (t.double().numpy() for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out, lse = np.zeros(q64.shape), np.full(q64.shape[:3], -INF)
    for b, i, h in np.ndindex(*q64.shape[:3]):
        keys = np.flatnonzero(allowed[i])
        if not keys.size:
            continue
        scores = k64[b, keys, h // group] @ q64[b, i, h] / math.sqrt(q.shape[-1])
        top = scores.max()
        weights = np.exp(scores - top)
        lse[b, i, h] = top + math.log(weights.sum())
        out[b, i, h] = weights @ v64[b, keys, h // group] / weights.sum()
    return out, lse


def draw(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def qkv(
    lq: int, lk: int, heads: int = 2, kv_heads: int = 2, dim: int = 8, batch: int = 2, dtype=None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = dtype or torch.float64
    return (
        draw((batch, lq, heads, dim), dtype, 1),
        draw((batch, lk, kv_heads, dim), dtype, 2),
        draw((batch, lk, kv_heads, dim), dtype, 3),
    )


def poison(*sizes: int) -> None:
    """Leave NaNs in the memory that the next allocations are likely to get."""
    for size in sizes:
        for dtype in (torch.float32, torch.float64):
            blocks = [torch.full((size,), math.nan, dtype=dtype) for _ in range(4)]
            del blocks


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    mask: np.ndarray | None = None,
    kernel=block_attention,
) -> None:
    lq, lk = q.shape[1], k.shape[1]
    allowed = np.ones((lq, lk), bool) if mask is None else mask
    if causal:
        allowed = allowed & np.tri(lq, lk, dtype=bool)
    right, right_lse = plain(q, k, v, allowed)
    poison(q.numel(), q.numel() // q.shape[-1])
    given_mask = None if mask is None else torch.from_numpy(mask)
    if kernel is _math:
        out, lse = _math(q, k, v, causal, given_mask)
    else:
        out, lse = block_attention(q, k, v, causal=causal, mask=given_mask)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == q.shape[:3]
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    dead = ~allowed.any(1)
    assert (out[:, dead] == 0).all() and (lse[:, dead] == -INF).all()
    scale = max(1.0, float(v.abs().max()))
    assert np.abs(out.double().numpy() - right).max() <= CLOSE[q.dtype] * scale
    alive = ~dead
    error = np.abs(lse.double().numpy()[:, alive] - right_lse[:, alive])
    bound = CLOSE_LSE[q.dtype] * np.maximum(1, np.abs(right_lse[:, alive]))
    assert (error <= bound).all()


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("kernel", [block_attention, _math])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_causal_and_masked(kernel, dtype) -> None:
    q, k, v = qkv(33, 47, dtype=dtype)
    check(q, k, v, kernel=kernel)
    check(q, k, v, causal=True, kernel=kernel)
    check(*qkv(47, 33, dtype=dtype), causal=True, kernel=kernel)
    mask = np.random.default_rng(0).random((33, 47)) < 0.4
    check(q, k, v, mask=mask, kernel=kernel)


@pytest.mark.parametrize("dim", [1, 2, 3, 7, 8, 16, 31, 40, 64, 96, 128, 200, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(dim: int, dtype) -> None:
    q, k, v = qkv(9, 17, dim=dim, batch=1, dtype=dtype)
    check(q, k, v)
    check(q, k, v, mask=np.random.default_rng(dim).random((9, 17)) < 0.5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (8, 2), (6, 3), (1, 1), (5, 5)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    for kernel in (block_attention, _math):
        check(*qkv(12, 20, heads, kv_heads), kernel=kernel)
        check(*qkv(12, 20, heads, kv_heads), causal=True, kernel=kernel)
        mask = np.random.default_rng(heads).random((12, 20)) < 0.5
        check(*qkv(12, 20, heads, kv_heads, dtype=torch.float32), mask=mask, kernel=kernel)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_that_see_nothing(dtype) -> None:
    q, k, v = qkv(40, 24, dtype=dtype)
    mask = np.random.default_rng(3).random((40, 24)) < 0.5
    mask[[0, 7, 8, 31, 39]] = False
    for kernel in (block_attention, _math):
        check(q, k, v, mask=mask, kernel=kernel)
        check(q, k, v, mask=np.zeros((40, 24), bool), kernel=kernel)
    one = np.zeros((40, 24), bool)
    one[5, 3] = True
    check(q, k, v, mask=one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_whose_first_tiles_are_masked(dtype) -> None:
    """The op works in tiles of keys: -inf minus -inf in the first must not leave a NaN."""
    q, k, v = qkv(70, 1500, heads=1, kv_heads=1, batch=1, dtype=dtype)
    mask = np.zeros((70, 1500), bool)
    for row in range(70):
        mask[row, (row * 21) % 1500 :: 97] = True
    mask[3], mask[4] = False, False
    mask[4, 1499] = True
    check(q, k, v, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_outliers(dtype) -> None:
    q, k, v = qkv(16, 32, dtype=dtype)
    v[:, 5] *= 1e4
    check(q, k, v)
    k[..., 3] *= 1e2
    out, lse = block_attention(q, k, v)
    right, right_lse = plain(q, k, v, np.ones((16, 32), bool))
    # Scores are up to some hundreds here, and their rounding goes into every weight.
    rounding = 1e-9 if dtype == torch.float64 else 1e-4
    assert np.abs(out.double().numpy() - right).max() <= rounding * float(v.abs().max())
    assert np.abs(lse.double().numpy() - right_lse).max() <= rounding * np.abs(right_lse).max()
    q, k, v = (t * 1e4 for t in qkv(8, 8, dtype=dtype))
    out, lse = block_attention(q, k, v)
    assert out.isfinite().all() and lse.isfinite().all(), "a softmax that is one-hot is no NaN"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_give_what_copies_give(dtype) -> None:
    """As the ring hands them over: slices of rows and heads, transposed buffers, K beside V."""
    q, k, v = qkv(24, 40, heads=6, kv_heads=3, batch=3, dtype=dtype)
    both = torch.stack([k, v])
    views = (
        (q[:, 4:20, 2:4], both[0][:, 10:30, 1:2], both[1][:, 10:30, 1:2]),
        (q[1:2], k[1:2, ::2], v[1:2, ::2]),
        (
            q.transpose(0, 1).contiguous().transpose(0, 1)[:, 1:],
            k.transpose(1, 2).contiguous().transpose(1, 2),
            v.transpose(1, 2).contiguous().transpose(1, 2),
        ),
    )
    for view in views:
        assert not all(t.is_contiguous() for t in view)
        check(*view)
        check(*view, causal=True)
        mask = np.random.default_rng(1).random((view[0].shape[1], view[1].shape[1])) < 0.5
        check(*view, mask=mask)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_small_block(data) -> None:
    kv_heads = data.draw(st.integers(1, 3))
    lq, lk = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    q, k, v = qkv(
        lq,
        lk,
        kv_heads * data.draw(st.integers(1, 4)),
        kv_heads,
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from(DTYPES)),
    )
    style = data.draw(st.sampled_from(["dense", "causal", "mask"]))
    density = data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    mask = np.random.default_rng(lq * lk).random((lq, lk)) < density
    check(q, k, v, causal=style == "causal", mask=mask if style == "mask" else None)


def test_what_would_kill_the_process_or_lie_is_refused() -> None:
    q, k, v = qkv(4, 4, heads=4, kv_heads=2)
    for empty in ((q[:, :0], k, v), (q, k[:, :0], v[:, :0]), (q[:0], k[:0], v[:0])):
        with pytest.raises(ValueError, match="empty block"):
            block_attention(*empty)
    with pytest.raises(ValueError, match=r"4 query heads on 3 KV heads: H % G must be 0"):
        block_attention(q, *qkv(4, 4, kv_heads=3)[1:])
    with pytest.raises(ValueError, match="exclude each other"):
        block_attention(q, k, v, causal=True, mask=torch.ones(4, 4, dtype=torch.bool))


# -- merge ---------------------------------------------------------------------------------------


def merged(parts: list[tuple[Tensor, Tensor]], wide: torch.dtype) -> tuple[Tensor, Tensor]:
    acc = torch.zeros(parts[0][0].shape, dtype=wide)
    lse = torch.full(parts[0][1].shape, -INF, dtype=wide)
    for part in parts:
        merge_(acc, lse, *part)
    return acc, lse


def test_two_halves_by_hand() -> None:
    """Weights e^0 : e^ln 3 = 1 : 3; in base 2, or with the weights swapped, it would differ."""
    acc, lse = torch.tensor([[1.0, 2.0]]), torch.tensor([0.0])
    merge_(acc, lse, torch.tensor([[5.0, 10.0]]), torch.tensor([math.log(3)]))
    assert acc[0].tolist() == pytest.approx([4.0, 8.0], rel=1e-6)
    assert lse[0].item() == pytest.approx(math.log(4), rel=1e-6)


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_sides_that_saw_nothing(wide) -> None:
    zero, some = torch.zeros(1, 2, dtype=wide), torch.tensor([[3.0, -7.0]], dtype=wide)
    for acc, acc_lse, out, lse, right, right_lse in (
        (zero, -INF, some, 1.5, some, 1.5),
        (some, 1.5, zero, -INF, some, 1.5),
        (zero, -INF, zero, -INF, zero, -INF),
        (some, -1e30, zero, -INF, some, -1e30),
        (some, 0.0, -some, 0.0, zero, math.log(2)),
    ):
        acc, acc_lse = acc.clone(), torch.tensor([acc_lse], dtype=wide)
        merge_(acc, acc_lse, out, torch.tensor([lse], dtype=wide))
        assert torch.equal(acc, right)
        assert acc_lse.item() == pytest.approx(right_lse, rel=1e-6)


@pytest.mark.parametrize("gap", [80.0, 89.0, 200.0, 1e4, 1e30])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_far_apart_never_overflows(gap: float, wide) -> None:
    near, far = torch.tensor([[2.0]], dtype=wide), torch.tensor([[9.0]], dtype=wide)
    for a, b, right in ((0.0, -gap, near), (-gap, 0.0, far), (gap, 0.0, near), (0.0, gap, far)):
        acc, lse = near.clone(), torch.tensor([a], dtype=wide)
        merge_(acc, lse, far, torch.tensor([b], dtype=wide))
        assert torch.equal(acc, right)
        assert lse.item() == pytest.approx(max(a, b), rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_merge_to_the_whole_in_any_order(dtype) -> None:
    """Four blocks, one of them dead for some rows and one for all, in all 24 orders."""
    q, k, v = qkv(16, 32, heads=4, kv_heads=2, dtype=dtype)
    mask = np.random.default_rng(5).random((16, 32)) < 0.5
    mask[:, 8:16], mask[:4, 16:24], mask[2] = False, False, False
    right, right_lse = plain(q, k, v, mask)
    cuts = [slice(8 * n, 8 * n + 8) for n in range(4)]
    parts = [
        block_attention(q, k[:, c], v[:, c], mask=torch.from_numpy(mask[:, c].copy())) for c in cuts
    ]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rounding = 1e-14 if wide == torch.float64 else 1e-6
    first = merged(parts, wide)
    assert np.abs(first[0].double().numpy() - right).max() <= CLOSE[dtype] * 4
    alive = mask.any(1)
    error = first[1].double().numpy()[:, alive] - right_lse[:, alive]
    assert np.abs(error).max() <= CLOSE_LSE[dtype] * 4
    assert (first[0][:, 2] == 0).all() and (first[1][:, 2] == -INF).all()
    for order in permutations(parts):
        acc, lse = merged(list(order), wide)
        assert (acc - first[0]).abs().max() <= rounding * 4
        assert (lse - first[1])[:, alive].abs().max() <= rounding * 4


def test_merging_is_associative_to_rounding() -> None:
    parts = [
        (draw((5, 3), torch.float32, n), draw((5,), torch.float32, 9 + n, 40)) for n in (0, 1, 2)
    ]
    left = merged(parts, torch.float32)
    right = merged([parts[0], merged(parts[1:], torch.float32)], torch.float32)
    assert (left[0] - right[0]).abs().max() <= 1e-6
    assert (left[1] - right[1]).abs().max() <= 1e-5


def test_many_hops_do_not_drift() -> None:
    """256 equal bf16 blocks: float32 accumulators stay at rounding, bf16 ones would not."""
    out = draw((4, 8), torch.bfloat16)
    acc, lse = merged([(out, torch.zeros(4))] * 256, torch.float32)
    assert (acc - out.float()).abs().max() <= 1e-5
    assert (lse - math.log(256)).abs().max() <= 1e-5


def test_a_merge_writes_into_views() -> None:
    acc, lse = draw((2, 6, 4, 3), torch.float32), draw((2, 6, 4), torch.float32, 1)
    before, where = acc.clone(), (slice(1, 2), slice(2, 5), slice(0, 2))
    merge_(acc[where], lse[where], draw((1, 3, 2, 3), torch.float32, 2), torch.zeros(1, 3, 2))
    changed = (acc != before).any(-1)
    assert changed[where].all() and changed.sum() == 6


def test_the_inputs_of_a_kernel_are_left_alone() -> None:
    q, k, v = qkv(8, 8)
    mask = torch.rand(8, 8) < 0.5
    copies = [t.clone() for t in (q, k, v, mask)]
    block_attention(q, k, v, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(copies, (q, k, v, mask), strict=True))
