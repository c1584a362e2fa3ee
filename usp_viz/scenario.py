"""The only input of the tool: what attention, on which mesh, over which tokens.

A `Scenario` is valid, frozen and hashable, and round-trips YAML, JSON, dotted ``--set`` pairs and
URLs. Validity is pure: whether a machine can *run* it is a different question (`runtime.limits`).
The format is schema_version 1; every key is described in the generated JSON Schema
(``usp-viz schema``). Letters used here and everywhere: B batch, S global tokens, H query heads,
G KV heads, D head dim, U Ulysses degree, R ring degree, P = U·R ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    Tag,
    ValidationError,
    model_validator,
)

from usp_viz.errors import InvalidScenario
from usp_viz.scenario_errors import adding_up, explain, near

SCHEMA_VERSION = 1
MAX_RANKS = 4096
MAX_TOKENS = 4_194_304
Release = Literal[
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0132848349",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
]
RELEASES: tuple[Release, ...] = get_args(Release)
"""sglang releases with known rules, oldest first; the bare hash is the commit of 2026-08-28."""
Engine = Literal[
    "builtin",
    "sglang",
    "yunchang",
    "torch-cp",
    "diffusers",
    "cache-dit",
    "ring-attention-pytorch",
]
ENGINES: tuple[Engine, ...] = get_args(Engine)
Policy = Literal["sglang", "unguarded", "extended"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by dtype."""
LARGEST = {"float64": 1e30, "float32": 1e30, "bfloat16": 1e30, "float16": 65504.0}
"""What a value of V may be: finite in its dtype, and in a sum over any number of rows."""


def _whole(minimum: int, maximum: int) -> Any:
    return Field(strict=True, ge=minimum, le=maximum)


Count = Annotated[int, _whole(0, MAX_TOKENS)]
Positive = Annotated[int, _whole(1, MAX_TOKENS)]
Degree = Annotated[int, _whole(1, MAX_RANKS)]
Heads = Annotated[int, _whole(1, 4096)]
Seed = Annotated[int, _whole(0, 2**63 - 1)]


def _word_or_list(value: Any) -> str:
    return "<list>" if isinstance(value, (list, tuple)) else "<word>"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class MeshSpec(_Part):
    """The process mesh: U x R ranks."""

    ulysses: Degree = Field(default=1, description="U: ranks that swap sequence for heads.")
    ring: Degree = Field(default=1, description="R: ranks that pass K and V around.")
    order: Literal["ulysses-inner", "ring-inner"] = Field(
        default="ulysses-inner", description="Which axis neighbouring ranks lie on."
    )

    @property
    def ranks(self) -> int:
        """P = U·R."""
        return self.ulysses * self.ring


class ValueList(_Part):
    """V given per position of the whole order, the same for every head and channel."""

    list: tuple[Annotated[float, Field(strict=True, allow_inf_nan=False)], ...] = Field(
        max_length=MAX_TOKENS
    )


class TensorSpec(_Part):
    """Shapes and contents of Q, K and V."""

    batch: Annotated[int, _whole(1, 4096)] = Field(default=1, description="B.")
    heads: Heads = Field(default=8, description="H, query heads.")
    kv_heads: Heads | None = Field(default=None, description="G, KV heads; H % G == 0. Default: H.")
    head_dim: Annotated[int, _whole(1, 1024)] = Field(default=32, description="D.")
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    values: Annotated[
        Annotated[Literal["normal", "constant", "ramp", "outlier"], Tag("<word>")]
        | Annotated[ValueList, Tag("<mapping>")],
        Discriminator(lambda v: "<mapping>" if isinstance(v, (Mapping, ValueList)) else "<word>"),
    ] = Field(default="normal", description="What V holds; Q and K are always seeded normal.")


class Replicated(_Part):
    """Rows that every rank holds besides its shard."""

    prefix: Count = Field(default=0, description="Leading rows of Q, K and V.")
    suffix: Count = Field(default=0, description="Trailing rows of Q, K and V.")
    kv_prefix: Count = Field(default=0, description="Leading rows of K and V only.")


