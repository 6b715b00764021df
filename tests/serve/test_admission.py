"""Admission and rate limits: pure decisions, checked by long random runs."""

import random
from dataclasses import replace

import pytest

from saccade.serve.admission import Admission, AdmissionLimits, Demand
from saccade.serve.keys import ApiKey
from saccade.serve.rate_limit import Consumption, RateLimiter

LIMITS = AdmissionLimits(
    max_running=4,
    max_queued=4,
    max_pages=400,
    page_size=16,
    max_image_tokens=4096,
    max_media_bytes=10_000,
    max_wait_s=5,
)


def demand(**fields):
    return Demand(**{"num_completions": 1, "num_prompt_tokens": 32, "max_tokens": 64} | fields)


def test_what_arrives_at_an_idle_server_is_admitted_whatever_it_asks_for():
    huge = demand(num_completions=50, num_prompt_tokens=10**9, num_images=10**3, num_media_bytes=10**9)
    admission = Admission(LIMITS)
    assert admission.refusal(huge, 0.0) is None
    admitted = admission.admit(huge)
    assert admission.refusal(demand(), 0.0).bound == "queue"
    admission.close(admitted, 1.0, num_output_tokens=5)
    assert admission.refusal(demand(), 1.0) is None


def test_each_stage_has_a_bound_and_says_which_it_is():
    for fields, bound in [
        ({"num_completions": 8}, "queue"),
        ({"num_prompt_tokens": 7000}, "kv_cache"),
        ({"num_images": 8}, "encoder"),
        ({"num_images": 1, "num_media_bytes": 9_999}, "media"),
    ]:
        admission = Admission(LIMITS)
        admission.admit(demand(num_images=1, num_media_bytes=10))
        refusal = admission.refusal(demand(**fields), 0.0)
        assert refusal.bound == bound
        assert refusal.retry_after_s >= 1
        admission.refuse(refusal)
        assert admission.num_refused[bound] == 1


def test_media_count_until_they_are_preprocessed_and_images_are_learnt():
    admission = Admission(LIMITS)
    admitted = admission.admit(demand(num_images=2, num_media_bytes=9_000))
    assert admission.refusal(demand(num_images=1, num_media_bytes=2_000), 0.0).bound == "media"
    admission.preprocessed(admitted, 40)
    assert (admission.num_image_tokens, admission.num_media_bytes, admission.num_preprocessing) == (40, 0, 0)
    assert admission.refusal(demand(num_images=1, num_media_bytes=2_000), 0.0) is None


def test_media_that_are_fetched_count_as_they_arrive():
    admission = Admission(LIMITS)
    alone = admission.admit(demand(num_images=1))
    assert admission.add_media(alone, 20_000, 0.0) is None, "one that is alone is served"
    admission.preprocessed(alone, 40)
    first, second = admission.admit(demand(num_images=1)), admission.admit(demand(num_images=1, num_media_bytes=4_000))
    assert admission.add_media(first, 6_000, 0.0) is None
    assert admission.add_media(second, 1_000, 0.0).bound == "media"
    admission.close(second, 0.0)
    assert admission.num_media_bytes == 6_000
    assert admission.add_media(second, 1_000, 0.0) is None, "it has ended"
    admission.close(first, 0.0)
    assert admission.num_media_bytes == 0


def test_a_queue_that_would_take_too_long_is_full_before_its_places_are():
    slow = Admission(LIMITS)
    for second in range(0, 30, 2):  # one completion in two seconds
        slow.close(slow.admit(demand()), float(second), num_output_tokens=64)
    all_admitted = [slow.admit(demand()) for _ in range(7)]
    refusal = slow.refusal(demand(), 30.0)
    assert refusal.bound == "wait"
    assert 1 <= refusal.retry_after_s <= 60
    assert slow.is_full(30.0) == refusal
    slow.close(all_admitted[0], 30.5, num_output_tokens=64)
    assert slow.refusal(demand(), 30.5) is None


