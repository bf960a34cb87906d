"""How many examples a test of tests/fuzz takes: a share of those that the profile says."""

from hypothesis import HealthCheck, Phase, settings

SHRINKS = (Phase.explicit, Phase.generate, Phase.shrink)


def examples(share: float) -> settings:
    """Settings of a test whose examples are so much rarer than the profile's, or more frequent.

    `make test` takes 40 where share is 1 and shows a failing one as it is; `make fuzz`, where no
    test has a time limit, takes 400, begins anew until its time is over, and makes it smaller.
    """
    usual = settings()
    return settings(
        max_examples=max(1, round(usual.max_examples * share)),
        phases=SHRINKS[: 2 if usual.derandomize else 3],
        suppress_health_check=[HealthCheck.too_slow],
    )
