"""Files that nobody should trust: each is read, or refused in one line that says why."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from usp_viz import loading
from usp_viz.cli import main
from usp_viz.errors import InvalidScenario
from usp_viz.loading import parse_mapping, parse_sets, parse_value, read_mapping, set_dotted
from usp_viz.runtime.pool import RankPool
from usp_viz.scenario import Scenario


def why(text: str) -> str:
    """How this text is refused."""
    with pytest.raises(InvalidScenario) as caught:
        Scenario.parse(parse_mapping(text))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 400
    return message


# -- what the text may not hold ----------------------------------------------------------------

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LAUGHS, "line 2: YAML aliases (*name) are not accepted"),
        ("mesh: &x {ring: 2}\ntokens: *x", "line 2: YAML aliases"),
        ("mesh: &x {ring: *x}", "line 1: YAML aliases"),
        ("&x mesh: {ring: 2}\n*x : 3", "line 2: YAML aliases"),
        ("base: &b {ring: 2}\nmesh: {<<: *b}", "line 2: YAML aliases"),
        ("mesh: {<<: {ring: 2}}", "mesh.'<<': {'ring': 2} — unknown key"),
        ("mesh: !!python/object/apply:os.system ['true']", "line 1: YAML tags"),
        ("mesh: !!python/name:os.system", "line 1: YAML tags"),
        ("mesh: !!map {ring: 2}", "line 1: YAML tags"),
        ("title: !!binary aGk=", "line 1: YAML tags"),
        ("mesh: {ring: ! 2}", "line 1: YAML tags"),
        ("attention: {causal: !!bool maybe}", "line 1: YAML tags"),
        ("mesh: !!timestamp x", "line 1: YAML tags"),
        ("mesh: {ring: 1}\nmesh: {ring: 2}", "the key 'mesh' stands there twice"),
        ("mesh: {ring: 1, ring: 2}", "the key 'ring' stands there twice"),
        ('{"mesh": {"ring": 1, "ring": 2}}', "the key 'ring' stands there twice"),
        ("mesh: {3: 4}", "keys are words; this one is 3"),
        ("mesh: {null: 4}", "keys are words; this one is None"),
        ("? [a, b]\n: 3", "keys are words; this one is ['a', 'b']"),
        ("? {a: b}\n: 3", "keys are words; this one is {'a': 'b'}"),
        ("mesh: {ring: 1}\n---\nmesh: {ring: 2}", "line 2: a second document"),
        ("", "empty; a scenario is a mapping of keys"),
        ("# nothing but a comment", "empty; a scenario is a mapping of keys"),
        ("---\n", "empty; a scenario is a mapping of keys"),
        ("null", "empty; a scenario is a mapping of keys"),
        ("- mesh", "a scenario is a mapping of keys; this is a list"),
        ("[1]", "a scenario is a mapping of keys; this is a list"),
        ("varlen-ring", "a scenario is a mapping of keys; this is only 'varlen-ring'"),
        ("mesh:\n\tring: 2", "a tab, where only spaces indent at line 2, column 1"),
        ("mesh: {ring: 2", "not YAML or JSON: did not find expected ',' or '}'"),
        ("mesh: ring: 2", "not YAML or JSON: mapping values are not allowed"),
        ('mesh: "x', "not YAML or JSON: found unexpected end of stream"),
        ("mesh: @x", "not YAML or JSON: found character that cannot start any token"),
        ('{"mesh" {}}', "not YAML or JSON"),
        ('title: "\\ud800"', "not YAML or JSON: found invalid Unicode character"),
        ('{"title": "\\ud800"}', "title: '\\ud800' — expected Unicode text"),
        ('{"run": {"timeout_s": NaN}}', "expected a finite number"),
        ('{"run": {"timeout_s": Infinity}}', "must be <= 3600"),
        ('{"run": {"timeout_s": 1e999}}', "must be <= 3600"),
        ("mesh: {ring: " + "9" * 5000 + "}", "a number of 5,000 digits; 100 is most"),
        ('{"mesh": {"ring": ' + "9" * 5000 + "}}", "a number of 5,000 digits; 100 is most"),
        ("mesh: {ring: " + "1:" * 5000 + "1}", "expected an integer, got text"),
    ],
    ids=lambda text: text[:40],
)
def test_text_that_is_no_scenario(text: str, reason: str) -> None:
    assert reason in why(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10**6,
        "a: " + "[" * 500_000,
        "{a: " * 200_000,
        '{"a":' * 190_000,
        "- " * 490_000,
        "? " * 490_000,
        "".join(" " * n + "a:\n" for n in range(1300)),
        '{"a":' + "[" * 400_000 + "]" * 400_000 + "}",
        "a: " + "[" * 40 + "]" * 40,
    ],
    ids=lambda text: text[:12],
)
def test_absurd_nesting_is_refused_without_following_it(text: str) -> None:
    assert "nested too deeply" in why(text) or "maximum nesting depth" in why(text)


@pytest.mark.parametrize(
    "text",
    [
        "a: [" + "1," * 490_000 + "]",
        '{"a": [' + "1," * 490_000 + "1]}",
        "- 1\n" * 240_000,
        "".join(f"k{n}: &{n} 1\n" for n in range(51_000)),
    ],
    ids=lambda text: text[:12],
)
def test_too_many_values_are_refused(text: str) -> None:
    assert "over 100,000 values" in why(text)


def test_reading_stops_at_the_first_value_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows is never looked at: here, a syntax error."""
    monkeypatch.setattr(loading, "MAX_NODES", 10)
    assert "over 10 values" in why("a: [" + "1, " * 20 + "]\n]}{ nonsense")