def test_nothing_is_counted_any_more_when_all_have_ended():
    rng = random.Random(0)
    admission, open_tickets, now = Admission(LIMITS), [], 0.0
    for _ in range(5000):
        now += rng.random()
        if rng.random() < 0.6:
            images = rng.choice([0, 0, 1, 3])
            wanted = demand(num_completions=rng.randint(1, 3), num_images=images, num_media_bytes=1000 * images)
            if admission.refusal(wanted, now) is None:
                open_tickets.append(admission.admit(wanted))
        elif open_tickets:
            admitted = open_tickets.pop(rng.randrange(len(open_tickets)))
            if rng.random() < 0.8:
                admission.preprocessed(admitted, rng.randint(0, 500))
            admission.close(admitted, now, num_output_tokens=rng.choice([None, 10, 500]))
            admission.close(admitted, now)
        assert admission.num_open == len(open_tickets)
        assert admission.num_completions <= LIMITS.max_running + LIMITS.max_queued
    for admitted in open_tickets:
        admission.close(admitted, now)
    counts = ("num_open", "num_preprocessing", "num_completions", "num_pages", "num_image_tokens", "num_media_bytes")
    assert [getattr(admission, name) for name in counts] == [0] * 6


def test_a_key_gets_its_rate_and_is_told_when_to_come_back():
    rates, key = RateLimiter(), ApiKey(name="a", sha256="0" * 64, requests_per_minute=60, tokens_per_minute=600)
    other = ApiKey(name="b", sha256="1" * 64)
    taken = [now for now in range(0, 300) if rates.take_request(key, now / 10) == 0.0]
    assert len(taken) == 60 + 29
    assert 0 < rates.take_request(key, 29.9) <= 1
    assert all(rates.take_request(other, 0.0) == rates.take_tokens(other, 10**9, 0.0) == 0.0 for _ in range(500))
    assert rates.take_tokens(key, 500, 0.0) == 0.0
    assert rates.take_tokens(key, 500, 0.0) == 40.0
    rates.settle_tokens(key, 500, 100, 0.0)
    assert rates.take_tokens(key, 500, 0.0) == 0.0
    rates.settle_tokens(key, 500, 1100, 0.0)
    assert rates.take_tokens(key, 10**6, 0.0) == 120.0


# ------------------------------------------------------------------ limits that change, and that processes share


def test_lower_limits_keep_new_requests_out_and_let_the_open_ones_end():
    admission = Admission(LIMITS)
    all_admitted = [admission.admit(demand()) for _ in range(4)]
    admission.set_limits(replace(LIMITS, max_running=1, max_queued=1))
    assert admission.refusal(demand(), 0.0).bound == "queue"
    for admitted in all_admitted[:3]:
        admission.close(admitted, 1.0)
    assert admission.num_open == 1
    assert admission.refusal(demand(), 1.0) is None
    admission.set_limits(LIMITS)
    assert admission.refusal(demand(num_completions=7), 1.0) is None


def test_the_parts_of_all_fronts_are_what_all_engines_can_do():
    for num_engines, num_fronts in ((1, 1), (3, 1), (3, 2), (8, 4)):
        part = LIMITS.part(num_engines=num_engines, num_fronts=num_fronts)
        for name in ("max_running", "max_pages", "max_image_tokens"):
            whole = getattr(LIMITS, name) * num_engines
            assert abs(getattr(part, name) * num_fronts - whole) <= num_fronts / 2
        for name in ("max_queued", "max_media_bytes"):
            assert abs(getattr(part, name) * num_fronts - getattr(LIMITS, name)) <= num_fronts / 2
        assert (part.page_size, part.max_wait_s) == (LIMITS.page_size, LIMITS.max_wait_s)
    assert LIMITS.part(num_engines=1, num_fronts=1) == LIMITS
    assert LIMITS.part(num_engines=0, num_fronts=1) == LIMITS, "requests may wait for the first engine"
    assert LIMITS.part(num_engines=1, num_fronts=100).max_running == 1