class TokenSpec(_Part):
    """How many rows there are, and which rank holds which."""

    total: Positive = Field(default=48, description="S, rows per batch row.")
    shards: Annotated[
        Annotated[Literal["even", "auto"], Tag("<word>")]
        | Annotated[tuple[Count, ...], Tag("<list>"), Field(max_length=MAX_RANKS)],
        Discriminator(_word_or_list),
    ] = Field(
        default="even", description="Rows by sequence position: even, auto (ceil/floor) or a list."
    )
    documents: Annotated[tuple[Count, ...], Field(max_length=65_536, min_length=1)] | None = Field(
        default=None, description="Lengths of packed documents; attention stays inside each."
    )
    layout: Literal["contiguous", "zigzag", "striped"] = "contiguous"
    replicated: Replicated = Replicated()


class KeyRanges(_Part):
    """Which keys are valid: [0, valid_b) less the holes."""

    valid: tuple[Count, ...] = Field(description="Per batch row, or one for all.", min_length=1)
    holes: tuple[Annotated[tuple[Count, Count], Field(strict=False)], ...] = ()


class KeyMask(_Part):
    """A bool [B, S] key mask, given as a tensor."""

    key: KeyRanges


class _Start(_Part):
    start: Count


class TailPad(_Part):
    """Metadata alone: rows from `start` on are padding."""

    tail_pad: _Start


class _Gap(_Part):
    start: Count
    end: Count


class GapPad(_Part):
    """Metadata alone: rows in [start, end) are padding."""

    gap_pad: _Gap


class _WindowSides(_Part):
    left: Count | None = None
    right: Count | None = None


class Window(_Part):
    """Sliding window: i - left <= j <= i + right; null is unlimited."""

    window: _WindowSides


class _Prefix(_Part):
    prefix: Count


class PrefixLM(_Part):
    """j <= i, or j inside the prefix."""

    prefix_lm: _Prefix


class _Density(_Part):
    density: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.5
    seed: Seed = 0


class Dense(_Part):
    """An arbitrary S x S mask: each pair allowed with probability `density`."""

    dense: _Density


MaskSpec = KeyMask | TailPad | GapPad | Window | PrefixLM | Dense
MASK_KINDS = ("key", "tail_pad", "gap_pad", "window", "prefix_lm", "dense")


def mask_kind(mask: Any) -> str:
    """The one key of a mask, in a file or in a model; empty for what is no mask."""
    keys: Any = type(mask).model_fields if isinstance(mask, _Part) else mask
    return str(next(iter(keys), "")) if isinstance(keys, Mapping) else ""  # type: ignore[reportUnknownArgumentType]


_AnyMask = Annotated[
    Annotated[KeyMask, Tag("key")]
    | Annotated[TailPad, Tag("tail_pad")]
    | Annotated[GapPad, Tag("gap_pad")]
    | Annotated[Window, Tag("window")]
    | Annotated[PrefixLM, Tag("prefix_lm")]
    | Annotated[Dense, Tag("dense")],
    Discriminator(mask_kind),
]


def _masks_in(value: Any) -> Any:
    if value is None or value == "none":
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)  # type: ignore[reportUnknownVariableType]


def _masks_out(masks: tuple[MaskSpec, ...]) -> Any:
    dumped = [mask.model_dump(mode="json") for mask in masks]
    return "none" if not dumped else dumped[0] if len(dumped) == 1 else dumped


