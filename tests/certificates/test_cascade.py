"""A cascade: never less than the best of its families, never more than what is true, honest about who said it."""

import math
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from certificates.test_certificate import CONFIGS, attacked_margins, some_images, trained
from specguard.certificates import FAMILIES, Attempt, cascade, certify, program
from specguard.certificates import cascade as cascade_function
from specguard.errors import ConfigError, DataError
from specguard.geometry import Ball

module = sys.modules[cascade_function.__module__]
NAMES = ("smooth", "two blocks", "norm=layernorm")


@dataclass(frozen=True)
class Case:
    """A trained model, images of it, and radii at which few, about half and nearly all are not certified."""

    model: object
    steps: object
    images: torch.Tensor
    labels: torch.Tensor
    radii: tuple[float, float, float]


@pytest.fixture(scope="module")
def cases():
    """Each made once, when it is first asked for."""
    known = {}

    def get(name="smooth"):
        if name not in known:
            model, (images, labels) = trained(CONFIGS[name]), some_images(12)
            steps = program(model)
            largest = certify(steps, images, labels, Ball("l2", 0.0), ("mixed",)).radius
            right = largest[largest > 0]
            radii = tuple(float(right.quantile(q)) * factor for q, factor in ((0.2, 1.0), (0.5, 0.98), (0.9, 1.02)))
            known[name] = Case(model, steps, images, labels, radii)
        return known[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_a_cascade_never_un_certifies_and_is_the_best_of_what_it_ran(name, cases):
    case = cases(name)
    images, labels = case.images, case.labels
    for radius in case.radii[1:]:
        ball = Ball("l2", radius)
        given = cascade(case.steps, images, labels, ball)
        whole = certify(case.steps, images, labels, ball, search=False)
        assert (given.certified >= whole.certified).all()  # the law
        size = 1e-9 * (1 + whole.margins.nan_to_num(posinf=0).abs().amax())
        asked = torch.zeros_like(given.lower, dtype=torch.bool)
        left = (labels == given.predicted)[:, None] & torch.ones_like(asked).scatter(1, labels[:, None], False)
        best = torch.full_like(given.lower, -torch.inf)
        for number, family in enumerate(FAMILIES):
            run = left & (best <= 0)
            assert torch.equal(run.sum(1), given.rivals[number])
            best = torch.where(run, torch.maximum(best, whole.lower[family]), best)
            asked |= run
        assert torch.allclose(given.lower[asked], best[asked], atol=float(size), rtol=1e-6)
        assert (given.lower[~asked & (given.lower != torch.inf)] == -torch.inf).all()


def exceeded(case, radius) -> bool:
    """Whether an attack finds a margin below a lower bound of the cascade."""
    given = cascade(case.steps, case.images, case.labels, Ball("l2", radius))
    each = torch.full((len(case.labels),), radius)
    found = attacked_margins(case.model, case.images, case.labels, each, starts=1, steps=10)
    case.model.float()
    bound = torch.where(given.lower == torch.inf, -torch.inf, given.lower)
    return bool((bound > found).any())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_a_cascade_certifies_is_broken(name, cases):
    case = cases(name)
    assert not any(exceeded(case, radius) for radius in case.radii[::2])


def test_a_planted_mix_up_of_rivals_is_caught(cases, monkeypatch):
    """Bounds in the order in which rivals were sorted, instead of in the places of their classes."""
    monkeypatch.setattr(module, "by_class", lambda p, values: torch.cat([values.mT, values.mT[:, :1] + 1e9], 1))
    assert exceeded(cases(), cases().radii[1])


def test_stages_see_only_what_is_left_and_count_it(cases):
    case = cases()
    images, labels = case.images, case.labels
    given = cascade(case.steps, images, labels, Ball("l2", case.radii[1]), ("mixed", "local", "adjoint"))
    assert [stage.name for stage in given.stages] == ["local", "adjoint", "mixed"]  # from the cheapest on
    right = int((given.predicted == labels).sum())
    assert given.stages[0].images == right < len(images)
    for before, after in zip(given.stages, given.stages[1:], strict=False):
        assert after.images == before.images - before.certified
        assert after.rivals <= before.rivals
    assert 0 < given.stages[1].images < right
    assert given.stages[1].rivals < 9 * given.stages[1].images
    assert sum(stage.certified for stage in given.stages) == int(given.certified.sum())
    assert all(stage.seconds >= 0 for stage in given.stages)
    assert not given.third_party.any()


def test_rivals_that_are_left_are_all_that_is_taken_back_through_the_network(cases, monkeypatch):
    case = cases()
    taken = []
    plain = module.posed

    def noted(*arguments):
        p = plain(*arguments)
        taken.append(0 if p.whole is None else p.whole.some)
        return p

    monkeypatch.setattr(module, "posed", noted)
    given = cascade(case.steps, case.images, case.labels, Ball("l2", case.radii[1]), ("local", "adjoint"))
    assert taken == [0, 0, int(given.rivals[1].max())] or taken == [0, int(given.rivals[1].max())]
    assert 0 < taken[-1] < 9


def test_two_families_may_share_the_rivals_of_an_image(cases):
    """Rival 1 shut out by the one stage, rival 2 by the other: certified, though neither certifies it alone."""
    model, images, labels = cases().model, cases().images[:6], cases().labels[:6]
    first = Told("first", lambda margins: torch.where(torch.arange(10) < 5, margins, -torch.inf))
    second = Told("second", lambda margins: torch.where(torch.arange(10) < 5, -torch.inf, margins))
    huge = Ball("l2", 5.0)
    first.model = second.model = model
    right = cascade(model, images, labels, huge, ("naive",)).predicted == labels
    for verifiers in ((first,), (second,)):
        assert not cascade(model, images, labels, huge, ("naive",), verifiers).certified.any()
    both = cascade(model, images, labels, huge, ("naive",), (first, second))
    assert right.any()
    assert torch.equal(both.certified, right)
    assert torch.equal(both.third_party, right)


@dataclass
class Told:
    """A verifier that says what it is told about the true margins at the images."""

    name: str
    say: object
    rests_on: str = "hearsay"
    deterministic: bool = True
    model: object = None

    def attempt(self, images, labels, ball, wanted):
        logits = self.model.double()(images.double())
        self.model.float()
        margins = logits.gather(1, labels[:, None]) - logits
        return Attempt(self.say(margins), (None,) * len(images))


@pytest.fixture
def told(cases):
    model, images, labels = cases().model, cases().images[:8], cases().labels[:8]

    def ask(say, name="told", **options):
        verifier = Told(name, say, model=model)
        return cascade(model, images, labels, Ball("l2", 3.0), ("naive",), (verifier,), **options), labels

    return ask


def test_a_verifier_is_believed_labelled_and_kept_from_what_is_to_be_skipped(told):
    given, labels = told(lambda margins: margins)
    right = given.predicted == labels
    assert torch.equal(given.certified, right)
    assert torch.equal(given.third_party, right)
    assert given.rests_on == {"told": "hearsay"}
    skip = torch.arange(len(labels)) % 2 == 0
    given, _ = told(lambda margins: margins, skip=skip)
    assert torch.equal(given.certified, right & ~skip)


def raises(margins):
    raise RuntimeError("no such operator\nand more")


@pytest.mark.parametrize(
    ("say", "why"),
    [
        (raises, "RuntimeError: no such operator"),
        (lambda margins: margins * torch.nan, "not numbers"),
        (lambda margins: margins + 1.0, "above the margin of the image itself"),
        (lambda margins: margins[:, 1:], "bounds of shape"),
    ],
)
def test_a_verifier_that_fails_proves_nothing_and_says_why(told, say, why):
    given, _ = told(say)
    assert not given.certified.any()
    asked = given.rivals[1] > 0
    assert asked.any()
    for i, reasons in enumerate(given.reasons):
        assert (why in reasons.get("told", "")) == bool(asked[i])


def test_what_is_no_proof_or_has_a_taken_name_is_refused(told, cases):
    with pytest.raises(ConfigError, match="that name is taken"):
        told(lambda margins: margins, name="local")
    model, images, labels = cases().model, cases().images[:2], cases().labels[:2]
    smoothing = replace(Told("smoothing", None), deterministic=False)
    with pytest.raises(ConfigError, match="with a probability only, and is never mixed"):
        cascade(model, images, labels, Ball("l2", 0.1), verifiers=(smoothing,))
    with pytest.raises(ConfigError, match="magic"):
        cascade(model, images, labels, Ball("l2", 0.1), ("magic",))
    with pytest.raises(DataError, match="not finite"):
        cascade(model, images * math.nan, labels, Ball("l2", 0.1))


def test_a_planted_stage_that_forgets_what_was_proved_is_caught(cases, monkeypatch):
    """The law of the best: were a later, worse bound to overwrite an earlier one, images would be lost."""
    case, plain = cases(), module._Run._stage

    def forgetful(self, name, left, **options):
        everyone = (self.predicted == self.labels).nonzero()[:, 0]
        self.lower = self.lower.masked_fill(self.lower < torch.inf, -torch.inf)
        plain(self, name, everyone, **options)

    monkeypatch.setattr(module._Run, "_stage", forgetful)
    monkeypatch.setattr(module, "FAMILIES", ("mixed", "local", "naive"))
    ball = Ball("l2", case.radii[0])
    given = cascade(case.steps, case.images, case.labels, ball, ("naive", "local", "mixed"))
    whole = certify(case.steps, case.images, case.labels, ball, search=False)
    assert not (given.certified >= whole.certified).all()
