"""Curation: decide which samples are kept. Decisions are written next to the shards and applied when they are read.

    from saccade.data.curate import CurationSettings, curate
    report = curate("shards/", CurationSettings(min_side=128, languages=("en",)))

    features.py       bytes -> features, one file per shard, measured in parallel; the only step that reads pixels
    thumbnails.py     perceptual hashes and thumbnails; image_match.py aligns two thumbnails and decides
    text_features.py  words, repetition, language, MinHash bands
    rules.py          index + features + settings -> the first rule each sample breaks
    duplicates.py     locality-sensitive hashing, verification, one leader per group; on the arrays of sample_table.py
    contamination.py  images of evaluation sets in training data
    pipeline.py       the steps in order, ending in index/decisions/
    report.py         the curation report as numbers; page.py as one HTML page

The shards are never rewritten, unless a copy of the kept samples is requested.
"""

from typing import TYPE_CHECKING

from saccade.imports import lazy_exports

if TYPE_CHECKING:
    from saccade.data.curate.contamination import find_contamination as find_contamination
    from saccade.data.curate.page import write_page as write_page
    from saccade.data.curate.pipeline import curate as curate
    from saccade.data.curate.report import inspect as inspect
    from saccade.data.curate.settings import CurationSettings as CurationSettings
    from saccade.data.curate.settings import ScoreRange as ScoreRange

__getattr__ = lazy_exports(
    __name__,
    {
        "CurationSettings": "settings",
        "ScoreRange": "settings",
        "curate": "pipeline",
        "find_contamination": "contamination",
        "inspect": "report",
        "write_page": "page",
    },
)