class AttentionSpec(_Part):
    """The layer that is called, and what it is told."""

    layer: Literal["USPAttention", "UlyssesAttention"] = "USPAttention"
    causal: Annotated[bool, Field(strict=True)] = False
    mask: Annotated[
        tuple[_AnyMask, ...],
        Field(max_length=16),
        BeforeValidator(
            _masks_in, json_schema_input_type=Literal["none"] | _AnyMask | list[_AnyMask] | None
        ),
        PlainSerializer(_masks_out),
    ] = ()
    skip_sequence_parallel: Annotated[bool, Field(strict=True)] = False
    skip_kv: Literal["full", "sharded"] = Field(
        default="full", description="Under skip, the KV each rank holds; sharded is the misuse."
    )
    backend: Literal["auto", "sdpa", "flash", "triton"] = Field(
        default="auto", description="The kernel that we run."
    )
    sglang_backend: Literal["FA", "TORCH_SDPA", "SAGE_ATTN"] = Field(
        default="FA", description="What the sglang deployment uses; only the rules read it."
    )
    seq_lens: Annotated[
        Annotated[Literal["auto", "always", "never"], Tag("<word>")]
        | Annotated[tuple[Count, ...], Tag("<list>"), Field(max_length=MAX_RANKS)],
        Discriminator(_word_or_list),
    ] = Field(
        default="auto", description="Whether the layer gets seq_lens; auto: when shards are uneven."
    )


class RunSpec(_Part):
    """How to run it."""

    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Annotated[float, Field(strict=True, gt=0, le=3600)] = 60.0


class Expect(_Part):
    """What the file's own policy and release should give."""

    outcome: Literal["verified", "wrong", "refused", "crashed", "timeout"]
    error: str | None = Field(default=None, description="Rule id, when refused.", max_length=100)