class Exchange:
    """Limiters that send each other what they counted, every `interval_s`; a message takes up to `delay_s`."""

    def __init__(self, rng, num_limiters, interval_s, delay_s):
        self.rng, self.interval_s, self.delay_s = rng, interval_s, delay_s
        self.limiters = [RateLimiter() for _ in range(num_limiters)]
        self.due = [rng.uniform(0, interval_s) for _ in self.limiters]
        self.messages = []

    def advance(self, now, keys):
        """Deliver and send what is due."""
        for at, sender in sorted((at, sender) for sender, at in enumerate(self.due) if at <= now):
            self.due[sender] = at + self.interval_s
            consumption = self.limiters[sender].take_consumption()
            others = [number for number in range(len(self.limiters)) if number != sender]
            self.messages += [(at + self.rng.uniform(0, self.delay_s), to, consumption) for to in others]
        for message in sorted(self.messages, key=lambda one: one[0]):
            if message[0] <= now:
                self.messages.remove(message)
                self.limiters[message[1]].charge(keys, message[2], message[0])


@pytest.mark.parametrize("num_limiters", [1, 2, 5])
def test_limiters_hold_a_limit_together_within_what_arrives_before_they_know(num_limiters):
    rng = random.Random(num_limiters)
    key = ApiKey(name="a", sha256="0" * 64, requests_per_minute=60, tokens_per_minute=6000)
    exchange = Exchange(rng, num_limiters, interval_s=1.0, delay_s=0.5)
    taken, now = [], 0.0
    while now < 300:
        rate = 20 if now % 60 < 20 else 2  # bursts at any of them
        now += rng.expovariate(rate)
        exchange.advance(now, {key.sha256: key})
        limiter = rng.choice(exchange.limiters)
        tokens = rng.randrange(1, 400)
        if limiter.take_request(key, now) == 0.0 and limiter.take_tokens(key, tokens, now) == 0.0:
            limiter.settle_tokens(key, tokens, tokens // 2, now)
            taken.append((now, tokens // 2))
    lag_s = 1.5
    assert len(taken) > 200
    for number, (start, _) in enumerate(taken):
        requests = tokens = 0
        for at, used in taken[number:]:
            requests, tokens = requests + 1, tokens + used
            slack = (num_limiters - 1) * (1 + lag_s / 60)
            assert requests <= 60 * (1 + (at - start) / 60 + slack) + 1
            assert tokens <= 6000 * (1 + (at - start) / 60 + slack) + 400
    long_run = sum(1 for at, _ in taken if at >= 60)
    assert long_run <= 60 * 4 + 60 + 20 * lag_s, "what arrives within the lag, not a limit for each limiter"


def test_a_limiter_reports_what_it_counted_once_and_not_what_it_was_charged():
    key, free = ApiKey(name="a", sha256="0" * 64, tokens_per_minute=600), ApiKey(name="b", sha256="1" * 64)
    here, there = RateLimiter(), RateLimiter()
    assert here.take_tokens(key, 500, 0.0) == 0.0
    assert here.take_tokens(key, 500, 0.0) > 0, "refused, so not counted"
    here.take_tokens(free, 500, 0.0)
    consumption = here.take_consumption()
    assert consumption == {key.sha256: Consumption(tokens=500)}
    assert here.take_consumption() == {}
    there.charge({key.sha256: key}, consumption | {"2" * 64: Consumption(tokens=1)}, 0.0)
    assert there.take_consumption() == {}
    assert there.take_tokens(key, 500, 0.0) == 40.0
    here.settle_tokens(key, 500, 100, 0.0)
    corrections = here.take_consumption()
    assert corrections == {key.sha256: Consumption(tokens=-400)}
    there.charge({key.sha256: key}, corrections, 0.0)
    assert there.take_tokens(key, 500, 0.0) == 0.0


def test_a_key_that_was_removed_is_charged_no_more():
    rates, key = RateLimiter(), ApiKey(name="a", sha256="0" * 64, requests_per_minute=1)
    rates.charge({}, {key.sha256: Consumption(requests=100)}, 0.0)
    assert rates.take_request(key, 0.0) == 0.0
