"""Arguments and options that several commands share, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from hf_cachegen.codec.delta import DeltaConfig


class Dtype(StrEnum):
    """Dtype to load a model in."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class ManyValuesCommand(TyperCommand):
    """Options that may be repeated also take several values at once.

    A shell turns ``--text *.txt`` into ``--text a.txt b.txt``, which here means
    ``--text a.txt --text b.txt``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {
            name
            for parameter in self.params
            if getattr(parameter, "multiple", False)
            for name in parameter.opts
        }
        return super().parse_args(ctx, _repeat_options(args, repeatable))


def _repeat_options(arguments: Iterable[str], repeatable: set[str]) -> list[str]:
    spread: list[str] = []
    option: str | None = None
    for argument in arguments:
        if argument.startswith("-"):
            option = argument if argument in repeatable else None
        elif option is not None and spread[-1] != option:
            spread.append(option)
        spread.append(argument)
    return spread


Model = Annotated[
    str, typer.Argument(help="Model folder, or id on the Hub.", metavar="MODEL", show_default=False)
]
Location = Annotated[
    str,
    typer.Argument(
        metavar="LOCATION",
        help="Folder, URL (https://host/folder) or Hub repository (org/name, org/name@revision).",
        show_default=False,
    ),
]
DtypeOption = Annotated[
    Dtype, typer.Option("--dtype", help="Dtype of the model; auto: as it was saved.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the Hub repository.")]
Token = Annotated[
    str | None,
    typer.Option(help="Access token; by default the one of `hf auth login` or HF_TOKEN."),
]
Endpoint = Annotated[str | None, typer.Option(help="URL of another Hub; by default HF_ENDPOINT.")]
ModelId = Annotated[
    str | None,
    typer.Option(help="Model name to record, if MODEL is a local copy of a Hub repository."),
]
Group = Annotated[
    int | None,
    typer.Option(help="Tokens per anchor; 0: no anchors.  [default: 10]", show_default=False),
]
Bins = Annotated[
    str | None,
    typer.Option(
        help="Bin widths from shallow to deep layers, comma-separated.  [default: 0.5,1,1.5]",
        show_default=False,
    ),
]
Factors = Annotated[
    str | None,
    typer.Option(
        help="Factor on the bins for each level, coarse to fine.  [default: 1,0.5,0.35,0.2]",
        show_default=False,
    ),
]
Sinks = Annotated[
    int | None,
    typer.Option(
        help="First tokens of a context that are stored as they are.  [default: 4]",
        show_default=False,
    ),
]


def text_option(help: str, name: str, metavar: str = "FILE...") -> Any:
    """An option that takes existing text files."""
    return typer.Option(
        name, help=help, metavar=metavar, exists=True, dir_okay=False, show_default=False
    )


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises
    ------
    ValueError
        The file is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8 text, found byte {error.start} that is not"
        ) from None


def read_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Texts by file stem.

    Raises
    ------
    ValueError
        A stem occurs twice, or a file is not UTF-8.
    """
    texts: dict[str, str] = {}
    for path in paths:
        if path.stem in texts:
            raise ValueError(
                f"expected files with different names, got {path.stem!r} twice; rename one"
            )
        texts[path.stem] = read_text(path)
    return texts


def check_apart(calibration: dict[str, str], evaluation: dict[str, str]) -> None:
    """Raise ValueError if a text is both profiled and measured, which flatters the result."""
    shared = sorted(name for name, text in evaluation.items() if text in calibration.values())
    if shared:
        raise ValueError(
            f"expected to measure on text that was not profiled, got {', '.join(shared)} for both"
        )


def delta_config(
    group: int | None,
    bins: str | None,
    factors: str | None,
    sinks: int | None,
    tables: str = "channel",
) -> DeltaConfig:
    """Parameters of the codec; what is None keeps its default.

    Raises
    ------
    ValueError
        A parameter is out of range.
    """
    from pydantic import ValidationError

    from hf_cachegen.codec.delta import DeltaConfig

    given = {
        "group": group,
        "bins": None if bins is None else parse_floats("--bins", bins),
        "factors": None if factors is None else parse_floats("--factors", factors),
        "sinks": sinks,
        "tables": tables,
    }
    try:
        return DeltaConfig.model_validate({k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        option = "".join(f"--{name}: " for name in first["loc"][:1])
        raise ValueError(option + first["msg"].removeprefix("Value error, ")) from None


def parse_floats(option: str, text: str) -> tuple[float, ...]:
    """Numbers of a comma-separated list.

    Raises
    ------
    ValueError
        Something in it is no number.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected numbers such as 0.5,1.0,1.5, got {text!r}") from None
