"""Step two of curation: the first rule each sample breaks. A pure function of index, features and settings.

`REASONS` is the order. What concerns several samples at once (shared texts, evaluation sets, duplicates) is asked afterwards, of the
samples still in. A sample with several captions stays in when one of its captions breaks no rule; else its reason is that of its first caption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from saccade.data.curate import image_rules, text_rules
from saccade.data.curate.features import flat, read_features
from saccade.data.curate.image_rules import Broken
from saccade.data.curate.settings import CurationSettings
from saccade.data.index import ShardIndex

REASONS = (
    "animated image", "unreadable sample", "no image", "image too small", "image too large", "aspect ratio", "corrupt image",
    "unusable text", "text too short", "text too long", "boilerplate text", "pattern in text", "repetitive text",
    "blocked word", "other language", "score", "text shared by many images", "in evaluation set", "exact duplicate",
    "near-duplicate image", "near-duplicate text",
)  # fmt: skip
"""In the order they are asked. A score's reason carries its name: "score similarity"."""

Reasons = NDArray[np.object_]
"""For each row the rule it breaks, None where it is in."""

SCORE_COLUMNS = ("score_names", "scores")
_FEATURES = (*image_rules.FEATURE_COLUMNS, *text_rules.FEATURE_COLUMNS, *SCORE_COLUMNS)


def judge(index: ShardIndex, shard: int, settings: CurationSettings) -> Reasons:
    """The reasons of one shard's samples."""
    rows = index.read(shard, image_rules.INDEX_COLUMNS)
    features = read_features(index, shard, _FEATURES)
    reasons = _first_reasons(len(rows), image_rules.broken_image_rules(rows, features, settings))
    _add(reasons, _text_reasons(features, settings))
    _add(reasons, _first_reasons(len(rows), _broken_scores(features, settings)))
    return reasons


def in_order(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by reason, sorted as the rules are asked."""
    return {reason: counts[reason] for reason in sorted(counts, key=lambda reason: (_rank(reason), reason))}


def _rank(reason: str) -> int:
    known = "score" if reason.startswith("score ") else reason
    return REASONS.index(known) if known in REASONS else len(REASONS)


def scores_of(features: pa.Table, name: str) -> NDArray[np.float64]:
    """One number of the samples' json; NaN where a sample has none. Needs `SCORE_COLUMNS`."""
    (names, owners), (values, _) = flat(features["score_names"]), flat(features["scores"])
    is_meant = pc.equal(names, name).to_numpy(zero_copy_only=False)
    scores = np.full(len(features), np.nan)
    scores[owners[is_meant]] = values.to_numpy()[is_meant]
    return scores


def _text_reasons(features: pa.Table, settings: CurationSettings) -> Reasons:
    broken, owners = text_rules.broken_text_rules(features, settings)
    by_text = _first_reasons(len(owners), broken)
    has_good_text = np.bincount(owners[by_text == None], minlength=len(features)) > 0  # noqa: E711 (elementwise)
    reasons = np.full(len(features), None, object)
    reasons[owners[::-1]] = by_text[::-1]  # backwards, so that the first text of a sample is the last to be written
    reasons[has_good_text] = None
    reasons[features["text_error"].is_valid().to_numpy()] = "unusable text"
    return reasons


def _broken_scores(features: pa.Table, settings: CurationSettings) -> Iterator[Broken]:
    for name, allowed in settings.scores.items():
        scores = scores_of(features, name)
        is_outside = np.isnan(scores) & (allowed.when_absent == "drop")
        if allowed.min is not None:
            is_outside |= scores < allowed.min
        if allowed.max is not None:
            is_outside |= scores > allowed.max
        yield f"score {name}", is_outside


def _first_reasons(num_items: int, rules: Iterable[Broken]) -> Reasons:
    reasons = np.full(num_items, None, object)
    for reason, is_broken in rules:
        reasons[is_broken & (reasons == None)] = reason  # noqa: E711 (elementwise)
    return reasons


def _add(reasons: Reasons, later: Reasons) -> None:
    """Reasons of later rules, where no earlier one was broken."""
    is_in = reasons == None  # noqa: E711 (elementwise)
    reasons[is_in] = later[is_in]
