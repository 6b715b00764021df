"""Routing: properties of random runs, and what affinity, load, health and statistics each do."""

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from saccade.fleet.costs import CostModel
from saccade.fleet.rendezvous import digest, ranks
from saccade.fleet.replicas import PREFIX_BLOCK, Image, Replica, ReplicaStatistics, RoutedRequest
from saccade.fleet.residency import Residency, replicas_in
from saccade.fleet.routing import Router, RoutingPolicy

ROOT = Path(__file__).parents[2]
COSTS = CostModel(
    patch_s=3e-6, token_s=28e-6, request_s=3e-3, step_s=4e-3, step_request_s=2e-5, target_step_s=13e-3
)  # fmt: skip


def replica(name, **fields):
    usual = {"version": "v1", "costs": COSTS, "cached_patches": 20_000, "cached_tokens": 20_000}
    return Replica(name=name, **(usual | fields))


def router(count=4, policy=None, **fields):
    made = Router(policy)
    for number in range(count):
        made.add(replica(f"r{number}", **fields))
    return made


def request(number, *, image=None, num_blocks=0, text=300, prefix="", **fields):
    images = () if image is None else (Image(f"image {image}".encode(), 4000, 1000),)
    blocks = tuple(f"{prefix} {image} {depth}".encode() for depth in range(num_blocks))
    usual = {"version": "v1", "prompt_tokens": text + 1000 * len(images) + num_blocks * PREFIX_BLOCK}
    return RoutedRequest(id=f"q{number}", output_tokens=64, images=images, prefix=blocks, **(usual | fields))


# ------------------------------------------------------------------ random runs


class Run:
    """Random replicas and requests, with the facts that the router must agree with."""

    def __init__(self, seed):
        self.rng, self.router, self.now = random.Random(seed), Router(), 0.0
        self.replicas, self.states, self.where = {}, {}, {}
        self.waiting, self.ended, self.num_made = [], Counter(), 0
        self.accepted = set()
        self.log = []

    def step(self):
        self.now += self.rng.expovariate(20)
        acts = {self.arrive: 10, self.end: 8, self.join: 1, self.leave: 1, self.change: 1, self.report: 2}
        self.rng.choices(list(acts), acts.values())[0]()
        for waiting in self.waiting[:]:
            self.send(waiting)

    def arrive(self):
        fields = {"version": self.rng.choice(["v1", "v2"]), "adapter": self.rng.choice([None, None, "a"])}
        image = self.rng.choice([None, self.rng.randrange(30)])
        self.waiting.append(request(self.num_made, image=image, num_blocks=self.rng.randrange(4), **fields))
        self.num_made += 1

    def send(self, one):
        open_ = {name for name in self.replicas if self.may_answer(name, one)}
        waits = {name: self.router.queued_s(name, self.now) for name in open_}
        choice = self.router.choose(one, self.now)
        assert (choice is None) == (not open_)
        if choice is None:
            return
        assert choice.replica in open_, "health, drain, version and adapter are respected"
        policy = self.router.policy
        mean = sum(waits.values()) / len(waits)
        assert waits[choice.replica] <= policy.load_bound * mean + policy.load_floor_s + 1e-9
        assert 0 <= choice.resident_patches <= sum(image.patches for image in one.images)
        assert 0 < choice.first_token_s < choice.finish_s
        self.waiting.remove(one)
        self.where[one] = choice.replica
        self.log.append(choice.replica)

    def may_answer(self, name, one):
        known = self.replicas[name]
        has_adapter = one.adapter is None or one.adapter in known.adapters
        return self.states[name] == "ready" and known.version == one.version and has_adapter

    def end(self):
        if self.where:
            one = self.rng.choice(list(self.where))
            del self.where[one]
            self.router.finish(one.id)
            self.ended[one.id] += 1

    def join(self):
        name = f"r{len(self.states)}"
        adapters = frozenset(self.rng.sample(["a", "b"], self.rng.randrange(3)))
        made = replica(name, version=self.rng.choice(["v1", "v2"]), adapters=adapters)
        self.router.add(made)
        self.replicas[name], self.states[name] = made, "ready"

    def leave(self):
        if self.replicas:
            name = self.rng.choice(list(self.replicas))
            del self.replicas[name]
            orphans = self.router.remove(name)
            assert sorted(orphans) == sorted(one.id for one, where in self.where.items() if where == name)
            for one in [one for one, where in self.where.items() if where == name]:
                del self.where[one]
                self.accepted.discard(one.id)
                self.waiting.append(one)

    def change(self):
        if self.replicas:
            name = self.rng.choice(list(self.replicas))
            self.states[name] = self.rng.choice(["ready", "ready", "draining", "unhealthy"])
            self.router.set_state(name, self.states[name])

    def report(self):
        """A replica reports what is true at this moment."""
        if self.replicas:
            name = self.rng.choice(list(self.replicas))
            running = [one.id for one, where in self.where.items() if where == name]
            accepted = tuple(self.rng.sample(running, self.rng.randint(0, len(running)))) if running else ()
            self.accepted |= {*accepted}
            report = ReplicaStatistics(
                as_of=self.now, state=self.states[name], queued_s=self.rng.random(), accepted=accepted,
                num_running=sum(one in self.accepted for one in running),
            )  # fmt: skip
            self.router.update(name, report)
            assert self.router.num_running(name) == len(running)


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_lose_no_request_and_keep_every_rule(seed):
    run = Run(seed)
    for _ in range(400):
        run.step()
        for name in run.replicas:
            assert run.router.num_running(name) == sum(where == name for where in run.where.values())
    assert run.num_made == len(run.ended) + len(run.where) + len(run.waiting)
    assert set(run.ended.values()) <= {1}


