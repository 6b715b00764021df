"""Simulated A/B experiments: verdicts about variants that do not differ, and users until a difference is found.

    python -m bench.fleet_experiments [--runs 400]

The report is looked at after every 100 requests. Users have Pareto distributed rates and speeds of their own.
"""

import argparse
import random
import statistics

from saccade.fleet.experiments import Experiment, Results, Variant

VARIANTS = (Variant(name="a", version="old"), Variant(name="b", version="new"))


def simulate(
    seed: int, *, slower: float = 1.0, lost: float = 0.0, num_requests: int = 20_000, num_users: int = 4000
) -> tuple[int | None, int | None]:
    """Users until the first verdict, and until the sample ratio was suspected; None: never.

    Variant b is so many times slower, and loses a share of its users before their first outcome.
    """
    draw = random.Random(seed)
    experiment = Experiment(name=f"experiment {seed}", variants=VARIANTS, metrics=("errors", "ttft", "tpot"))
    results = Results(experiment)
    users = [f"user {number}" for number in range(num_users)]
    weights = [draw.paretovariate(1.3) for _ in users]
    speed = {user: draw.lognormvariate(0.0, 0.25) for user in users}
    gone = {user for user in users if draw.random() < lost and experiment.variant_of(user).name == "b"}
    verdict, suspicion = None, None
    for number, user in enumerate(draw.choices(users, weights, k=num_requests), 1):
        name = experiment.variant_of(user).name
        if user in gone:
            continue
        slowness = speed[user] * (slower if name == "b" else 1.0)
        tpot, ttft = 0.01 * slowness * draw.lognormvariate(0.0, 0.15), 0.1 * slowness * draw.lognormvariate(0.0, 0.4)
        values = {"errors": float(draw.random() < 0.005), "ttft": ttft, "tpot": tpot}
        results.observe(user, name, values)
        if number % 100 == 0:
            report = results.report()
            seen = sum(one["users"] for one in report["variants"].values())
            if verdict is None and any(one["verdict"] in ("higher", "lower") for one in report["comparisons"]):
                verdict = seen
            if suspicion is None and not report["sample_ratio"]["is_as_expected"]:
                suspicion = seen
    return verdict, suspicion


def _describe(found: list[int | None]) -> str:
    users = [one for one in found if one is not None]
    return f"{len(users)} of {len(found)}" + (f", p50 after {statistics.median(users):.0f} users" if users else "")


def main() -> None:
    """Print verdicts and suspicions by difference and loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="experiments per row")
    runs = parser.parse_args().runs
    for slower, lost in (
        (1.0, 0.0),
        (1.05, 0.0),
        (1.1, 0.0),
        (1.2, 0.0),
        (1.5, 0.0),
        (1.0, 0.05),
        (1.0, 0.1),
        (1.0, 0.2),
    ):
        num_runs = runs if slower == 1.0 and not lost else max(1, runs // 10)
        found = [simulate(seed, slower=slower, lost=lost) for seed in range(num_runs)]
        verdicts, suspicions = zip(*found, strict=True)
        print(
            f"{slower:g} times slower, {lost:.0%} of users lost: verdicts in {_describe(list(verdicts))}; "
            f"sample ratio suspected in {_describe(list(suspicions))}",
            flush=True,
        )


if __name__ == "__main__":
    main()
