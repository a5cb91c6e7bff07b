"""Arguments and options that several commands share, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from hf_cachegen.codec.delta import DeltaConfig
    from hf_cachegen.codec.transform_tables import TransformConfig


class Dtype(StrEnum):
    """Dtype to load a model in."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Importance(StrEnum):
    """How ``transform`` tells tokens apart."""

    flat = "flat"
    predicted = "predicted"
    recent = "recent"


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
ImportanceOption = Annotated[
    Importance,
    typer.Option(help="Which tokens transform gives more bits; recent: the last ones, too."),
]
Codecs = Annotated[
    str | None,
    typer.Option(
        help="Codecs to make the table for, comma-separated.  [default: transform,delta]",
        show_default=False,
    ),
]
CodecParameters = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="CODEC.NAME=VALUE",
        help="A codec's parameter, such as transform.group=10 or delta.factors=1,0.5.",
        show_default=False,
    ),
]


def quantity(help: str, *, zero: bool = False, show_default: bool = True) -> Any:
    """An option that takes finite numbers above 0, or also 0, where one is enough or many go."""
    bound = "of 0 or more" if zero else "above 0"

    def check(value: float | list[float] | None) -> float | list[float] | None:
        for number in value if isinstance(value, list) else [value]:
            if number is not None and not (0 < number < math.inf or (zero and number == 0)):
                raise typer.BadParameter(f"expected a finite number {bound}, got {number:g}")
        return value

    return typer.Option(help=help, callback=check, show_default=show_default)


def folder_option(help: str, *names: str) -> Any:
    """An option that takes a folder to write to."""

    def parse(name: str) -> Path:
        if not name:  # which would mean the current folder
            raise typer.BadParameter("expected the name of a folder, got an empty one")
        return Path(name)

    return typer.Option(*names, help=help, metavar="FOLDER", parser=parse, show_default=False)


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


def split_names(names: str) -> list[str]:
    """Names with commas between them."""
    return [name.strip() for name in names.split(",") if name.strip()]


def codec_configs(
    codecs: str | None, parameters: Sequence[str]
) -> tuple[TransformConfig | DeltaConfig, ...]:
    """The parameters of codecs; what is not set keeps its default.

    Raises
    ------
    ValueError
        A codec or parameter is unknown, or out of range.
    """
    from pydantic import ValidationError

    from hf_cachegen.codec.delta import DeltaConfig
    from hf_cachegen.codec.transform_tables import TransformConfig

    known: dict[str, type[TransformConfig] | type[DeltaConfig]] = {
        "transform": TransformConfig,
        "delta": DeltaConfig,
    }
    names = known if codecs is None else split_names(codecs)
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        codec, _, field = name.partition(".")
        if codec not in given or not field or not value:
            raise ValueError(
                f"--set {parameter}: expected CODEC.NAME=VALUE with a codec of {', '.join(given)}"
            )
        given[codec][field] = _parse_value(value)
    unknown = [name for name in given if name not in known]
    if unknown or not given:
        raise ValueError(
            f"--codecs: unknown {', '.join(unknown) or '(none given)'}; expected some of "
            f"{', '.join(known)}"
        )
    configs = []
    for codec, fields in given.items():
        try:
            configs.append(known[codec].model_validate(fields))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join([codec, *map(str, first["loc"][:1])])
            raise ValueError(
                f"--set {where}: {first['msg'].removeprefix('Value error, ')}"
            ) from None
    return tuple(configs)


def _parse_value(text: str) -> int | float | str | tuple[float, ...]:
    """A number, several with commas between them, or else a word."""
    try:
        if "," in text:
            return tuple(float(part) for part in text.split(",") if part.strip())
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text
