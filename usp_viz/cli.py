"""The command line: ``usp-viz`` = ``python -m usp_viz``. Results on stdout, the rest on stderr.

Nothing heavy is imported before a command needs it: ``--help`` and ``check`` must answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from usp_viz.errors import InvalidScenario, MissingRequirement, RunCancelled, printable

if TYPE_CHECKING:
    from usp_viz.scenario import Scenario

WORST_FIRST = (5, 4, 2, 1, 3, 0)
"""Exit codes of several runs: the first of these that occurred."""

MAX_JSON_SPANS = 5_000_000
"""Spans in a trace's JSON, about 100 MB: a striped row is a span of its own."""

Handler = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    out: Any = sys.stdout
    if out is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif hasattr(out, "reconfigure"):
        out.reconfigure(errors="replace")  # a terminal without · and ✓ shows the rest
    arguments = _parser().parse_args(argv)
    handler: Handler = arguments.handler
    try:
        code = handler(arguments)
        sys.stdout.flush()
        return code
    except InvalidScenario as error:
        return _fail(f"invalid: {error}", 2)
    except MissingRequirement as error:
        return _fail(f"missing: {error}", 4)
    except (KeyboardInterrupt, RunCancelled):
        return _fail("interrupted", 130)
    except BrokenPipeError:  # the reader went away, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RuntimeError) as error:  # a full disk, no more processes, a lost fork server
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.close()  # what cannot be written is not tried again at exit
        return _fail(f"failed: {type(error).__name__}: {error}", 5)


def worst(codes: Sequence[int]) -> int:
    """The exit code for several runs."""
    return next((code for code in WORST_FIRST if code in codes), 0)


# -- commands ----------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    codes: list[int] = []
    for source in arguments.files:
        for scenario in _each(source, arguments):
            codes.append(_run_one(source, scenario, arguments))
    return worst(codes)


def _run_one(source: str, scenario: Scenario | InvalidScenario, arguments: Any) -> int:
    from usp_viz.runtime.result import failed_json, invalid_json, missing_json
    from usp_viz.runtime.verify import run

    asked = None if isinstance(scenario, InvalidScenario) else scenario
    try:
        if isinstance(scenario, InvalidScenario):
            raise scenario
        if not arguments.json and sys.stderr.isatty():
            print(f"running {scenario.name} on {scenario.mesh.ranks} ranks …", file=sys.stderr)
        result = run(scenario)
    except InvalidScenario as error:
        if arguments.json:
            _print_json(invalid_json(error, asked))
        return _invalid(source, error)
    except (RunCancelled, BrokenPipeError):
        raise
    except MissingRequirement as error:
        if arguments.json:
            _print_json(missing_json(error, asked))
        _complain(f"{source}: missing: {error}")
        return 4
    except (OSError, RuntimeError) as error:
        if arguments.json:
            _print_json(failed_json(error, "run it again", asked))
        _complain(f"{source}: failed: {type(error).__name__}: {error}")
        return 5
    if arguments.json:
        _print_json(result.to_json())
    else:
        from usp_viz.views.verdict import run_text

        print(_styled(run_text(result, source)) + "\n")
    if result.expectation_met is False and scenario.expect is not None:
        wanted = scenario.expect.error or scenario.expect.outcome
        _complain(f"{source}: expected {wanted}, got {result.outcome}")
    return result.exit_code


def _check(arguments: argparse.Namespace) -> int:
    from usp_viz.checking import check
    from usp_viz.views.verdict import error_text, headline

    codes: list[int] = []
    for source in arguments.files:
        for scenario in _each(source, arguments):
            if isinstance(scenario, InvalidScenario):
                if arguments.json:
                    from usp_viz.runtime.result import invalid_json

                    _print_json(invalid_json(scenario) | {"predicted": "invalid"})
                codes.append(_invalid(source, scenario))
                continue
            found = check(scenario)
            codes.append(3 if found["predicted"] == "refused" else 0)
            if arguments.json:
                _print_json(found)
                continue
            error = found["error"]
            print(headline(scenario))
            print(f"predicted {found['predicted']}")
            if error:
                print(f"  {error['class']}: {error['message']}")
                print("\n".join(f"  {line}" for line in error_text(error, source)))
            for warning in found["warnings"]:
                print(f"  warning   {warning['text']}")
            if scenario.policy == "extended":
                under = check(scenario.set({"policy": "sglang"}))["predicted"]
                print(f"  sglang {scenario.release} would give: {under} (--policy sglang says why)")
            print()
    return worst(codes)


