"""Curation: which samples are worth learning from, decided once, written beside the shards and applied while they are read.

    from saccade.data.curate import CurationSettings, curate
    report = curate("shards/", CurationSettings(min_side=128, languages=("en",)))

    features.py      bytes -> features, one file per shard; the only step that reads pixels
    measuring.py     the same for all shards, spread over processes or a Ray cluster by Daft
    rules.py         index + features + settings -> the first rule each sample breaks (image_rules.py, text_rules.py)
    duplicates.py    candidates, certainty, leaders; population.py gathers what they look at
    contamination.py images of evaluation sets among those of training
    pipeline.py      the steps in order, ending in index/decisions/
    funnel.py        what was decided and why, as numbers; page.py as one HTML page

The shards themselves are never rewritten, unless a copy of the kept samples is asked for.
"""

from typing import TYPE_CHECKING

from saccade.lazy import lazy_exports

if TYPE_CHECKING:
    from saccade.data.curate.contamination import find_contamination as find_contamination
    from saccade.data.curate.funnel import inspect as inspect
    from saccade.data.curate.page import write_page as write_page
    from saccade.data.curate.pipeline import curate as curate
    from saccade.data.curate.settings import CurationSettings as CurationSettings
    from saccade.data.curate.settings import ScoreRange as ScoreRange

__getattr__ = lazy_exports(
    __name__,
    {
        "CurationSettings": "settings",
        "ScoreRange": "settings",
        "curate": "pipeline",
        "find_contamination": "contamination",
        "inspect": "funnel",
        "write_page": "page",
    },
)
