"""The command `carbon-compile`: lint, explain, coverage, diff, env, demo, bench.

Nothing but the result goes to standard output. Exit codes: 0 clean, 1 findings (or a difference),
2 could not do it. torch is imported only by the subcommands that need it.
"""

import argparse
import difflib
import os
import sys
import traceback
from pathlib import Path

from carbon_compile import __version__

CLEAN, FINDINGS, FAILED = 0, 1, 2


class Failure(Exception):
    """Ends the command with one line and exit code 2."""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line, with the nearest word where there is one."""

    def error(self, message):
        words = [word for action in self._actions for word in (*action.option_strings, *(action.choices or ()))]
        wrong = message.rpartition(": ")[2].split()[0] if message.startswith("unrecognized") else ""
        if "invalid choice: " in message:
            wrong = message.partition("invalid choice: ")[2].partition("'")[2].partition("'")[0]
        near = difflib.get_close_matches(wrong.partition("=")[0], [str(word) for word in words], 1) if wrong else []
        hint = f"; did you mean {near[0]}?" if near else ""
        self.exit(FAILED, f"{self.prog}: {message}{hint}\n")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code. SystemExit(2) for a wrong command line."""
    arguments = _parse(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except Failure as failure:
        print(f"carbon-compile {arguments.command}: {failure}", file=sys.stderr)
        if arguments.verbose and failure.__cause__ is not None:
            traceback.print_exception(failure.__cause__)
        return FAILED
    except BrokenPipeError:
        # The reader (`head`) has what it wanted; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN


def _parse(argv):
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        # argparse would blame the main parser, which doesn't know the subcommand's options.
        parser.commands[arguments.command].error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def _parser():
    parser = _Parser(prog="carbon-compile", description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"carbon-compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    parser.commands = commands.choices

    def command(name, run, help):
        sub = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=run)
        sub.add_argument("-v", "--verbose", action="store_true", help="show the traceback behind an error")
        return sub

    _add_lint(command("lint", run_lint, "report what would break the promise, without running the model"))
    explain = command("explain", run_explain, "print the page of a diagnostic code")
    explain.add_argument("code", nargs="?", help="a code or its name; without it, all codes are listed")
    _add_coverage(command("coverage", run_coverage, "list every operator with its verdict and contract section"))
    _add_diff(command("diff", run_diff, "compare two certificates, ledgers or checkpoints, and replay the step where two runs part"))
    command("env", run_env, "print versions and settings, to paste into a bug report")
    _add_demo(command("demo", run_demo, "train a small transformer and compare its weight hash with the recorded one"))
    _add_bench(command("bench", run_bench, "measure carbon beside stock PyTorch, bits first; in a checkout"))
    return parser


# --- lint


def _add_lint(sub):
    sub.add_argument("targets", nargs="+", metavar="TARGET", help="a file or folder, or package.module:make, where make() returns (module or function, inputs)")
    sub.add_argument("--format", choices=("text", "json", "sarif", "github"), default="text")
    sub.add_argument("--output", metavar="FILE", help="write the report there and nothing to standard output")
    sub.add_argument("--select", action="append", default=[], metavar="CODES", help="report only these: CB101, CB1, graph-break")
    sub.add_argument("--ignore", action="append", default=[], metavar="CODES", help="don't report these")
    sub.add_argument("--allow", action="append", default=[], metavar="CODES", help="report these as allowed")
    sub.add_argument("--exit-zero", action="store_true", help="exit 0 in spite of findings")
    sub.add_argument("--statistics", action="store_true", help="count findings by code")
    sub.add_argument("--backward", action=argparse.BooleanOptionalAction, default=None, help="judge the backward too (default: where something requires a gradient)")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="judge as if on this device; needs none")


def run_lint(arguments) -> int:
    from carbon_compile.diagnostics import Policy, Report

    try:
        policy = Policy(allow=frozenset(_split(arguments.allow)))
        Report().select(_split(arguments.select), _split(arguments.ignore))
    except ValueError as error:
        raise Failure(str(error)) from error
    if arguments.statistics and arguments.format not in ("text", "json"):
        raise Failure(f"--statistics goes with --format text or json, not {arguments.format}")
    report, failures = _lint_targets(arguments, policy)
    report = report.select(_split(arguments.select), _split(arguments.ignore))
    _write(_rendered(report, arguments), arguments.output)
    for failure in failures:
        print(f"carbon-compile lint: {failure}", file=sys.stderr)
    if failures:
        return FAILED
    return CLEAN if report.clean or arguments.exit_zero else FINDINGS


def _split(values):
    return [code.strip() for value in values for code in value.split(",") if code.strip()]