def _simulate(arguments: argparse.Namespace) -> int:
    from usp_viz.plan import simulate

    for scenario in _each(arguments.file, arguments):
        if isinstance(scenario, InvalidScenario):
            raise scenario
        trace = simulate(scenario)
        if arguments.json:
            if trace.spans(MAX_JSON_SPANS) > MAX_JSON_SPANS:
                limit = f"its JSON would list over {MAX_JSON_SPANS:,} spans of rows"
                raise InvalidScenario("tokens.total", scenario.tokens.total, limit)
            print(trace.json_text())
            continue
        from usp_viz.views.text import frames_text, summary_text

        parts = (
            frames_text(trace, scenario) if arguments.frames else [summary_text(trace, scenario)]
        )
        for part in parts:
            print(part)
        if any(event.op == "raise" for event in trace.step(trace.steps - 1)):
            again = f"usp-viz simulate {arguments.file} --frames --policy extended"
            print(f"it ends in a raise; what would move otherwise: {again}", file=sys.stderr)
    return 0


def _scenarios(arguments: argparse.Namespace) -> int:
    from usp_viz.loading import bundled
    from usp_viz.scenario import Scenario
    from usp_viz.scenario_errors import closest

    if arguments.name:
        known = bundled()
        if arguments.name not in known:
            limit = f"one of {', '.join(known)}"
            raise InvalidScenario(
                "NAME", arguments.name, limit, closest(arguments.name, list(known))
            )
        print(known[arguments.name].read_text("utf-8"), end="")
        return 0
    loaded = [Scenario.load(name) for name in bundled()]
    if arguments.json:
        _print_json([s.normalised() for s in loaded])
    else:
        width = max((len(s.name) for s in loaded), default=0)
        for s in loaded:
            expected = f"  [{s.expect.error or s.expect.outcome}]" if s.expect else ""
            print(f"{s.name:<{width}}  {s.title}{expected}")
        hint = "usp-viz scenarios NAME prints one as a file, to start your own from"
        print(hint, file=sys.stderr)
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    from usp_viz.schemas import schemas

    print(json.dumps(schemas()[arguments.which], indent=2, ensure_ascii=False))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from usp_viz.runtime.doctor import examine

    findings = examine()
    if arguments.json:
        _print_json([finding.to_json() for finding in findings])
    else:
        for finding in findings:
            print(f"{'✓' if finding.ok else '–'} {finding.name:<16} {finding.text}")
    return 0 if all(finding.ok for finding in findings if finding.needed) else 4


def _ui(arguments: argparse.Namespace) -> int:
    from usp_viz.ui.serve import serve

    serve(port=arguments.port, host=arguments.host)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.what == "page":
        from usp_viz.bench.page import bench_page as bench
    else:
        from usp_viz.bench.spine import bench_spine as bench

    report = bench(quick=arguments.quick)
    _print_json(report.to_json()) if arguments.json else print(report.text())
    return 0


# -- scenarios from arguments --------------------------------------------------------------------


def _each(source: str, arguments: argparse.Namespace) -> Iterator[Scenario | InvalidScenario]:
    """The scenarios that one FILE argument asks for; an invalid one comes as its error."""
    try:
        scenario = _load(source, arguments)
    except InvalidScenario as error:
        yield error
        return
    if arguments.policy != "all":
        yield scenario
        return
    from usp_viz.scenario import POLICIES

    for policy in POLICIES:
        yield scenario.set({"policy": policy, "expect": None})


