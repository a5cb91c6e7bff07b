"""The command line's root: its commands, its help and the way its errors read."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hf_cachegen.cli import ask, bench, inspect, make, plan, transfer
from hf_cachegen.cli.options import ManyValuesCommand
from hf_cachegen.cli.output import report_error, report_interrupt
from hf_cachegen.cli.simulate import simulate
from hf_cachegen.errors import CacheGenError

USER_ERROR = 2
INTERRUPTED = 130

# typer brings its own click in newer versions, so the class has no one name to import it by.
_UsageError: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

_HELP = """Publish, fetch and stream compressed KV caches: encode a long context once, and every
later question about it starts from a small stream instead of a long prefill.

Example, with a model folder or a Hub id in the place of MODEL:

\b
  hf-cachegen encode MODEL --text contract.txt -o contract-kv
  hf-cachegen push contract-kv me/contract-kv
  hf-cachegen generate MODEL me/contract-kv --question "Who signed it?"
"""


class _Group(TyperGroup):
    """Says a user's mistakes in one line on stderr."""

    def main(self, *args: Any, **options: Any) -> Any:
        standalone = options.get("standalone_mode", True)
        try:
            status = super().main(*args, **{**options, "standalone_mode": False})
        except _UsageError as error:
            report_error(error.format_message())
            status = USER_ERROR
        except typer.Abort:
            report_interrupt()
            status = INTERRUPTED
        if standalone:
            sys.exit(status)
        return status

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (CacheGenError, ValueError, OSError) as error:
            if ctx.params["debug"]:
                raise
            report_error(str(error) or type(error).__name__)
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt:  # which typer would end without a word
            report_interrupt()
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Group,
    help=_HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; before the command.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


for _command in (
    make.encode,
    make.profile,
    inspect.info,
    inspect.verify,
    transfer.push,
    transfer.fetch,
    ask.generate,
    plan.plan,
    simulate,
):
    app.command(cls=ManyValuesCommand)(_command)
app.add_typer(bench.app, name="bench")
