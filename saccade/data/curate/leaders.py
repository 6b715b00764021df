"""Verify pairs of likely copies and find the leader of every item, by stages over partitions.

    wanted pairs  ->  payload of the better item  ->  verified where the worse one is  ->  edges
    edges         ->  rounds of messages: leads, or follows  ->  leader of each item

An item leads if no better item that it repeats leads; the others follow the best leader that they repeat. That is what
going through all pairs in order of quality gives. Here a partition has the edges of its items, decides what
it can, and notifies the partitions of the items that repeat its own. Every round decides at least the best undecided
item, in practice all after a few rounds; no process sees the whole graph.

An item is compared with a bounded number of better ones. If it repeats one that follows another, it is compared with
the leader of that one in the next pass, until no pass finds a follower.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate.exchange import Exchange, Rows, Runner, Stage
from saccade.data.curate.partitions import Partitions
from saccade.data.curate.sample_table import Ids

EDGE = np.dtype([("worse", "u8"), ("better", "u8"), ("quality", "u8")])
"""An item and a better one, with the quality of the better one."""
_CARRIED = np.dtype([("worse", "u8"), ("better", "u8"), ("quality", "u8"), ("num_bytes", "u4")])
_DECIDED = np.dtype([("worse", "u8"), ("better", "u8"), ("leads", "?")])
_NOTICE = np.dtype([("worse", "u8"), ("better", "u8"), ("leader", "u8"), ("quality", "u8")])
_FOLLOWER = np.dtype([("worse", "u8"), ("joined", "u8"), ("leader", "u8"), ("quality", "u8"), ("is_changed", "?")])
"""An item that follows: the leader that it joined, and the one that this one follows by now."""
_MAX_PASSES = 8
_CARRIED_AT_ONCE = 2**14
_UNKNOWN, _LEADS, _FOLLOWS = 0, 1, 2


class Comparison(Protocol):
    """How two items are compared. Picklable."""

    def payloads(self, partitions: Partitions, ids: Ids) -> list[bytes]:
        """What is compared of each item; `ids` are ascending."""

    def is_same(self, worse: Sequence[bytes], better: Sequence[bytes]) -> NDArray[np.bool_]:
        """Whether each worse item repeats the better one."""


@dataclass(frozen=True)
class _Job:
    """What the jobs of a stage share."""

    partitions: Partitions
    comparison: Comparison
    kind: str
    number: int
    """The number of the pass over wanted pairs."""
    step: int = 0
    """The number of the state that the stage writes; it reads the state before."""
    begins: bool = False
    """Whether this is the first round of the pass."""

    def name(self, what: str) -> str:
        """Name of an exchange or a stage of this pass."""
        return f"{self.kind}-{what}-{self.number}"


def find_leaders(runner: Runner, partitions: Partitions, comparison: Comparison, kind: str) -> str:
    """Verify the `wanted` pairs and find the leader of each item; returns where `read_leaders` reads them."""
    step = 0

    def run(what: str, stage: Stage, count: str, *, begins: bool = False) -> int:
        job = _Job(partitions, comparison, kind, number, step, begins)
        results = runner.run(f"{kind}-{what}", stage, job, partitions.num_partitions)
        return sum(result[count] for result in results)

    for number in range(_MAX_PASSES):
        run(f"carry-{number}", _carry, "pairs")
        if not run(f"verify-{number}", _verify, "edges"):
            break
        step += 1
        undecided = run(f"decide-{step}", _decide, "undecided", begins=True)
        while undecided:
            step += 1
            undecided = run(f"decide-{step}", _decide, "undecided")
        step += 2
        run(f"notify-{step}", _notify, "notices")
        if not run(f"follow-{step}", _follow, "wanted"):
            break
    changed = step
    while changed:  # a leader that follows since a later pass has followers of its own
        step += 2
        run(f"notify-{step}", _notify, "notices")
        changed = run(f"follow-{step}", _follow, "changed")
    return f"{kind}-state-{step}"


def wanted(partitions: Partitions, kind: str, number: int = 0) -> Exchange:
    """Pairs to be verified, at the partition of the better item."""
    return partitions.exchange(f"{kind}-wanted-{number}", EDGE)


def read_leaders(partitions: Partitions, where: str, partition: int) -> Rows:
    """The items of a partition that follow another one, ascending, in fields `worse` and `leader`."""
    return _State.read(partitions, where, partition).followers


# ------------------------------------------------------------------ verification


def _carry(job: _Job, partition: int) -> dict[str, int]:
    """Send the payload of each better item to the worse ones it is compared with."""
    partitions = job.partitions
    pairs = np.unique(wanted(partitions, job.kind, job.number).rows(partition))
    pairs = pairs[np.argsort(pairs["better"], kind="stable")]
    sender = partitions.exchange(job.name("carried"), _CARRIED).sender(partition)
    better, of = np.unique(pairs["better"], return_inverse=True)
    for here in np.array_split(np.arange(len(better)), -(-len(better) // _CARRIED_AT_ONCE)) if len(better) else ():
        payloads = job.comparison.payloads(partitions, better[here])
        first, last = np.searchsorted(of, [here[0], here[-1] + 1])
        for begin in range(first, last, _CARRIED_AT_ONCE):
            part = slice(begin, min(begin + _CARRIED_AT_ONCE, last))
            rows = np.zeros(part.stop - begin, _CARRIED)
            for name in EDGE.names or ():
                rows[name] = pairs[name][part]
            sender.send(partitions.of_ids(rows["worse"]), rows, [payloads[n - here[0]] for n in of[part].tolist()])
    sender.close()
    return {"pairs": len(pairs)}


def _verify(job: _Job, partition: int) -> dict[str, int]:
    """Compare; edges stay here, and their reverse goes to the partition of the better item."""
    partitions = job.partitions
    carried = partitions.exchange(job.name("carried"), _CARRIED)
    worse = np.unique(np.concatenate([np.zeros(0, np.uint64), *(rows["worse"] for rows in carried.parts(partition))]))
    payloads = job.comparison.payloads(partitions, worse) if len(worse) else []
    edges = partitions.exchange(job.name("edges"), EDGE).sender(partition)
    reverse = partitions.exchange(job.name("reverse"), EDGE).sender(partition)
    num_edges = 0
    for rows, better in carried.parts_with_blobs(partition):
        own = [payloads[number] for number in np.searchsorted(worse, rows["worse"]).tolist()]
        same = rows[job.comparison.is_same(own, better)]
        found = np.empty(len(same), EDGE)
        for name in EDGE.names or ():
            found[name] = same[name]
        edges.send(np.full(len(found), partition), found)
        reverse.send(partitions.of_ids(found["better"]), found)
        num_edges += len(found)
        del own, better  # before the next ones are read
    edges.close()
    reverse.close()
    return {"edges": num_edges}


# ------------------------------------------------------------------ rounds


@dataclass
class _State:
    """What a partition knows after a stage."""

    edges: Rows
    """Edges of this pass whose worse item is here, ascending."""
    status: NDArray[np.uint8]
    """[edges]: whether the better item leads or follows, as far as it is known."""
    reverse: Rows
    """Edges of all passes whose better item is here."""
    is_notified: NDArray[np.bool_]
    """[reverse]: whether it is known at the worse item whether the better one leads."""
    followers: Rows
    """Items here that follow, ascending."""

    @staticmethod
    def read(partitions: Partitions, name: str, partition: int) -> _State:
        """The state that a stage wrote; empty if there was none."""
        content = partitions.folder.read(f"{name}/{partition:08d}.npz")
        if content is None:
            edges, followers = np.zeros(0, EDGE), np.zeros(0, _FOLLOWER)
            return _State(edges, np.zeros(0, np.uint8), edges, np.zeros(0, bool), followers)
        with np.load(io.BytesIO(content)) as arrays:
            return _State(**{key: arrays[key] for key in arrays.files})

    def write(self, partitions: Partitions, name: str, partition: int) -> None:
        """Write it for the next stage."""
        buffer = io.BytesIO()
        np.savez(buffer, **vars(self))
        partitions.folder.write(f"{name}/{partition:08d}.npz", buffer.getvalue())


def _decide(job: _Job, partition: int) -> dict[str, int]:
    """Decide the items whose better ones are decided, and notify those that repeat them."""
    partitions = job.partitions
    state = _State.read(partitions, f"{job.kind}-state-{job.step - 1}", partition)
    if job.begins:
        state.edges = np.unique(partitions.exchange(job.name("edges"), EDGE).rows(partition))
        state.status = np.zeros(len(state.edges), np.uint8)
        reverse = partitions.exchange(job.name("reverse"), EDGE).rows(partition)
        state.reverse = np.concatenate([state.reverse, reverse])
        state.is_notified = np.concatenate([np.ones(len(state.is_notified), bool), np.zeros(len(reverse), bool)])
    else:
        received = partitions.exchange(f"{job.kind}-decided-{job.step - 1}", _DECIDED).rows(partition)
        _set_status(state, received)
    items, leads, follows = _decide_here(state, partitions.of_ids(state.edges["better"]) == partition)
    at = np.searchsorted(items, state.reverse["better"])
    is_item = np.isin(state.reverse["better"], items)
    at[~is_item] = 0
    no_item = np.zeros(len(at), bool)
    leading = ~is_item | (leads[at] if len(items) else no_item)
    following = is_item & (follows[at] if len(items) else no_item)
    notify = ~state.is_notified & (leading | following)
    rows = np.empty(int(notify.sum()), _DECIDED)
    rows["worse"], rows["better"], rows["leads"] = (
        *(state.reverse[notify][name] for name in ("worse", "better")),
        leading[notify],
    )
    sender = partitions.exchange(f"{job.kind}-decided-{job.step}", _DECIDED).sender(partition)
    sender.send(partitions.of_ids(rows["worse"]), rows)
    sender.close()
    state.is_notified |= notify
    state.write(partitions, f"{job.kind}-state-{job.step}", partition)
    return {"undecided": int((state.status == _UNKNOWN).sum())}


def _set_status(state: _State, received: Rows) -> None:
    """Note what other partitions have decided."""
    num = len(state.edges)
    pairs = np.concatenate([state.edges[["worse", "better"]], received[["worse", "better"]]])
    _, same = np.unique(pairs, return_inverse=True)
    known = np.zeros(len(pairs), np.uint8)
    known[same[num:]] = np.where(received["leads"], _LEADS, _FOLLOWS)
    state.status = np.maximum(state.status, known[same[:num]])


def _decide_here(state: _State, is_here: NDArray[np.bool_]) -> tuple[Ids, NDArray[np.bool_], NDArray[np.bool_]]:
    """Items with edges, which of them lead and which follow; `is_here`: edges whose better item is here too."""
    items, of = np.unique(state.edges["worse"], return_inverse=True)
    is_item = is_here & np.isin(state.edges["better"], items)
    better = np.where(is_item, np.searchsorted(items, state.edges["better"]), 0)
    state.status[is_here & ~is_item] = _LEADS
    leads = follows = np.zeros(len(items), bool)
    while True:
        has_leader, is_open = np.zeros(len(items), bool), np.zeros(len(items), bool)
        has_leader[of[state.status == _LEADS]] = True
        is_open[of[state.status == _UNKNOWN]] = True
        now_leads = ~has_leader & ~is_open
        if (now_leads == leads).all() and (has_leader == follows).all():
            return items, leads, follows
        leads, follows = now_leads, has_leader
        state.status[is_item & leads[better]] = _LEADS
        state.status[is_item & follows[better]] = _FOLLOWS


def _notify(job: _Job, partition: int) -> dict[str, int]:
    """Tell the items that repeat a follower whom it follows, if that has changed."""
    partitions = job.partitions
    state = _State.read(partitions, f"{job.kind}-state-{job.step - 2}", partition)
    joined = state.edges[state.status == _LEADS]
    joined = joined[np.lexsort((joined["better"], joined["quality"], joined["worse"]))]
    joined = joined[np.unique(joined["worse"], return_index=True)[1]]
    added = np.zeros(len(joined), _FOLLOWER)
    added["worse"], added["leader"], added["quality"] = joined["worse"], joined["better"], joined["quality"]
    added["joined"], added["is_changed"] = joined["better"], True
    state.followers = np.sort(np.concatenate([state.followers, added]), order="worse")
    state.edges, state.status = state.edges[:0], state.status[:0]
    changed = state.followers[state.followers["is_changed"]]
    reverse = state.reverse[np.isin(state.reverse["better"], changed["worse"])]
    of = changed[np.searchsorted(changed["worse"], reverse["better"])] if len(reverse) else changed[:0]
    rows = np.empty(len(reverse), _NOTICE)
    rows["worse"], rows["better"] = reverse["worse"], reverse["better"]
    rows["leader"], rows["quality"] = of["leader"], of["quality"]
    sender = partitions.exchange(f"{job.kind}-notices-{job.step}", _NOTICE).sender(partition)
    sender.send(partitions.of_ids(rows["worse"]), rows)
    sender.close()
    state.followers["is_changed"] = False
    state.write(partitions, f"{job.kind}-state-{job.step - 1}", partition)
    return {"notices": len(rows)}


def _follow(job: _Job, partition: int) -> dict[str, int]:
    """Follow the leader of a leader that follows; compare items that lead with the leaders of what they repeat."""
    partitions = job.partitions
    state = _State.read(partitions, f"{job.kind}-state-{job.step - 1}", partition)
    notices = partitions.exchange(f"{job.kind}-notices-{job.step}", _NOTICE).rows(partition)
    follows = np.isin(notices["worse"], state.followers["worse"])
    new = np.empty(int((~follows).sum()), EDGE)
    new["worse"], new["better"], new["quality"] = (notices[~follows][name] for name in ("worse", "leader", "quality"))
    new = np.unique(new)
    sender = wanted(partitions, job.kind, job.number + 1).sender(partition)
    sender.send(partitions.of_ids(new["better"]), new)
    sender.close()
    notices = notices[follows]
    at = np.searchsorted(state.followers["worse"], notices["worse"])
    is_own = state.followers["joined"][at] == notices["better"]
    at, notices = at[is_own], notices[is_own]
    for name in ("leader", "quality"):
        state.followers[name][at] = notices[name]
    state.followers["is_changed"][at] = True
    state.write(partitions, f"{job.kind}-state-{job.step}", partition)
    return {"wanted": len(new), "changed": len(at)}