def _lint_targets(arguments, policy):
    from carbon_compile import graph_lint
    from carbon_compile.source_lint import lint_paths

    graphs = [target for target in arguments.targets if graph_lint.is_graph_target(target)]
    paths = [target for target in arguments.targets if target not in graphs]
    for path in paths:
        if not os.path.exists(path):
            raise Failure(f"{path!r} is neither a file, a folder, nor package.module:make")
    report, failures = lint_paths(paths, policy)
    for target in graphs:
        report.extend(_lint_graph(target, arguments, policy))
    return report, failures


def _lint_graph(target, arguments, policy):
    from carbon_compile import graph_lint

    try:
        fn, args = graph_lint.load_target(target)
    except graph_lint.TargetError as error:
        raise Failure(str(error)) from error.__cause__
    try:
        return graph_lint.lint(fn, *args, backward=arguments.backward, device=arguments.device, policy=policy)
    except Exception as error:
        raise Failure(f"{target} can't be analysed: {graph_lint.told(error)} (--verbose for the traceback)") from error


def _rendered(report, arguments):
    from carbon_compile import render

    if arguments.statistics:
        if arguments.format == "json":
            import json

            return json.dumps(report.counts(), indent=2) + "\n"
        return render.statistics(report)
    color = arguments.output is None and _wants_color(sys.stdout)
    return report.render(arguments.format, color=color)


def _wants_color(stream) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _write(text, path):
    if path is None:
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"can't write {path}: {error.strerror}") from error


# --- the others


def run_explain(arguments) -> int:
    from carbon_compile import tables
    from carbon_compile.codes import find_code

    if arguments.code is None:
        sys.stdout.write(tables.codes())
        return CLEAN
    try:
        sys.stdout.write(find_code(arguments.code).page().text)
    except ValueError as error:
        raise Failure(str(error)) from error
    return CLEAN


def _add_coverage(sub):
    sub.add_argument("--format", choices=("text", "markdown", "json"), default="text")
    sub.add_argument("--verdict", choices=("keep", "expand", "template", "decomposed", "refuse"), help="only operators with this verdict")
    sub.add_argument("--output", metavar="FILE", help="write the table there and nothing to standard output")


def run_coverage(arguments) -> int:
    from carbon_compile import tables
    from carbon_compile.lowering import registry

    rows = [row for row in registry.coverage() if arguments.verdict in (None, row["verdict"])]
    _write(tables.coverage(rows, arguments.format), arguments.output)
    return CLEAN


def _add_diff(sub):
    sub.add_argument("a", metavar="A"), sub.add_argument("b", metavar="B")
    sub.add_argument("--replay", metavar="TARGET", help="package.module:make, where make() returns (trainer, batch or function of the step) or (module, inputs): replay the first step that differs, node by node")
    sub.add_argument("--checkpoint", nargs="+", default=[], metavar="FILE", help="the states to replay from: A's and B's, or one for both")
    sub.add_argument("--settings", nargs=2, metavar=("FIRST", "SECOND"), help="how to replay: carbon, stock, carbon:float32_matmul=X2, stock:float32_matmul_precision=high (default: each as its checkpoint says it ran; with one checkpoint or none, carbon stock)")
    sub.add_argument("--step", type=_positive, metavar="N", help="the step to replay, where it isn't the first that differs")
    sub.add_argument("--output", metavar="FOLDER", help="where a reproducer's large inputs are written")


def run_diff(arguments) -> int:
    if not arguments.replay:
        given = next((f"--{name}" for name in ("checkpoint", "settings", "step", "output") if getattr(arguments, name)), None)
        if given:
            raise Failure(f"{given} goes with --replay")
    kind, a, b = _read_both(arguments.a, arguments.b)
    lines = list(_differences(kind, a, b))
    told = lines or ([] if arguments.replay else [_equal(kind, a, b)])
    sys.stdout.write("".join(line + "\n" for line in told))
    if arguments.replay:
        step = arguments.step or _first_step(kind, a, b)
        contents = (a, b) if kind == "checkpoint" and not arguments.checkpoint else _contents(arguments.checkpoint)
        lines = [*lines, *_replayed(arguments, contents, step)]
    return FINDINGS if lines else CLEAN