# -- how the same thing may be written -----------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "mesh: {ring: 2}",
        "mesh:\n  ring: 2\n",
        "mesh:\r\n  ring: 2\r\n",
        "\ufeffmesh: {ring: 2}",
        "\n\n# why\nmesh: {ring:\t2} # two\n...\n",
        "%YAML 1.1\n---\nmesh: {ring: 2}",
        '{"mesh": {"ring": 2}}',
        '  {"mesh":\n\t{"ring": 2}}',
        "{mesh: {ring: 2}}",
        '{"mesh": {"ring": 2},}',
        "'mesh': {\"ring\": +2}",
        "mesh: &anchor {ring: 2}",
    ],
)
def test_yaml_and_json_of_all_sorts_are_read(text: str) -> None:
    assert parse_mapping(text) == {"mesh": {"ring": 2}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("off", "off"),
        ("12", 12),
        ("-3", -3),
        ("012", "012"),
        ("0132848349", "0132848349"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("0.5.23", "0.5.23"),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1e-3", 0.001),
        ("-1.5E+3", -1500.0),
        (".inf", float("inf")),
        ("'12'", "12"),
        ('"12"', "12"),
        ('"\\u00e9\\ud83d\\ude00"', "é😀"),
        ("[1, a, {b: 2}]", [1, "a", {"b": 2}]),
        ("|\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_plain_values_mean_what_json_would_mean(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value and type(found) is type(value)


# -- files -------------------------------------------------------------------------------------


def bad_files(folder: Path) -> list[tuple[str, str]]:
    """(argument, what the message says) of everything that is no scenario file."""

    def made(name: str, content: bytes) -> str:
        (folder / name).write_bytes(content)
        return str(folder / name)

    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "gone").symlink_to(folder / "nowhere")
    with (folder / "huge.yaml").open("wb") as huge:
        huge.truncate(100 * 2**20)  # 100 MB of zeros, none of them on disk
    return [
        (str(folder), "a directory, not a scenario file"),
        (str(folder / "fifo"), "not a regular file; for a pipe, use -"),
        (str(folder / "loop"), "no such file"),
        (str(folder / "gone"), "no such file"),
        ("/dev/zero", "not a regular file"),
        (str(folder / "huge.yaml"), "over 1,000,000 bytes; a scenario is small"),
        (made("big.yaml", b"# " + b"x" * 1_000_000), "over 1,000,000 bytes"),
        (made("png.yaml", b"\x89PNG\r\n\x1a\n\x00\x00"), "not UTF-8 text"),
        (made("latin.yaml", "title: café".encode("latin-1")), "not UTF-8 text"),
        (made("utf16.yaml", "mesh: {ring: 2}".encode("utf-16")), "not UTF-8 text"),
        (made("nul.yaml", b"mesh: {ring: 2}\x00"), "holds control characters; is it binary?"),
        (made("esc.yaml", b"title: \x1b[31m"), "holds control characters; is it binary?"),
        (made("empty.yaml", b""), "empty"),
        (made("list.yaml", b"- 1"), "this is a list"),
        (made("a\nb.yaml", b""), "a\\nb.yaml': empty"),
        (str(folder / "nope.yaml"), "no such file, nor a bundled scenario"),
        (str(folder / "list.yaml" / "below"), "no such file"),
        ("varlen-rng", "no such file, nor a bundled scenario (usp-viz scenarios lists them)"),
        ("", "no such file"),
        ("a\0b", "no such file"),
        ("x" * 5000, "File name too long"),
        ("../../etc/passwd\x1b[2J", "no such file"),
    ]


def test_files_that_are_no_scenario(tmp_path: Path) -> None:
    for source, reason in bad_files(tmp_path):
        with pytest.raises(InvalidScenario) as caught:
            read_mapping(source)
        message = str(caught.value)
        assert reason in message, source[:60]
        assert message.isprintable() and len(message) < 400
        if 0 < len(source) < 100 and source.isprintable():
            assert source in message


def test_no_command_starts_a_rank_for_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a pool was asked to run")

    monkeypatch.setattr(RankPool, "run", started)
    for command in ("check", "run"):
        (tmp_path / command).mkdir()
        for source, reason in bad_files(tmp_path / command):
            assert main([command, "--", source]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.count("\n") == 1 and err.startswith("usp-viz: "), err
            assert reason in err
            assert main([command, "--json", "--", source]) == 2
            out, err = capsys.readouterr()
            assert out.count("\n") == 1
            assert json.loads(out)["error"]["class"] == "InvalidScenario"


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for the system's refusal: root may read everything."""
    (tmp_path / "secret.yaml").write_text("mesh: {ring: 2}")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(InvalidScenario, match=r"secret\.yaml: Permission denied"):
        read_mapping(str(tmp_path / "secret.yaml"))


def test_a_file_wins_over_a_bundled_name_but_a_folder_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "varlen-ring").mkdir()
    assert read_mapping("varlen-ring")["name"] == "varlen-ring"
    (tmp_path / "dense-2x2").write_text("name: mine")
    assert read_mapping("dense-2x2") == {"name": "mine"}
    assert read_mapping("seven-tokens")["name"] == "seven-tokens"


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def feed(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    feed(b"mesh: {ring: 2}")
    assert read_mapping("-") == {"mesh": {"ring": 2}}
    for content, reason in (
        (b"", "-: empty"),
        (b"\xff\xfe", "-: not UTF-8 text"),
        (b"x" * 1_000_001, "-: over 1,000,000 bytes"),
    ):
        feed(content)
        with pytest.raises(InvalidScenario, match=reason):
            read_mapping("-")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InvalidScenario, match="-: empty"):
        read_mapping("-")


def test_endless_standard_input_is_not_read_to_its_end() -> None:
    with Path("/dev/zero").open("rb") as endless:
        ended = subprocess.run(
            [sys.executable, "-m", "usp_viz", "check", "-"],
            stdin=endless,
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 2 and ended.stdout == ""
    assert "-: over 1,000,000 bytes" in ended.stderr and ended.stderr.count("\n") == 1


# -- --set -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("mesh.ring", "--set: 'mesh.ring' — expected a dotted key and a value"),
        ("", "--set: '' — expected a dotted key and a value"),
        ("=2", "--set: '=2' — expected"),
        ("mesh..ring=2", "--set: 'mesh..ring=2' — expected"),
        (".ring=2", "--set: '.ring=2' — expected"),
        ("mesh.ring.=2", "--set: 'mesh.ring.=2' — expected"),
        ("mesh ring=2", "--set: 'mesh ring=2' — expected"),
        ("mesh[ring]=2", "--set: 'mesh[ring]=2' — expected"),
        ("\0=2", "--set: '\\x00=2' — expected"),
        ("mesh.ring=[1,", "--set mesh.ring: '[1,' — not YAML or JSON"),
        ("mesh.ring={a: 1, a: 2}", "--set mesh.ring: '{a: 1, a: 2}' — the key 'a' stands there"),
        ("mesh.ring=*x", "--set mesh.ring: '*x' — line 1: YAML aliases"),
        ("mesh.ring=!!python/name:os.system", "line 1: YAML tags"),
        ("mesh.ring=\0", "--set mesh.ring: '\\x00' — not YAML or JSON"),
        ("mesh.ring=" + "9" * 5000, "a number of 5,000 digits"),
        ("mesh.ring=", "mesh.ring: None — expected an integer, got null"),
        ("mesh.ring=2=3", "mesh.ring: '2=3' — expected an integer, got text"),
        ("mesh.rng=2", "mesh.rng: 2 — unknown key"),
        ("mesh.ring.x=2", "mesh.ring.x: 2 — ring is 2, not a mapping: set ring itself"),
        (
            "engine=os:system",
            "engine: 'os:system' — a scenario names an engine, never code to load",
        ),
    ],
)
def test_malformed_pairs(pair: str, message: str) -> None:
    with pytest.raises(InvalidScenario) as caught:
        Scenario.load("dense-2x2", parse_sets([pair]))
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_pairs_change_what_they_name_and_nothing_else() -> None:
    data = {"mesh": {"ring": 2}, "tokens": {"total": 48}}
    changed = set_dotted(data, parse_sets(["mesh.ring=4", "mesh.ulysses=2", " policy = sglang"]))
    assert changed == {
        "mesh": {"ring": 4, "ulysses": 2},
        "tokens": {"total": 48},
        "policy": "sglang",
    }
    assert data == {"mesh": {"ring": 2}, "tokens": {"total": 48}}


def test_the_last_of_equal_pairs_holds() -> None:
    assert parse_sets(["mesh.ring=2", "mesh.ring=4"]) == {"mesh.ring": 4}


def test_a_mask_is_set_whole_or_in_part() -> None:
    base = Scenario.parse({"attention": {"mask": {"window": {"left": 1}}}})
    part = base.set(parse_sets(["attention.mask.window.right=2"]))
    assert part.normalised()["attention"]["mask"] == {"window": {"left": 1, "right": 2}}
    whole = base.set(parse_sets(["attention.mask={prefix_lm: {prefix: 8}}"]))
    assert whole.normalised()["attention"]["mask"] == {"prefix_lm": {"prefix": 8}}