def test_decisions_are_the_same_in_every_process():
    script = "import sys; sys.path.insert(0, 'tests'); from fleet.test_routing import Run; run = Run(7)\n"
    script += "for _ in range(300): run.step()\nprint(run.log)"
    logs = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(logs) == 1
    assert len(logs.pop()) > 500


# ------------------------------------------------------------------ affinity and load


def test_an_image_returns_to_the_replica_that_has_it():
    made = router()
    first = made.choose(request(0, image=1), 0.0)
    assert first.resident_patches == 0
    made.finish("q0")
    second = made.choose(request(1, image=1), 10.0)
    assert second.replica == first.replica
    assert second.resident_patches == 4000
    assert second.first_token_s < first.first_token_s


def test_a_conversation_returns_to_the_replica_that_has_its_longest_prefix():
    made = router()
    short = made.choose(request(0, num_blocks=2, prefix="a"), 0.0)
    made.set_state(short.replica, "draining")
    long = made.choose(request(1, num_blocks=8, prefix="a"), 10.0)
    made.set_state(short.replica, "ready")
    assert short.replica != long.replica
    assert made.choose(request(2, num_blocks=8, prefix="a"), 20.0).replica == long.replica


def test_what_a_replica_has_is_not_counted():
    made, names = router(4), [f"r{number}" for number in range(4)]

    def only(name, one, now):
        for other in names:
            made.set_state(other, "ready" if other == name else "draining")
        choice = made.choose(one, now)
        made.finish(one.id)
        return choice

    only("r0", request(0, num_blocks=8, prefix="a", image=1), 0.0)
    only("r1", request(1, num_blocks=3, prefix="a", image=1), 0.0)
    only("r2", request(2, image=1), 0.0)
    asked = request(3, num_blocks=8, prefix="a", image=1)  # 300 + 1000 + 8 blocks; the image ends in the fourth block
    cached = {"r0": (4000, 8), "r1": (4000, 3), "r2": (4000, 0), "r3": (0, 0)}
    for name, (patches, num_blocks) in cached.items():
        choice = only(name, replace(asked, id=f"q {name}"), 100.0)
        assert choice.resident_patches == patches
        work_s = COSTS.work_s(4000 - patches, asked.prompt_tokens - num_blocks * PREFIX_BLOCK)
        assert choice.first_token_s == pytest.approx(work_s)


def test_a_hot_image_becomes_resident_twice_instead_of_filling_one_queue():
    made = router(8)
    counts = Counter(made.choose(request(number, image=1), 0.001 * number).replica for number in range(200))
    assert 2 <= len(counts) <= 8
    queues = [made.queued_s(f"r{number}", 0.2) for number in range(8)]
    assert max(queues) - made.policy.load_floor_s < 2 * np.mean(queues)


def test_fronts_that_do_not_know_of_each_other_choose_the_same_home():
    homes = [[router(16).choose(request(n, image=n), 0.0).replica for n in range(40)] for _ in range(2)]
    assert homes[0] == homes[1]
    assert len(set(homes[0])) > 10


def test_requests_without_shared_content_spread_over_idle_replicas():
    made = router(8)
    counts = Counter(made.choose(request(number), 100.0 * number).replica for number in range(400))
    assert len(counts) == 8
    assert max(counts.values()) < 2 * 400 / 8


def test_replicas_get_work_by_their_speed():
    made = Router()
    half = replace(COSTS, patch_s=6e-6, token_s=56e-6, request_s=6e-3, step_s=8e-3, target_step_s=26e-3)
    made.add(replica("fast"))
    made.add(replica("slow", costs=half))
    counts = Counter(made.choose(request(number), 0.001 * number).replica for number in range(600))
    assert 1.5 < counts["fast"] / counts["slow"] < 3.5


def test_a_version_without_replicas_and_an_adapter_without_replica_have_no_choice():
    made = router(2, adapters=frozenset({"a"}))
    assert made.choose(request(0, version="v9"), 0.0) is None
    assert made.choose(request(1, adapter="b"), 0.0) is None
    assert made.choose(request(2, adapter="a"), 0.0) is not None


