"""Methods that stop early: never less than the best of them, never more than what is true, and who said it."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

from certificates.test_certificate import CONFIGS, attacked_margins, some_images, trained
from specguard.certificates import Attempt, Certificate, certificate, certify, program
from specguard.certificates import stop_early as module
from specguard.certificates.methods import LOCAL, MIXED, NAIVE
from specguard.errors import ConfigError, DataError
from specguard.geometry import Ball
from specguard.records.certificate import METHOD_NAMES

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
def test_it_never_un_certifies_and_is_the_best_of_what_was_tried(name, cases):
    case = cases(name)
    images, labels = case.images, case.labels
    for radius in case.radii[1:]:
        ball = Ball("l2", radius)
        given = certify(case.steps, images, labels, ball, stop_early=True)
        whole = certify(case.steps, images, labels, ball, search=False)
        assert (given.certified >= whole.certified).all()  # the law
        size = 1e-9 * (1 + whole.margins.nan_to_num(posinf=0).abs().amax())
        assert tuple(given.asked) == tuple(given.lower) == METHOD_NAMES
        asked = torch.zeros_like(given.best, dtype=torch.bool)
        left = (labels == given.predicted)[:, None] & torch.ones_like(asked).scatter(1, labels[:, None], False)
        best = torch.full_like(given.best, -torch.inf)
        for method in METHOD_NAMES:
            run = left & (best <= 0)
            assert torch.equal(run.sum(1), given.asked[method])
            own = given.lower[method]
            assert (own[~run & (own != torch.inf)] == -torch.inf).all()
            best = torch.where(run, torch.maximum(best, whole.lower[method]), best)
            asked |= run
        assert torch.allclose(given.best[asked], best[asked], atol=float(size), rtol=1e-6)
        assert (given.best[~asked & (given.best != torch.inf)] == -torch.inf).all()


def exceeded(case, radius) -> bool:
    """Whether an attack finds a margin below a lower bound of any method."""
    given = certify(case.steps, case.images, case.labels, Ball("l2", radius), stop_early=True)
    each = torch.full((len(case.labels),), radius)
    found = attacked_margins(case.model, case.images, case.labels, each, starts=1, steps=10)
    case.model.float()
    bound = torch.where(given.best == torch.inf, -torch.inf, given.best)
    return bool((bound > found).any())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_is_certified_is_broken(name, cases):
    case = cases(name)
    assert not any(exceeded(case, radius) for radius in case.radii[::2])


def test_a_planted_mix_up_of_other_classes_is_caught(cases, monkeypatch):
    """Bounds in the order in which other classes were sorted, instead of in the places of their classes."""
    monkeypatch.setattr(module, "by_class", lambda p, values: torch.cat([values.mT, values.mT[:, :1] + 1e9], 1))
    assert exceeded(cases(), cases().radii[1])


@dataclass(frozen=True)
class Stage:
    """What a method was tried on, and how many images it finished."""

    name: str
    images: int
    classes: int
    certified: int


def stages(given: Certificate) -> list[Stage]:
    """Counted from what was asked and from the bounds that were there after each method."""
    found, best = [], torch.full_like(given.best, -torch.inf)
    for name, asked in given.asked.items():
        best = torch.maximum(best, given.lower[name])
        finished = (asked > 0) & (best > 0).all(1)
        found.append(Stage(name, int((asked > 0).sum()), int(asked.sum()), int(finished.sum())))
    return found


def test_stages_see_only_what_is_left_and_count_it(cases):
    case = cases()
    images, labels = case.images, case.labels
    ball = Ball("l2", case.radii[1])
    given = certify(case.steps, images, labels, ball, ("mixed", "local", "adjoint"), stop_early=True)
    found = stages(given)
    assert [stage.name for stage in found] == ["local", "adjoint", "mixed"]  # from the cheapest on
    right = int((given.predicted == labels).sum())
    assert found[0].images == right < len(images)
    for before, after in itertools.pairwise(found):
        assert after.images == before.images - before.certified
        assert after.classes <= before.classes
    assert 0 < found[1].images < right
    assert found[1].classes < 9 * found[1].images
    assert sum(stage.certified for stage in found) == int(given.certified.sum())
    assert given.seconds.keys() >= {"forward", *(stage.name for stage in found if stage.images)}
    assert all(value >= 0 for value in given.seconds.values())
    assert not given.third_party.any()


def test_classes_that_are_left_are_all_that_is_taken_back_through_the_network(cases, monkeypatch):
    case = cases()
    taken = []
    plain = module.prepare_problem

    def noted(*arguments, **options):
        p = plain(*arguments, **options)
        taken.append(0 if p.whole is None else p.whole.chunk)
        return p

    monkeypatch.setattr(module, "prepare_problem", noted)
    ball = Ball("l2", case.radii[1])
    given = certify(case.steps, case.images, case.labels, ball, ("local", "adjoint"), stop_early=True)
    most = int(given.asked["adjoint"].max())
    assert taken in ([0, 0, most], [0, most])
    assert 0 < taken[-1] < 9


def test_two_methods_may_share_the_classes_of_an_image(cases):
    """Some excluded by the one, the others by the other: certified, though neither certifies it alone."""
    model, images, labels = cases().model, cases().images[:6], cases().labels[:6]
    first = Told("first", lambda margins: torch.where(torch.arange(10) < 5, margins, -torch.inf))
    second = Told("second", lambda margins: torch.where(torch.arange(10) < 5, -torch.inf, margins))
    huge = Ball("l2", 5.0)
    first.model = second.model = model

    def asked(*verifiers):
        return certify(model, images, labels, huge, ("naive",), stop_early=True, verifiers=verifiers)

    right = asked().predicted == labels
    for verifier in (first, second):
        assert not asked(verifier).certified.any()
    both = asked(first, second)
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
        options |= {"stop_early": True, "verifiers": (verifier,)}
        return certify(model, images, labels, Ball("l2", 3.0), ("naive",), **options), labels

    return ask


def test_a_verifier_is_believed_labeled_and_kept_from_what_is_to_be_skipped(told):
    given, labels = told(lambda margins: margins)
    right = given.predicted == labels
    assert torch.equal(given.certified, right)
    assert torch.equal(given.third_party, right)
    assert given.verifiers == {"told": "hearsay"}
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
    asked = given.asked["told"] > 0
    assert asked.any()
    for i, failures in enumerate(given.failures):
        assert (why in failures.get("told", "")) == bool(asked[i])


def test_what_is_no_proof_or_has_a_taken_name_is_refused(told, cases):
    with pytest.raises(ConfigError, match="that name is taken"):
        told(lambda margins: margins, name="local")
    model, images, labels = cases().model, cases().images[:2], cases().labels[:2]
    smoothing = replace(Told("smoothing", None), deterministic=False)
    with pytest.raises(ConfigError, match="with a probability only, and is never mixed"):
        certify(model, images, labels, Ball("l2", 0.1), stop_early=True, verifiers=(smoothing,))
    with pytest.raises(ConfigError, match="magic"):
        certify(model, images, labels, Ball("l2", 0.1), ("magic",), stop_early=True)
    with pytest.raises(DataError, match="not finite"):
        certify(model, images * math.nan, labels, Ball("l2", 0.1), stop_early=True)
    for options in ({"verifiers": (Told("told", None),)}, {"skip": labels >= 0}):
        with pytest.raises(ConfigError, match="need stop_early"):
            certify(model, images, labels, Ball("l2", 0.1), **options)


def test_a_planted_stage_that_forgets_what_was_proved_is_caught(cases, monkeypatch):
    """The law of the best: were a later, worse bound to overwrite an earlier one, images would be lost."""
    case = cases()

    def forgetful(self):
        self.best = self.best.masked_fill(self.best < torch.inf, -torch.inf)
        self.lower.clear()
        return (self.predicted == self.labels).nonzero()[:, 0]

    monkeypatch.setattr(module.EarlyStop, "_open_images", forgetful)
    monkeypatch.setattr(certificate, "METHODS", (MIXED, LOCAL, NAIVE))
    ball = Ball("l2", case.radii[0])
    given = certify(case.steps, case.images, case.labels, ball, ("naive", "local", "mixed"), stop_early=True)
    whole = certify(case.steps, case.images, case.labels, ball, search=False)
    assert not (given.certified >= whole.certified).all()


def test_a_bound_that_is_not_a_number_is_none_and_leaves_its_classes_to_the_next_method(cases, monkeypatch):
    case = cases()
    ball = Ball("l2", case.radii[1])

    def tried(*methods):
        return certify(case.steps, case.images, case.labels, ball, methods, stop_early=True)

    alone, true = tried("mixed"), type(LOCAL).upper_loss

    def sick(self, problem, reach):
        loss = true(self, problem, reach)
        return replace(loss, total=loss.total * math.nan)

    monkeypatch.setattr(type(LOCAL), "upper_loss", sick)
    given = tried("local", "mixed")
    assert not given.best.isnan().any()
    assert torch.equal(given.certified, alone.certified)
    assert torch.equal(given.asked["mixed"], alone.asked["mixed"])
    assert given.certified.any()
