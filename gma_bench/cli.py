"""The command line: ``gma-bench list | run | reproduce | report | check``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gma_bench import __version__
from gma_bench.errors import UserError

RUN_EXAMPLES = """\
examples:
  gma-bench run task=listops mixer=gma scale=smoke seed=1
  gma-bench run task=text mixer=gma mixer.num_components=128 model.num_layers=4
  gma-bench run task=text task.source=local task.data_dir=data/imdb
  gma-bench run -m mixer=gma,sdpa seed=0,1,2                      a sweep, one cell after another
  gma-bench run -m mixer=gma,sdpa hydra/launcher=joblib           … two at a time
  gma-bench run -m mixer=gma,sdpa hydra/launcher=submitit_slurm   … on a Slurm cluster
  gma-bench run mixer._target_=my_package.MyMixer                 a mixer of your own
  gma-bench run layer=torch.nn.MultiheadAttention                 a layer of any package as the mixer
  gma-bench run --cfg task=listops                                print the configuration, run nothing
"""
REPRODUCE_EXAMPLES = """\
examples:
  gma-bench reproduce scale=mini
  gma-bench reproduce scale=smoke hydra/launcher=basic            one cell after another
  gma-bench reproduce scale=paper --dry-run                       what it would take, running nothing
  gma-bench reproduce scale=mini --only task=listops,text --only mixer=gma,sdpa
"""
REPORT_EXAMPLES = """\
examples:
  gma-bench report scale=mini
  gma-bench report scale=mini results_dir=/scratch/results
  gma-bench report scale=mini --against other/results
"""
CHECK_EXAMPLES = """\
examples:
  gma-bench check mixer=gma
  gma-bench check mixer._target_=my_package.MyMixer
  gma-bench check layer=torch.nn.MultiheadAttention               a layer of any package
  gma-bench check layer=my_layer.yaml --json                      … called as a file says
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line, without importing what the commands need."""
    top = argparse.ArgumentParser(
        prog="gma-bench", description="A benchmark harness for efficient sequence mixers."
    )
    top.add_argument("--version", action="version", version=f"gma-bench {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, words: str, epilog: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=words, description=words[0].upper() + words[1:] + ".", epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add_argument("overrides", nargs="*", help="Hydra overrides, key=value")
        return command

    listing = add("list", "show tasks, mixers and scales, with parameters and FLOPs of each mixer")
    listing.add_argument("--names", action="store_true", help="names only, at once")
    run = add("run", "run one cell, or a sweep of them", RUN_EXAMPLES)
    run.add_argument(
        "-m", "--multirun", action="store_true", help="sweep over comma-separated values"
    )
    run.add_argument("--cfg", action="store_true", help="print the composed configuration and stop")
    reproduce = add(
        "reproduce", "run the missing cells of the paper's grid, then report", REPRODUCE_EXAMPLES
    )
    reproduce.add_argument(
        "--dry-run", action="store_true", help="compose, build and cost every cell; run none"
    )
    reproduce.add_argument(
        "--only", action="append", metavar="key=a,b", default=[], help="a part of the grid"
    )
    report = add(
        "report", "tables, plots, verdicts and page from the records alone", REPORT_EXAMPLES
    )
    report.add_argument(
        "--against", type=Path, metavar="DIR", help="what changed since this results folder"
    )
    check = add("check", "hold a mixer, or any layer, to the contract", CHECK_EXAMPLES)
    check.add_argument("--json", action="store_true", help="print the results as JSON")
    return top


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options and overrides in any order (argparse alone takes positionals in one stretch only)."""
    top = parser()
    options, rest = top.parse_known_args(arguments)
    options.overrides += [word for word in rest if not word.startswith("-")]
    if unknown := [word for word in rest if word.startswith("-")]:
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0; 1 when a cell or a check failed; 2 for a user's mistake; 130/143 when stopped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no × shows ? and goes on
            stream.reconfigure(errors="replace")
    os.environ["MPLBACKEND"] = "Agg"  # a notebook's backend is not there for its subprocesses
    options = parse(arguments)
    try:
        return COMMANDS[options.command](options)
    except UserError as error:
        print(f"gma-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gma-bench: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except BaseException as error:
        signum = getattr(error, "signum", None)  # training.Stopped, without importing torch
        if signum is None:
            raise
        print(f"gma-bench: {error}; the same command goes on from here", file=sys.stderr)
        return 128 + int(signum)


def run(options: argparse.Namespace) -> int:
    from gma_bench.run.compose import compose
    from gma_bench.run.launch import sweep

    if options.multirun:
        return sweep(options.overrides)
    config = compose(options.overrides)
    if options.cfg:
        from omegaconf import OmegaConf

        print(OmegaConf.to_yaml(config, resolve=True), end="")
        return 0
    from gma_bench.run.execute import is_main_process, report_cell, run_cell, tells_itself

    record = run_cell(options.overrides, keep_failure=False)
    if is_main_process():
        report_cell(record)
    if record["status"] == "failed" and not tells_itself(record["error"]):
        print(record["error"]["traceback"], file=sys.stderr)
    return 0 if record["status"] == "finished" else 1


def reproduce(options: argparse.Namespace) -> int:
    if options.dry_run:
        from gma_bench.run.dry_run import dry_run

        return dry_run(options.overrides, options.only)
    from gma_bench.run.plan import reproduce as run_missing

    return run_missing(options.overrides, options.only)


def report(options: argparse.Namespace) -> int:
    from rich.console import Console

    from gma_bench.report import report as write_report
    from gma_bench.run.compose import compose

    config = compose(options.overrides)
    for word in options.overrides:
        if word.partition("=")[0] not in ("scale", "results_dir"):
            raise UserError(
                f"{word}: a report takes scale=… and results_dir=… only, and shows every record "
                f"there. Try: gma-bench report scale={config.scale.name}"
            )
    write_report(
        Path(config.results_dir), config.scale.name, against=options.against, console=Console()
    )
    return 0


def check(options: argparse.Namespace) -> int:
    from gma_bench.run.compose import compose

    config = compose(options.overrides)
    from gma_bench.mixer.contract import check_config

    return 0 if check_config(config, as_json=options.json) else 1


def show(options: argparse.Namespace) -> int:
    from gma_bench.run import listing

    return listing.show(options.overrides, names_only=options.names)


COMMANDS = {"list": show, "run": run, "reproduce": reproduce, "report": report, "check": check}

if __name__ == "__main__":
    sys.exit(main())