def test_a_request_in_progress_is_not_chosen_for_twice():
    made = router()
    made.choose(request(0), 0.0)
    with pytest.raises(AssertionError, match="q0 is in progress"):
        made.choose(request(0), 1.0)


# ------------------------------------------------------------------ statistics


def test_statistics_undo_a_reservation_only_when_they_have_it():
    made = router(1)
    made.choose(request(0, image=1), 10.0)
    reserved = made.queued_s("r0", 10.0)
    for as_of in (9.9, 10.0):
        made.update("r0", ReplicaStatistics(as_of=as_of, queued_s=0.0, num_running=0))
        assert made.queued_s("r0", 10.0) == pytest.approx(reserved)
        assert made.num_running("r0") == 1
    made.update("r0", ReplicaStatistics(as_of=11.0, queued_s=0.5, num_running=3, accepted=("q0", "of another front")))
    assert made.queued_s("r0", 11.0) == pytest.approx(0.5)
    assert made.num_running("r0") == 3
    made.update("r0", ReplicaStatistics(as_of=12.0, queued_s=0.5, num_running=3))
    assert made.num_running("r0") == 3


def test_a_request_that_ends_before_it_was_reported_leaves_no_reservation():
    made = router(1)
    made.choose(request(0, image=1), 10.0)
    made.finish("q0")
    made.update("r0", ReplicaStatistics(as_of=11.0, queued_s=0.0, num_running=0))
    assert made.queued_s("r0", 11.0) == 0
    assert made.num_running("r0") == 0


def test_images_that_a_replica_reports_attract_requests():
    made = router()
    made.update(
        "r3", ReplicaStatistics(as_of=1.0, queued_s=0.0, num_running=0, images=(Image(b"image 5", 4000, 1000),))
    )  # fmt: skip
    assert made.choose(request(0, image=5), 2.0).replica == "r3"


def test_a_replica_that_reports_ill_health_gets_nothing_until_it_is_ready():
    made = router(2)
    made.update("r0", ReplicaStatistics(as_of=1.0, state="unhealthy", queued_s=0.0, num_running=0))
    assert {made.choose(request(number), 2.0).replica for number in range(20)} == {"r1"}
    made.update("r0", ReplicaStatistics(as_of=3.0, queued_s=0.0, num_running=0))
    assert "r0" in {made.choose(request(number), 100.0).replica for number in range(20, 40)}


# ------------------------------------------------------------------ parts


def test_a_replica_that_leaves_moves_only_its_own_keys():
    names = [f"r{number}" for number in range(50)]
    digests = np.array([digest(name.encode()) for name in names], np.uint64)
    for number in range(300):
        order = ranks(f"key {number}".encode(), digests)
        rest = ranks(f"key {number}".encode(), digests[:-1])
        assert order.argmax() in (49, rest.argmax())


def test_keys_that_differ_little_have_homes_everywhere():
    digests = np.array([digest(f"r{number}".encode()) for number in range(10)], np.uint64)
    homes = Counter(int(ranks(f"{number}".encode(), digests).argmax()) for number in range(5000))
    assert min(homes.values()) > 400
    assert max(homes.values()) < 600


@pytest.mark.parametrize("seed", range(5))
def test_residency_is_bounded_and_agrees_with_its_inverse(seed):
    rng, residency = random.Random(seed), Residency()
    lru = {number: [] for number in range(4)}
    for number in lru:
        residency.add_replica(number, 10)
    for _ in range(800):
        number, key = rng.randrange(4), f"{rng.randrange(12)}".encode()
        residency.touch(number, key, 2)
        lru[number] = [*(one for one in lru[number] if one != key), key][-5:]
        for one in {key, *lru[number]}:
            holders = replicas_in(residency.holders(one)).tolist()
            assert holders == [n for n in lru if one in lru[n]] == [n for n in lru if residency.has(n, one)]
    residency.remove_replica(0)
    assert all(0 not in replicas_in(residency.holders(f"{key}".encode())) for key in range(12))


def test_a_policy_of_one_replica_is_the_cheapest_replica():
    made = router(1, RoutingPolicy(load_bound=1.0, load_floor_s=0.0))
    assert {made.choose(request(number, image=number), 0.0).replica for number in range(50)} == {"r0"}


def test_more_running_requests_make_steps_longer_and_leave_prompts_less_time():
    assert COSTS.decode_step_s(1) == COSTS.step_s
    assert COSTS.mixed_step_s(1) == COSTS.target_step_s
    assert COSTS.mixed_step_s(1000) == pytest.approx(3 * COSTS.decode_step_s(1000))
    assert COSTS.prompt_share(0) == 1 > COSTS.prompt_share(1) > COSTS.prompt_share(64) > 0.6