def _load(source: str, arguments: argparse.Namespace) -> Scenario:
    from usp_viz.loading import parse_sets
    from usp_viz.scenario import Scenario

    sets = parse_sets(arguments.set or ())
    named = {
        "policy": arguments.policy if arguments.policy != "all" else None,
        "release": arguments.release,
        "engine": getattr(arguments, "engine", None),
    }
    sets |= {key: value for key, value in named.items() if value is not None}
    return Scenario.load(source, sets)


# -- output --------------------------------------------------------------------------------------


def _print_json(data: Any) -> None:
    print(json.dumps(data, allow_nan=False), flush=True)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()  # where both end in one file, in the order in which they were said
    print(f"usp-viz: {printable(text)}", file=sys.stderr)


def _invalid(source: str, error: InvalidScenario) -> int:
    """Say so; an error without a key is the file's, and names it."""
    _complain(f"{source}: invalid: {error}" if error.key else f"invalid: {error}")
    return 2


def _fail(text: str, code: int) -> int:
    _complain(text)
    return code


def _styled(text: str) -> str:
    """Bold headline and coloured verdict on a terminal, plain text elsewhere."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    head, verdict, *rest = text.split("\n")
    colour = {"✓": "32", "✗": "31", "⊘": "33"}.get(verdict[:1], "35")
    return "\n".join([f"\x1b[1m{head}\x1b[0m", f"\x1b[{colour}m{verdict}\x1b[0m", *rest])


# -- arguments -----------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Bad usage is exit 2, in one line."""
        self.exit(2, f"usp-viz: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="usp-viz",
        description="See, run and check unified sequence parallelism (Ulysses x ring attention).",
        epilog="FILE is a scenario file, - for standard input, or a bundled scenario's name. "
        "Exit codes: 0 verified or as expected, 1 wrong, 2 invalid, 3 refused, 4 something is "
        "missing on this machine, 5 crashed or timed out, 130 interrupted.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, handler: Handler, text: str, as_json: bool = True) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(handler=handler)
        if as_json:
            sub.add_argument("--json", action="store_true", help="print JSON, one object a line")
        return sub

    def asks(sub: Any, engine: bool = False) -> None:
        sub.add_argument("--policy", metavar="P", help="sglang, unguarded, extended or all")
        sub.add_argument(
            "--release",
            metavar="R",
            help="the sglang release whose rules apply: 0132848349 (a commit, the default), or "
            "0.5.16 to 0.5.23",
        )
        if engine:
            sub.add_argument("--engine", metavar="E", help="who runs it (default: builtin)")
        sub.add_argument(
            "--set", action="append", metavar="KEY=VALUE", help="change a key, e.g. mesh.ring=2"
        )

    sub = command("run", _run, "run scenarios on real ranks and judge the outputs")
    sub.add_argument("files", nargs="+", metavar="FILE")
    asks(sub, engine=True)
    sub = command("check", _check, "predict what a release does, without running anything")
    sub.add_argument("files", nargs="+", metavar="FILE")
    asks(sub)
    sub = command("simulate", _simulate, "what moves where, step by step, without running anything")
    sub.add_argument("file", metavar="FILE")
    sub.add_argument("--frames", action="store_true", help="print every step as text")
    asks(sub)
    sub = command("scenarios", _scenarios, "list the bundled scenarios, or print one")
    sub.add_argument("name", nargs="?", metavar="NAME", help="print this one as a file")
    sub = command("schema", _schema, "print the JSON Schema of a format", as_json=False)
    sub.add_argument(
        "which", nargs="?", default="scenario", choices=("scenario", "trace", "result")
    )
    command("doctor", _doctor, "say what this machine has and lacks")
    sub = command("ui", _ui, "serve the page on this machine", as_json=False)
    sub.add_argument("--port", type=int, default=7860, help="0 picks a free one (default: 7860)")
    sub.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    sub = command("bench", _bench, "measure this machine: medians and ratios")
    sub.add_argument("what", choices=("spine", "page"))
    sub.add_argument("--quick", action="store_true", help="small sizes, for a first look")
    return parser