class Scenario(_Part):
    """One question to the tool. Build it with `Scenario.load` or `Scenario.parse`.

    Raises:
        InvalidScenario: From `load`, `parse` and `set`, for anything that cannot be.

    >>> s = Scenario.parse({"mesh": {"ulysses": 2, "ring": 2}, "tokens": {"total": 48}})
    >>> s.mesh.ranks, s.shards
    (4, (12, 12, 12, 12))
    >>> Scenario.parse({"tokens": {"total": 7}, "mesh": {"ring": 2}})
    Traceback (most recent call last):
    usp_viz.errors.InvalidScenario: tokens.total: 7 — even shards need S % P == 0, and 7 % 2 = 1; \
use shards: auto; nearest legal: 6, 8
    """

    schema_version: Annotated[int, _whole(SCHEMA_VERSION, SCHEMA_VERSION)] = SCHEMA_VERSION
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=80)] = (
        "unnamed"
    )
    title: Annotated[str, Field(max_length=10_000)] = ""
    description: Annotated[str, Field(max_length=100_000)] = ""
    mesh: MeshSpec = MeshSpec()
    tensors: TensorSpec = TensorSpec()
    tokens: TokenSpec = TokenSpec()
    attention: AttentionSpec = AttentionSpec()
    policy: Policy = "extended"
    release: Release = "0132848349"
    engine: Engine = "builtin"
    fault: None = Field(default=None, description="A named mistake; none are built yet.")
    run: RunSpec = RunSpec()
    expect: Expect | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        for problem in _inconsistencies(self):
            raise problem
        return self

    @classmethod
    def parse(cls, mapping: Mapping[str, Any]) -> Scenario:
        """Validate a mapping; `InvalidScenario` names the first key at fault."""
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            raise explain(error, mapping) from None

    @classmethod
    def load(cls, source: str, sets: Mapping[str, Any] | None = None) -> Scenario:
        """Read a file, ``-`` (standard input) or a bundled scenario by name, then apply `sets`."""
        from usp_viz.loading import read_mapping

        return cls._changed(read_mapping(source), sets or {})

    def set(self, sets: Mapping[str, Any]) -> Scenario:
        """A copy with dotted keys changed, validated again: ``s.set({"mesh.ring": 1})``."""
        return self._changed(self.as_written(), sets)

    @classmethod
    def _changed(cls, written: Mapping[str, Any], sets: Mapping[str, Any]) -> Scenario:
        """`written` with `sets` applied, which may also mend what it has wrong.

        An `expect` speaks of the question as it was written: a changed question has none.
        """
        from usp_viz.loading import set_dotted

        scenario = cls.parse(set_dotted(written, sets))
        if not sets or scenario.expect is None or any(key.startswith("expect") for key in sets):
            return scenario
        try:
            same = scenario.hash == cls.parse(written).hash
        except InvalidScenario:
            same = False
        return scenario if same else cls.parse({**scenario.as_written(), "expect": None})

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> Scenario:
        """A copy with whole parts replaced: validated again, unlike pydantic's own."""
        return self.parse({**self.as_written(), **(update or {})})

    def as_written(self) -> dict[str, Any]:
        """As plain data, with what was left out still left to its default."""
        return self.model_dump(mode="json", exclude_unset=True)

    def normalised(self) -> dict[str, Any]:
        """As plain data, every default filled in."""
        data = self.model_dump(mode="json")
        data["tensors"]["kv_heads"] = self.kv_heads
        return data

    def dotted(self) -> dict[str, Any]:
        """The normalised scenario as ``--set`` pairs."""
        return dict(_flatten(self.normalised()))

    @property
    def hash(self) -> str:
        """Identity of the question: sha256 over everything but prose and expectation."""
        data = self.normalised()
        for prose in ("name", "title", "description", "expect"):
            del data[prose]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.tensors.kv_heads or self.tensors.heads

    @property
    def shards(self) -> tuple[int, ...]:
        """Rows of each sequence position; P numbers that add up to S."""
        shards, total, ranks = self.tokens.shards, self.tokens.total, self.mesh.ranks
        if isinstance(shards, tuple):
            return shards
        return tuple(total // ranks + (p < total % ranks) for p in range(ranks))

    @property
    def documents(self) -> tuple[int, ...]:
        """Document lengths; the whole sequence when none are packed."""
        return self.tokens.documents or (self.tokens.total,)


def _flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted key; masks and value lists are leaves, since they replace as a whole."""
    for key, value in data.items():
        dotted = prefix + key
        whole = dotted in ("attention.mask", "tensors.values", "expect")
        if isinstance(value, dict) and not whole:
            yield from _flatten(value, dotted + ".")  # type: ignore[reportUnknownArgumentType]
        else:
            yield dotted, value


def _inconsistencies(s: Scenario) -> Iterator[InvalidScenario]:
    """What no single field can see: sums, divisibility, intervals, layout constraints."""
    total, ranks, heads = s.tokens.total, s.mesh.ranks, s.tensors.heads
    if ranks > MAX_RANKS:
        limit = f"at most {MAX_RANKS} ranks in all, and U·R = {ranks}"
        yield InvalidScenario("mesh.ring", s.mesh.ring, limit, [MAX_RANKS // s.mesh.ulysses])
    if heads % s.kv_heads:
        limit = f"must divide the {heads} query heads"
        yield InvalidScenario(
            "tensors.kv_heads", s.kv_heads, limit, near(s.kv_heads, heads, lambda g: heads % g == 0)
        )
    yield from _token_problems(s)
    replicated = s.tokens.replicated
    order = total + replicated.prefix + replicated.suffix + replicated.kv_prefix
    values, dtype = s.tensors.values, s.tensors.dtype
    if isinstance(values, ValueList) and len(values.list) != order:
        limit = f"one value for each of the {order} rows (kv_prefix, prefix, S rows, suffix)"
        yield InvalidScenario("tensors.values.list", len(values.list), limit, [order])
    largest = max(map(abs, values.list)) if isinstance(values, ValueList) else 0
    if largest > LARGEST[dtype]:
        limit = f"numbers up to {LARGEST[dtype]:g} either way in {dtype}"
        yield InvalidScenario("tensors.values.list", largest, limit, [LARGEST[dtype]])
    if values == "ramp" and order > LARGEST[dtype]:
        limit = f"ramp counts {order} rows, and {dtype} ends at {LARGEST[dtype]:g}"
        yield InvalidScenario("tensors.dtype", dtype, limit, ["float32", "bfloat16"])
    for n, mask in enumerate(s.attention.mask):
        place = f"[{n}]" if len(s.attention.mask) > 1 else ""
        yield from _mask_problems(s, mask, f"attention.mask{place}")


def _token_problems(s: Scenario) -> Iterator[InvalidScenario]:
    tokens, total, ranks = s.tokens, s.tokens.total, s.mesh.ranks
    if isinstance(tokens.shards, tuple):
        if len(tokens.shards) != ranks:
            limit = f"needs one entry per position, P = U·R = {ranks}, and has {len(tokens.shards)}"
            yield InvalidScenario("tokens.shards", list(tokens.shards), limit, ["auto"])
        elif sum(tokens.shards) != total:
            limit = f"must add up to S = {total}, and adds up to {sum(tokens.shards)}"
            nearest = [adding_up(tokens.shards, total)]
            yield InvalidScenario("tokens.shards", list(tokens.shards), limit, nearest)
    elif tokens.shards == "even" and total % ranks:
        limit = f"even shards need S % P == 0, and {total} % {ranks} = {total % ranks}"
        nearest = near(total, MAX_TOKENS, lambda n: n % ranks == 0)
        yield InvalidScenario("tokens.total", total, limit + "; use shards: auto", nearest)
    if tokens.documents and sum(tokens.documents) != total:
        limit = f"must add up to S = {total}, and adds up to {sum(tokens.documents)}"
        nearest = [adding_up(tokens.documents, total)]
        yield InvalidScenario("tokens.documents", list(tokens.documents), limit, nearest)
    if tokens.layout != "contiguous":
        if tokens.shards != "even":
            limit = f"the {tokens.layout} layout needs shards: even"
            given = tokens.shards if tokens.shards == "auto" else list(tokens.shards)
            yield InvalidScenario("tokens.shards", given, limit, ["even"])
        step = 2 * ranks if tokens.layout == "zigzag" else ranks
        if total % step:
            limit = f"the {tokens.layout} layout needs S % {step} == 0 (P = {ranks})"
            nearest = near(total, MAX_TOKENS, lambda n: n % step == 0)
            yield InvalidScenario("tokens.total", total, limit, nearest)


def _mask_problems(s: Scenario, mask: MaskSpec, at: str) -> Iterator[InvalidScenario]:
    total, batch = s.tokens.total, s.tensors.batch
    if isinstance(mask, KeyMask):
        valid, holes = mask.key.valid, mask.key.holes
        if len(valid) not in (1, batch):
            limit = f"one length, or one for each of the {batch} batch rows"
            yield InvalidScenario(f"{at}.key.valid", list(valid), limit, [[valid[0]]])
        for length in valid:
            if length > total:
                yield InvalidScenario(f"{at}.key.valid", length, f"at most S = {total}", [total])
        end = 0
        for start, stop in sorted(holes):
            if stop <= start or stop > total:
                limit = f"half-open [a, b) with a < b <= S = {total}"
                yield InvalidScenario(f"{at}.key.holes", [start, stop], limit)
            if start < end:
                limit = f"overlaps the hole before it, which ends at {end}"
                yield InvalidScenario(f"{at}.key.holes", [start, stop], limit)
            end = stop
    elif isinstance(mask, TailPad) and mask.tail_pad.start > total:
        limit = f"at most S = {total}"
        yield InvalidScenario(f"{at}.tail_pad.start", mask.tail_pad.start, limit, [total])
    elif isinstance(mask, GapPad):
        gap = mask.gap_pad
        if not gap.start <= gap.end <= total:
            limit = f"half-open [start, end) with start <= end <= S = {total}"
            start = min(gap.start, total)
            nearest = [{"start": start, "end": max(start, min(gap.end, total))}]
            yield InvalidScenario(f"{at}.gap_pad", gap.model_dump(), limit, nearest)
    elif isinstance(mask, PrefixLM) and mask.prefix_lm.prefix > total:
        limit = f"at most S = {total}"
        yield InvalidScenario(f"{at}.prefix_lm.prefix", mask.prefix_lm.prefix, limit, [total])


def json_schema() -> dict[str, Any]:
    """The published JSON Schema of a scenario file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Scenario.model_json_schema(mode="validation"),
    }
