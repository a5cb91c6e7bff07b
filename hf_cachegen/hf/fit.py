"""Whether a document compresses as well as the text that its model's table was made from."""

from __future__ import annotations

import logging

from hf_cachegen.artifact import Manifest
from hf_cachegen.artifact.summary import stored_values, summarise_levels
from hf_cachegen.codec.transform_tables import TransformTables
from hf_cachegen.tables import ModelTable

logger = logging.getLogger(__name__)

MISFIT = 1.5
"""How many times the promised size calls for a warning. Prose and code, or two European languages,
differ by less with a table of either (docs/log.md)."""

MIN_TOKENS = 500
"""Fewer say little about a text."""


def warn_of_misfit(manifest: Manifest, table: ModelTable | None) -> None:
    """Log a warning if the levels of ``transform`` take much more than the table's own samples."""
    tables = table.tables.get("transform") if table is not None else None
    if not isinstance(tables, TransformTables) or manifest.tokens.n < MIN_TOKENS:
        return
    if manifest.kept is not None:
        return  # tokens that are kept are not like those of the samples
    if any(layer.window is not None for layer in manifest.identity.layout.layers):
        return  # a long context has fewer values of such layers than the samples, at another rate
    n_values = stored_values(manifest)
    sink_bytes = tables.config.sinks * manifest.identity.layout.bytes_per_token
    for level, summary in zip(manifest.levels, summarise_levels(manifest), strict=True):
        if level.codec == "transform":
            promised = float(tables.rates[int(level.params["level"])])
            found = 8 * (summary.size_bytes - sink_bytes) / n_values
            if found > MISFIT * promised > 0:
                logger.warning(
                    "level %s takes %.2f bits per value, %.1f times what the table's own samples "
                    "took: the table fits this text badly, and its quality may be lower; make one "
                    "from text like it with `hf-cachegen profile`",
                    level.name, found, found / promised,
                )  # fmt: skip
                return
