"""Model tables: the statistics that codecs need of a model, profiled once and published beside it.

A table is a folder::

    table.json              what it belongs to and how it was made (:class:`TableRecord`)
    <codec>.safetensors     the statistics that a codec needs
    README.md               a card for people

A reader fetches the files of the codecs it uses. Each codec has a digest of its own, which no other
codec changes.
"""

from hf_cachegen.tables.record import RECORD_NAME, TableRecord
from hf_cachegen.tables.table import CARD_NAME, CodecTables, ModelTable

__all__ = ["CARD_NAME", "RECORD_NAME", "CodecTables", "ModelTable", "TableRecord"]
