"""Bits and inputs: the same for everyone who asks, and as random as they should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import splitmix64
from tests.strategies import scenarios
from usp_viz.attention.inputs import OUTLIER, _normal, make, rounded
from usp_viz.bits import mix, stream
from usp_viz.layout import Layout
from usp_viz.scenario import MAX_TOKENS, Scenario


def scenario(**tensors: Any) -> Scenario:
    tokens = tensors.pop("tokens", {"total": 64})
    return Scenario.parse({"tensors": tensors, "tokens": tokens})


def every(s: Scenario) -> Any:
    return np.arange(Layout.of(s).order.size)


# -- bits ----------------------------------------------------------------------------------------


def test_mix_is_the_published_splitmix64() -> None:
    """The first outputs of the generator seeded with 0, as its authors' C code prints them."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert mix(np.arange(4, dtype=np.uint64)).tolist() == expected


@given(st.integers(0, 2**64 - 1))
def test_mix_wraps_like_64_bit_integers(counter: int) -> None:
    assert int(mix(np.array([counter], np.uint64))[0]) == splitmix64(counter)


def test_mix_leaves_its_argument_alone() -> None:
    counter = np.arange(8, dtype=np.uint64)
    mix(counter)
    assert counter.tolist() == list(range(8))


def test_streams_differ_by_seed_and_number() -> None:
    keys = {int(stream(seed, number)) for seed in range(64) for number in range(32)}
    assert len(keys) == 64 * 32


def test_bits_are_balanced_and_change_with_every_input_bit() -> None:
    counters = np.arange(4096, dtype=np.uint64)
    bits = np.unpackbits(mix(counters).view(np.uint8)).reshape(4096, 64)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.04
    for n in range(0, 64, 5):
        flipped = mix(counters) ^ mix(counters ^ np.uint64(1 << n))
        share = np.unpackbits(flipped.view(np.uint8)).mean()
        assert abs(share - 0.5) < 0.01, "an avalanche"


# -- what each tensor holds ----------------------------------------------------------------------