def _read_both(*paths):
    """(what both files are, their contents)."""
    kinds = [_kind(path) for path in paths]
    if kinds[0] != kinds[1]:
        raise Failure(f"{paths[0]} is a {kinds[0]} and {paths[1]} a {kinds[1]}")
    try:
        return kinds[0], *(_reader(kinds[0])(path) for path in paths)
    except OSError as error:
        raise Failure(f"can't read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise Failure(str(error)) from error


def _kind(path):
    from carbon_compile.ledger_file import is_ledger

    try:
        with open(path, "rb") as file:
            start = file.read(2)
    except OSError as error:
        raise Failure(f"can't read {path}: {error.strerror}") from error
    return "checkpoint" if start == b"PK" else "ledger" if is_ledger(path) else "certificate"


def _reader(kind):
    if kind == "ledger":
        from carbon_compile.ledger_file import read

        return read
    if kind == "checkpoint":
        from carbon_compile.checkpoint import load

        return load
    from carbon_compile.certify import Certificate

    return Certificate.read


def _differences(kind, a, b):
    if kind == "ledger":
        from carbon_compile.ledger_file import differences as differ
    elif kind == "checkpoint":
        from carbon_compile.checkpoint import differing
        from carbon_compile.replay import state_differences

        return list(state_differences(a, b)) or [f"checkpoints: {key} differs" for key in differing(a, b)]
    else:
        from carbon_compile.certificate_diff import diff as differ
    return differ(a, b)


def _equal(kind, a, b):
    """What was found equal: silence could also mean that nothing was compared."""
    from carbon_compile.ledger_file import agreement, counted

    if kind == "ledger":
        return agreement(a, b)
    if kind == "checkpoint":
        from carbon_compile.checkpoint import tensor_count

        return f"equal: after step {a['step']}, {counted(tensor_count(a), 'tensor')}"
    return f"equal: {counted(len(a.data['graphs']), 'graph')}"


def _first_step(kind, a, b):
    if kind != "ledger":
        return a["step"] + 1 if kind == "checkpoint" else None
    from carbon_compile.ledger_file import first_difference

    step = first_difference(a, b)
    if step is None:
        raise Failure("the ledgers agree; say with --step which step to replay")
    return step


def _contents(paths):
    from carbon_compile.replay import ReplayError, read_checkpoint

    if len(paths) > 2:
        raise Failure(f"--checkpoint takes one or two files, not {len(paths)}")
    try:
        found = [read_checkpoint(path) for path in paths] or [None]
    except ReplayError as error:
        raise Failure(str(error)) from error
    return found[0], found[-1]


def _replayed(arguments, contents, step):
    from carbon_compile import replay

    try:
        target = replay.Target.load(arguments.replay)
        settings = tuple(map(replay.Setting.parse, arguments.settings)) if arguments.settings else replay.default_settings(contents)
        made = replay.replay(target, settings, contents, step, arguments.output)
    except ValueError as error:
        raise Failure(str(error)) from error
    sys.stdout.write("".join(line + "\n" for line in made.lines()))
    return made.found


def run_env(arguments) -> int:
    from carbon_compile import environment

    sys.stdout.write(environment.text())
    return CLEAN


def _add_demo(sub):
    sub.add_argument("--device", choices=("cpu", "cuda"), help="where to train (default: cuda where there is one)")
    sub.add_argument("--steps", type=_positive, metavar="N", help="stop after N steps")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")
    sub.add_argument("--certificate", metavar="FILE", help="write the certificate there")
    sub.add_argument("--backend", default="carbon", help=argparse.SUPPRESS)


def _positive(text):
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def run_demo(arguments) -> int:
    from carbon_compile import demo

    return demo.main(arguments)


def _add_bench(sub):
    sub.add_argument("--select", nargs="+", action="extend", default=[], metavar="SUBSTRING", help="only cases with one of these in their name; whole models (e2e) only when selected")
    sub.add_argument("--contenders", nargs="+", action="extend", default=[], metavar="SUBSTRING", help="only these contenders, by name or a part of it that is nobody's name; the bits are checked all the same")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="where to measure (default: cuda where there is one); cases are small on cpu")
    sub.add_argument("--rounds", type=_positive, metavar="N", help="turns of each contender (default: 20, on cpu 5)")
    sub.add_argument("--budget", type=_positive, metavar="SECONDS", help="start no further case after so long")
    sub.add_argument("--csv", metavar="FILE", help="write all rows there, after every case")
    sub.add_argument("--json", action="store_true", help="print the rows as JSON")
    sub.add_argument("--plot", metavar="FILE", help='draw the ratios; needs the extra "plot"')
    sub.add_argument("--list", action="store_true", help="print the names of the cases and measure nothing")
    sub.add_argument("--readme", nargs="+", metavar="CSV", help="measure nothing; put these results between the README's markers")


def run_bench(arguments) -> int:
    bench = _bench()
    try:
        return bench.run(arguments, color=_wants_color(sys.stdout))
    except ValueError as error:
        raise Failure(str(error)) from error


def _bench():
    """The module bench.command of this checkout, which needn't be the directory the command runs in."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "bench" / "command.py").is_file():
        raise Failure("the benchmarks are not part of the installed package: run this in a checkout, installed with pip install -e .")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    from bench import command

    return command


if __name__ == "__main__":
    sys.exit(main())