@pytest.mark.parametrize("tensor", ["q", "k", "v"])
def test_normal_values_are_normal(tensor: Any) -> None:
    s = scenario(batch=2, heads=4, head_dim=32, dtype="float64", tokens={"total": 1024})
    x = make(s, tensor, every(s)).ravel()
    n = x.size
    assert abs(x.mean()) < 5 / n**0.5
    assert abs(x.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((x**3).mean()) < 5 * (15 / n) ** 0.5
    assert abs((x**4).mean() - 3) < 5 * (96 / n) ** 0.5
    for bound, share in ((0.5, 0.3829), (1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
        assert abs((np.abs(x) < bound).mean() - share) < 5 * (share * (1 - share) / n) ** 0.5


def test_nothing_is_correlated_with_anything() -> None:
    s = scenario(batch=2, heads=4, head_dim=32, dtype="float64", tokens={"total": 512})
    q, k, v = (make(s, name, every(s)) for name in ("q", "k", "v"))
    other = make(s.set({"run.seed": 1}), "q", every(s))
    pairs = [(q, k), (q, v), (k, v), (q, other)]
    for axis in range(4):  # neighbours in batch row, row, head and channel
        pairs.append((np.delete(q, 0, axis), np.delete(q, -1, axis)))
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / a.size**0.5


def test_no_element_is_used_twice() -> None:
    s = scenario(batch=4, heads=64, head_dim=64, dtype="float64", tokens={"total": 32})
    drawn = [make(s, name, every(s)).ravel() for name in ("q", "k", "v")]
    values = np.concatenate(drawn)
    assert len(np.unique(values)) == len(values)


def test_the_corners_of_the_format_have_values_of_their_own() -> None:
    """The last batch row, row, head and channel that the caps allow do not wrap onto others."""
    last = 4 * MAX_TOKENS - 1
    some = _normal(0, 0, np.array([last]), 1, 4096, 1024)[0, 0]
    assert len(np.unique(some)) == 4096 * 1024
    rows = np.array([0, *(1 << n for n in range(24)), last])
    others = _normal(0, 0, rows, 4096, 2, 2)
    assert len(np.unique(others)) == others.size


@settings(max_examples=40, deadline=None)
@given(scenarios(), st.data())
def test_rows_are_the_same_whoever_asks_for_them(s: Scenario, data: Any) -> None:
    """In any order, any number of times, and on any mesh."""
    some = st.lists(st.integers(0, every(s).size - 1), max_size=8)
    rows = np.array(data.draw(some), np.int64)
    alone = s.set({"mesh": {}, "tokens.shards": "auto", "tokens.layout": "contiguous"})
    for tensor in ("q", "k", "v"):
        whole = make(s, tensor, every(s))
        assert np.array_equal(make(s, tensor, rows), whole[:, rows])
        assert np.array_equal(make(alone, tensor, rows), whole[:, rows])
        heads = s.tensors.heads if tensor == "q" else s.kv_heads
        assert whole.shape == (s.tensors.batch, every(s).size, heads, s.tensors.head_dim)
        assert whole.dtype == (np.float64 if s.tensors.dtype == "float64" else np.float32)
        assert np.isfinite(whole).all()


def test_values_of_v_by_name() -> None:
    tokens = {"total": 4, "replicated": {"prefix": 1, "kv_prefix": 1, "suffix": 1}}
    shape = {"heads": 2, "head_dim": 3, "batch": 2, "tokens": tokens}
    rows = np.array([6, 0, 3])

    def v(values: Any) -> Any:
        s = scenario(values=values, **shape)
        normal = scenario(**shape)
        for name in ("q", "k"):
            if values != "outlier":
                assert np.array_equal(make(s, name, rows), make(normal, name, rows))
        return make(s, "v", rows)

    def everywhere(*per_row: float) -> Any:
        return np.broadcast_to(np.array(per_row, np.float32)[None, :, None, None], (2, 3, 2, 3))

    assert np.array_equal(v("constant"), everywhere(1, 1, 1))
    assert np.array_equal(v("ramp"), everywhere(6, 0, 3))
    assert np.array_equal(v({"list": [5, 1, 2, -4, 8, 9, 7.5]}), everywhere(7.5, 5, -4))


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("values", ["normal", "constant", "ramp", "outlier"])
def test_arrays_are_their_owner_s(values: str, dtype: str) -> None:
    """torch warns, on every rank's stderr, of an array that it may not write to."""
    for heads in (1, 2):
        s = scenario(heads=heads, head_dim=heads, values=values, dtype=dtype)
        for name in ("q", "k", "v"):
            made = make(s, name, every(s))
            assert made.flags.writeable and made.flags.c_contiguous


def test_outliers_are_one_row_of_v_and_one_channel_of_k() -> None:
    tokens = {"total": 8, "replicated": {"prefix": 2}}
    plain = scenario(head_dim=4, dtype="float64", tokens=tokens)
    loud = scenario(head_dim=4, dtype="float64", values="outlier", tokens=tokens)
    assert OUTLIER == 100
    scale = {
        name: make(loud, name, every(loud)) / make(plain, name, every(plain)) for name in "qkv"
    }
    assert np.allclose(scale["q"], 1)
    assert np.allclose(scale["k"], np.array([1, 1, 100, 1]))
    assert np.allclose(scale["v"][:, [6]], 100)
    assert np.allclose(np.delete(scale["v"], 6, 1), 1)


def test_values_that_no_sum_could_hold_are_invalid() -> None:
    for dtype, value in (("float16", 65505.0), ("bfloat16", 1e31), ("float32", -1e31)):
        with pytest.raises(ValueError, match=r"tensors\.values\.list"):
            scenario(dtype=dtype, values={"list": [0.0] * 63 + [value]})
    with pytest.raises(ValueError, match=r"tensors\.dtype: 'float16' — ramp counts 65536 rows"):
        scenario(dtype="float16", values="ramp", tokens={"total": 65536})


# -- rounding ------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-7, 1 + 3 * 2**-8, 2**-130, 3e38, 65504.0, 1e-8, 6e-8]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_rounding_is_torch_s(dtype: str) -> None:
    """Ties to even, denormals kept."""
    s = scenario(dtype=dtype)
    x = np.concatenate([np.random.default_rng(0).normal(size=20_000) * 10, SPECIAL])
    if dtype == "float16":
        x = x[np.abs(x) < 65504]
    exact = getattr(torch, dtype)
    mine = rounded(x, s)
    wide = torch.float64 if dtype == "float64" else torch.float32
    assert np.array_equal(mine, torch.from_numpy(x).to(wide).to(exact).to(wide).numpy())
    assert np.array_equal(torch.from_numpy(mine).to(exact).to(wide).numpy(), mine), "exact in it"
