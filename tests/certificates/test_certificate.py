"""Certificates: exact where they can be, ordered where they must be, and never both certified and broken."""

import math
from dataclasses import replace

import pytest
import torch
from jaxtyping import config
from torch import nn

from helpers.proofs import NAMES, prepared_problem
from specguard.attacks import APGD, PGD
from specguard.certificates import certify, problem, program
from specguard.certificates.methods import MIXED, losses_of
from specguard.certificates.problem import lower_radius
from specguard.data import digits
from specguard.errors import ConfigError, DataError
from specguard.geometry import Ball
from specguard.nn import ViT, ViTConfig, unfuse_attention

pytestmark = pytest.mark.usefixtures("as_shipped")


@pytest.fixture
def as_shipped(monkeypatch):
    """Users run without the type checks of the tests, which would come first."""
    monkeypatch.setattr(config, "jaxtyping_disable", True)


# image 8, patch 4: 4 patches of 16 pixels; 3 heads of 5 channels.
TINY = ViTConfig(
    image=8, patch=4, channels=1, classes=10, dim=15, depth=1, heads=3, mlp_ratio=22 / 15,
    mean=(0.3,), std=(0.4,), norm="smoothproject", attention_radius=1.5,
)  # fmt: skip

CONFIGS: dict[str, ViTConfig] = {
    **{
        f"norm={norm}": replace(TINY, norm=norm)
        for norm in ("layernorm", "rmsnorm", "batchnorm", "layerproject", "none")
    },
    **{
        f"activation={name}": replace(TINY, activation=name)
        for name in ("gelu_tanh", "relu", "softplus", "squareplus")
    },
    "smooth": TINY,
    "mean pool": replace(TINY, pool="mean"),
    "batch norm behind pooling": replace(TINY, pool="all", norm="batchnorm", norm_after_pool=True),
    "two blocks": replace(TINY, depth=2, pool="mean"),
    "local blocks": replace(TINY, depth=2, local_blocks=1),
    "local and mean": replace(TINY, local_blocks=1, pool="mean", norm="none"),
    "covit": replace(TINY, kernels=(3, 1, 5), pool="mean"),
    "no bias": replace(TINY, qkv_bias=False),
    "scaled residuals": replace(TINY, residual_scale=0.5, norm="layerproject"),
    "layer scale": replace(TINY, layer_scale=0.3),
    "resized": replace(TINY, resize=12, pool="mean"),
    "one token, one head": replace(TINY, patch=8, heads=1, pool="mean"),
}


def trained(model_config, seed=0, steps=60):
    """A few steps of Adam on digits: enough for most images to be right."""
    generator = torch.Generator().manual_seed(seed)
    model = ViT(model_config, generator)
    for p in model.parameters():
        p.data.mul_(6 if p.ndim > 1 else 1)
    data = digits().train
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        chosen = torch.randint(len(data.images), (96,), generator=generator)
        loss = nn.functional.cross_entropy(model(data.images[chosen]), data.labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def models():
    """Models by name, each trained once, when it is first asked for."""
    known = {}

    def get(name):
        if name not in known:
            known[name] = trained(CONFIGS[name])
        return known[name]

    return get


def some_images(count=7, first=3):
    test = digits().test
    return test.images[first : first + count], test.labels[first : first + count]


def sizes(x):
    return torch.linalg.vector_norm(x.flatten(-3), dim=-1)[..., None, None, None]


def attacked_margins(model, images, labels, radius, *, starts=2, steps=20, seed=0):
    """The smallest `f_y - f_j` found within `radius`, one for every image, by image and class; no box, float64.

    At the label it is infinite. Normalized gradients on each margin of its own, from the fragile direction and from
    random points.
    """
    function = unfuse_attention(model).double().requires_grad_(False)
    x, count = images.double(), len(images)
    generator = torch.Generator().manual_seed(seed)
    classes = function(x).shape[1]
    radius = radius.double().view(1, 1, count, 1, 1, 1)

    def margins(D):
        logits = function((x + D).flatten(0, 2)).view(*D.shape[:3], classes)
        own = logits.gather(3, labels.view(1, 1, -1, 1).expand(*D.shape[:3], 1))[..., 0]
        other = torch.stack([logits[:, j, :, j] for j in range(classes)], 1)
        return own - other

    D = torch.randn(starts + 1, classes, *x.shape, generator=generator, dtype=torch.float64)
    D[0] = 1e-9 * D[0]  # the first step is along the gradient at the image itself
    D = torch.minimum(radius / sizes(D), torch.ones(())) * D
    best = torch.full((classes, count), torch.inf, dtype=torch.float64)
    step = 2.0
    for _ in range(steps):
        D.requires_grad_()
        values = margins(D)
        best = torch.minimum(best, values.detach().amin(0))
        (slope,) = torch.autograd.grad(values.sum(), D)
        D = D.detach() - slope * (step * radius / sizes(slope).clamp(min=1e-300))
        D = D * (radius / torch.maximum(sizes(D), radius).clamp(min=1e-300)) * (1 - 1e-15)
        step *= 0.85
    best = torch.minimum(best, margins(D).detach().amin(0)).mT
    return best.scatter(1, labels[:, None], torch.inf)


def linear_classifier(classes=4, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, classes)).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    images = torch.rand(9, 1, 3, 4, generator=generator, dtype=dtype)
    return model.requires_grad_(False), images


# What is exact --------------------------------------------------------------------------------------------------


def test_a_linear_classifier_is_certified_to_the_exact_distance_of_its_boundary():
    model, images = linear_classifier()
    logits = model(images)
    labels = logits.argmax(1)
    W = model[1].weight
    gaps = (logits.gather(1, labels[:, None]) - logits) / (W[labels][:, None] - W[None]).norm(dim=2)
    exact = gaps.nan_to_num(nan=math.inf).amin(1)
    given = certify(model, images, labels, Ball("l2", 0.1))
    for method in ("local", "adjoint", "mixed"):
        assert (given.largest[method] <= exact).all()
        assert (given.largest[method] >= exact * 0.998).all()
    for method in ("naive", "specformer", "lofast"):
        assert (given.largest[method] < exact).all()
        assert (given.largest[method] > 0).all()
    assert torch.equal(given.certified, given.radius >= 0.1)


def test_radius_zero_certifies_exactly_what_is_classified_correctly(models):
    model, (images, labels) = models("smooth"), some_images(60)
    given = certify(model, images, labels, Ball("l2", 0.0), search=False)
    right = model.double()(images.double()).argmax(1) == labels
    model.float()
    assert 20 < int(right.sum()) < 60
    assert torch.equal(given.predicted == labels, right)
    for method in NAMES:
        assert torch.equal(given.certified_by(method), right)


def test_a_misclassified_image_is_never_certified_and_its_radius_is_zero(models):
    model, (images, _) = models("smooth"), some_images(12)
    wrong = (model(images).argmax(1) + 1) % 10
    for radius in (0.0, 0.01, 1.0):
        given = certify(model, images, wrong, Ball("l2", radius), search=radius > 0)
        assert not given.certified.any()
        assert (given.radius == 0).all()


# What is ordered ------------------------------------------------------------------------------------------------

ORDERED = (
    "smooth",
    "norm=layernorm",
    "norm=layerproject",
    "activation=relu",
    "two blocks",
    "local blocks",
    "covit",
)


@pytest.mark.parametrize("name", ORDERED)
def test_lower_bounds_fall_with_the_radius_and_the_families_keep_their_order(name, models):
    steps, (images, labels) = program(models(name)), some_images(5)
    before = None
    for radius in (0.0, 1e-6, 1e-3, 0.02, 0.1, 0.5, 3.0, 50.0):
        given = certify(steps, images, labels, Ball("l2", radius), NAMES, search=False).lower
        size = 1e-9 * (1 + torch.stack(list(given.values())).nan_to_num(posinf=0, neginf=0).abs().amax(0))
        assert all(not lower.isnan().any() for lower in given.values())
        for better, worse in (("mixed", "adjoint"), ("mixed", "local"), ("local", "lofast")):
            assert (given[better] >= given[worse] - size).all(), (better, worse, radius)
        if before is not None:
            assert all((given[method] <= before[method] + size).all() for method in NAMES)
        before = given


def test_an_linf_ball_is_the_l2_ball_around_it_and_the_adjoint_knows_better(models):
    model, (images, labels) = models("smooth"), some_images(4)
    square = certify(model, images, labels, Ball("linf", 0.01), search=False)
    around = certify(model, images, labels, Ball("l2", 0.01 * math.sqrt(64)), search=False)
    for method in NAMES:
        if method in ("adjoint", "mixed"):
            assert (square.lower[method] >= around.lower[method] - 1e-9).all()
        else:
            torch.testing.assert_close(square.lower[method], around.lower[method], rtol=1e-9, atol=1e-9)
    assert (square.lower["adjoint"] > around.lower["adjoint"] + 1e-6).any()


def test_the_first_order_of_an_linf_ball_is_attained_by_an_affine_network():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).double().eval()
    images = torch.rand(3, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = model(images).argmax(1)
    found = certify(model, images, labels, Ball("linf", 0.03, box=False), ("adjoint",), search=False)
    W = model[1].weight.detach()
    for i, label in enumerate(labels):
        for other in set(range(4)) - {int(label)}:
            step = -0.03 * (W[label] - W[other]).sign().view(3, 2, 2)
            logits = model(images[i : i + 1] + step)[0].detach()
            worst = float(logits[label] - logits[other])
            bound = float(found.lower["adjoint"][i, other])
            assert worst - 1e-12 <= bound + 1e-11
            assert bound <= worst + 1e-14, "a bound above what an attack reaches is none"


def test_the_largest_radius_is_certified_and_little_more_is_not(models):
    model, (images, labels) = models("smooth"), some_images(4)
    given = certify(model, images, labels, Ball("l2", 0.05))
    for number in range(4):
        for method in NAMES:
            largest = float(given.largest[method][number])
            if largest > 0:
                one = (images[number : number + 1], labels[number : number + 1])
                there, beyond = (
                    certify(model, *one, Ball("l2", radius), (method,), search=False).certified_by(method)
                    for radius in (largest, largest * 1.01)
                )
                assert there.all()
                assert not beyond.any()


def test_a_radius_does_not_depend_on_where_the_search_starts_and_a_near_start_saves_steps(models):
    images, labels = some_images(4)
    p = prepared_problem(program(models("smooth")), images, labels, ("mixed",))
    losses, asked = losses_of(MIXED, p), []
    wanted = lower_radius(p, losses)
    for factor, most in ((0.0, 18), (1e-9, 18), (0.9, 15), (1.0, 15), (1.1, 18), (1e9, 18)):
        asked.clear()
        found = lower_radius(p, lambda radius: asked.append(1) or losses(radius), wanted * factor)
        torch.testing.assert_close(found, wanted, rtol=1.2e-3, atol=0)
        assert (p.margins > losses(found).total).all(0)[found > 0].all()
        assert len(asked) <= most, factor


def test_the_terms_of_the_best_family_add_up_to_the_fall(models):
    model, (images, labels) = models("two blocks"), some_images(5)
    given = certify(model, images, labels, Ball("l2", 0.02), search=False)
    for number, (method, terms) in enumerate(zip(given.method, given.terms, strict=True)):
        other = int(given.lower[method][number].argmin())
        fall = float(given.margins[number, other] - given.lower[method][number, other])
        assert math.isclose(sum(terms.values()), fall, rel_tol=1e-9)


def test_images_certified_one_at_a_time_have_the_same_verdicts_and_radii(models):
    for name in ("smooth", "local blocks"):
        model, (images, labels) = models(name), some_images(3)
        together = certify(model, images, labels, Ball("l2", 0.03))
        for number in range(3):
            alone = certify(model, images[number : number + 1], labels[number : number + 1], Ball("l2", 0.03))
            assert bool(alone.certified[0]) == bool(together.certified[number])
            for method in NAMES:
                torch.testing.assert_close(
                    alone.largest[method][0], together.largest[method][number], rtol=1e-6, atol=1e-12
                )
                torch.testing.assert_close(
                    alone.lower[method][0], together.lower[method][number], rtol=1e-6, atol=1e-9
                )


def test_a_program_serves_as_well_as_its_model_and_certifying_changes_neither(models):
    model, (images, labels) = models("covit"), some_images(3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    steps = program(model)
    first, second, third = (certify(m, images, labels, Ball("l2", 0.02)) for m in (model, steps, steps))
    for method in NAMES:
        assert torch.equal(first.largest[method], second.largest[method])
        assert torch.equal(second.lower[method], third.lower[method])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_models_of_any_type_are_certified_as_the_function_of_their_stored_weights(dtype):
    model = ViT(TINY, torch.Generator().manual_seed(1)).eval().to(dtype)
    images, labels = some_images(3)
    exact = ViT(TINY).eval().double()
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    given, wanted = (certify(m, images, labels, Ball("l2", 0.1)) for m in (model, exact))
    for method in NAMES:
        assert torch.equal(given.lower[method], wanted.lower[method])
        assert torch.equal(given.largest[method], wanted.largest[method])
    assert all(p.dtype == dtype for p in model.parameters())


# What is refused ------------------------------------------------------------------------------------------------


def refused(error, *given, **settings):
    model, images = linear_classifier()
    arguments = dict(zip(("images", "labels", "ball", "methods"), given, strict=False))
    images = arguments.pop("images", None) if arguments.get("images") is not None else images
    arguments.pop("images", None)
    labels = arguments.pop("labels", None)
    labels = torch.zeros(len(images), dtype=torch.int64) if labels is None else labels
    ball = arguments.pop("ball", None) or Ball("l2", 0.1)
    with pytest.raises(error) as raised:
        certify(model, images, labels, ball, **arguments, **settings)
    assert type(raised.value) in (ConfigError, DataError)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.01, 1.01])
def test_pixels_that_are_not_finite_or_out_of_range_are_one_clear_error(value):
    images = torch.rand(2, 1, 3, 4)
    images[1, 0, 2, 1] = value
    refused(DataError, images)
    if math.isfinite(value):
        model, _ = linear_classifier()
        certify(model, images, torch.zeros(2, dtype=torch.int64), Ball("l2", 0.1, box=False))


@pytest.mark.parametrize(
    "labels",
    [
        torch.tensor([0, 1, 4]), torch.tensor([-1, 0, 1]), torch.tensor([0, 1]), torch.tensor([0, 1, 2, 3]),
        torch.tensor([[0], [1], [2]]), torch.tensor(1), torch.tensor([0.0, 1.0, 2.0]), torch.eye(3, 4),
        torch.tensor([True, False, True]),
    ],
    ids=["too large", "negative", "too few", "too many", "column", "scalar", "floats", "one hot", "booleans"],
)  # fmt: skip
def test_labels_out_of_range_or_of_another_shape_or_kind_are_one_clear_error(labels):
    refused(DataError, torch.rand(3, 1, 3, 4), labels)


def test_no_images_and_unknown_or_no_families_are_one_clear_error():
    refused(DataError, torch.rand(0, 1, 3, 4), torch.zeros(0, dtype=torch.int64))
    refused(ConfigError, torch.rand(2, 1, 3, 4), None, None, ("crown",))
    refused(ConfigError, torch.rand(2, 1, 3, 4), None, None, ("local", "Adjoint"))
    refused(ConfigError, torch.rand(2, 1, 3, 4), None, None, ())


@pytest.mark.parametrize("shape", [(2, 1, 3, 5), (2, 13), (2, 2, 3, 4)])
def test_images_of_another_size_than_the_model_takes_are_one_clear_error(shape):
    refused((ConfigError, DataError), torch.rand(shape))


@pytest.mark.parametrize("labels", [torch.int32, torch.int64, torch.uint8, torch.int16])
def test_whole_numbers_of_any_type_are_labels(labels):
    model, images = linear_classifier()
    wanted = certify(model, images, model(images).argmax(1), Ball("l2", 0.1)).radius
    assert torch.equal(certify(model, images, model(images).argmax(1).to(labels), Ball("l2", 0.1)).radius, wanted)


# Many other classes, bad scales -----------------------------------------------------------------------------------


def sound(model, images, labels, radii=(0.01, 0.3), methods=NAMES, **settings):
    """No margin that is found lies below a lower bound, and no certified image is broken."""
    steps = program(model)
    for radius in radii:
        given = certify(steps, images, labels, Ball("l2", radius, box=False), methods, search=False)
        attacked = attacked_margins(model, images, labels, torch.full((len(images),), radius), **settings)
        size = 1e-11 * (1 + given.margins.nan_to_num(posinf=0).abs().amax(1, keepdim=True))
        for method in methods:
            lower = given.lower[method]
            assert not lower.isnan().any()
            assert (attacked + size >= lower).all(), (method, radius, float((lower - attacked).nan_to_num().max()))
            assert not (given.certified_by(method) & (attacked <= 0).any(1)).any()
    given = certify(steps, images, labels, Ball("l2", radii[0], box=False), methods)
    assert given.radius.isfinite().all()
    for scale in (1.0, 0.99):
        broken = (attacked_margins(model, images, labels, scale * given.radius, **settings) <= 0).any(1)
        assert not (broken & (given.radius > 0)).any()
    return given


def test_more_other_classes_than_are_taken_back_are_certified_soundly():
    model = ViT(replace(TINY, classes=50, pool="mean"), torch.Generator().manual_seed(3)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)
    images, _ = some_images(3)
    labels = model(images).argmax(1)
    given = sound(model, images, labels, (0.02,), starts=1, steps=12)
    assert given.lower["mixed"].shape == (3, 50)
    assert (given.radius > 0).all()
    for better, worse in (("mixed", "adjoint"), ("mixed", "local"), ("local", "lofast")):
        assert (given.lower[better] >= given.lower[worse] - 1e-9).all()


def linear_maps(classes=70):
    """Linear maps one after the other: exact for the adjoint, a product of norms for the local bound.

    What the first map makes large the second makes small, and the other classes of the first image are all
    equally far.
    """
    generator = torch.Generator().manual_seed(4)
    maps = [nn.Linear(12, 9), nn.Linear(9, 9), nn.Linear(9, classes)]
    model = nn.Sequential(nn.Flatten(), *maps).double().eval().requires_grad_(False)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator))
    images = torch.rand(1, 1, 3, 4, generator=generator, dtype=torch.float64).repeat(5, 1, 1, 1)
    images[1:] += 1e-3 * torch.rand(4, 1, 3, 4, generator=generator, dtype=torch.float64)
    maps[0].weight[0] *= 0.1
    maps[1].weight.copy_(torch.diag(torch.tensor([1.0] + [0.01] * 8)))
    maps[2].bias -= model(images[:1])[0]
    maps[2].bias[0] += 1.0
    W = maps[2].weight @ maps[1].weight @ maps[0].weight
    logits = model(images)
    labels = logits.argmax(1)
    gaps = (logits.gather(1, labels[:, None]) - logits) / (W[labels][:, None] - W[None]).norm(dim=2)
    return model, images, labels, gaps.nan_to_num(nan=math.inf).amin(1)


def test_the_adjoint_runs_for_every_other_class_that_the_local_bound_leaves_open_and_for_no_other(monkeypatch):
    model, images, labels, exact = linear_maps()
    asked, part = [], problem.Backward.part
    monkeypatch.setattr(problem.Backward, "part", lambda self, number: asked.append(number) or part(self, number))
    given = certify(model, images, labels, Ball("l2", float(exact.min()) * 0.9), ("local", "adjoint"), search=False)
    left = (given.lower["local"] <= 0).sum(1)
    assert (left > 64).any()  # more than two parts of 32 are open
    assert given.certified_by("adjoint").all()
    assert set(asked) == {0, 1, 2}
    asked.clear()
    given = certify(
        model, images, labels, Ball("l2", float(exact.min()) * 1e-4), ("local", "adjoint"), search=False
    )
    assert given.certified_by("local").all()
    assert set(asked) == {0}
    asked.clear()
    certify(model, images, labels, Ball("l2", float(exact.max()) * 1.1), ("adjoint",), search=False)
    assert set(asked) == {0}  # an image that is lost to one other class is lost


def test_many_other_classes_are_certified_to_the_exact_distance_where_the_network_is_linear():
    model, images, labels, exact = linear_maps()
    given = certify(model, images, labels, Ball("l2", 0.1), ("adjoint", "mixed"))
    for method in ("adjoint", "mixed"):
        assert (given.largest[method] <= exact).all()
        assert (given.largest[method] >= exact * 0.998).all()
    alone = certify(model, images[3:4], labels[3:4], Ball("l2", 0.1), ("adjoint", "mixed"))
    for method in ("adjoint", "mixed"):
        torch.testing.assert_close(alone.lower[method][0], given.lower[method][3], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e2, 1e4])
@pytest.mark.parametrize("name", ["norm=none", "norm=layernorm", "activation=relu", "local blocks"])
def test_badly_scaled_networks_are_certified_soundly(name, scale):
    model = ViT(CONFIGS[name], torch.Generator().manual_seed(5)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    images, _ = some_images(2)
    labels = model.double()(images.double()).argmax(1)
    sound(model.requires_grad_(False), images, labels, (0.05,), starts=1, steps=10)


@pytest.mark.parametrize("part", ["patches", "qkv", "out", "expand", "contract", "head"])
def test_zero_and_rank_one_weights_are_certified_soundly(part, models):
    for rank in (0, 1):
        model = ViT(CONFIGS["mean pool"]).eval()
        model.load_state_dict(models("mean pool").state_dict())
        model.requires_grad_(False)
        for name, p in model.named_parameters():
            if f"{part}." in name and p.ndim >= 2:
                flat = p.flatten(1)
                line = torch.outer(
                    torch.linspace(-0.2, 0.3, flat.shape[0]), torch.linspace(0.4, -0.1, flat.shape[1])
                )
                p.copy_((rank * line).view_as(p))
        images, _ = some_images(2)
        labels = model.double()(images.double()).argmax(1)
        sound(model, images, labels, (0.02,), starts=1, steps=10)


def test_logits_of_width_sixty_are_certified_soundly(models):
    model = ViT(CONFIGS["mean pool"]).eval()
    model.load_state_dict(models("mean pool").state_dict())
    inner = model.blocks[0].attention.branch.inner
    with torch.no_grad():
        inner.qkv.weight[:30] *= 30
    model.requires_grad_(False)
    images, labels = some_images(3)
    sound(model, images, labels, (1e-3, 0.05), starts=1, steps=15)


def test_a_model_that_ends_without_a_linear_layer_is_certified_soundly():
    generator = torch.Generator().manual_seed(2)
    for last in (nn.Tanh(), nn.GELU(), nn.LayerNorm(5)):
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), last).double().eval().requires_grad_(False)
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
        images = torch.rand(3, 1, 3, 4, generator=generator, dtype=torch.float64)
        sound(model, images, model(images).argmax(1), (0.02, 0.5))


def test_mixed_is_never_worse_than_local_where_the_last_layer_is_not_linear():
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.GELU()).double().eval().requires_grad_(False)
    images = torch.rand(3, 1, 3, 4, generator=generator, dtype=torch.float64)
    for radius in (0.1, 5.0):
        given = certify(model, images, model(images).argmax(1), Ball("l2", radius), search=False).lower
        assert (given["mixed"] >= given["local"] - 1e-9).all()


# The sandwich ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_no_image_is_both_certified_and_broken(name, models):
    model, (images, labels) = models(name), some_images()
    right = model(images).argmax(1) == labels
    assert int(right.sum()) >= 4
    given = sound(model, images, labels, (0.02, 0.2))
    assert (given.radius[right] > 0).all()
    assert (given.radius[~right] == 0).all()


@pytest.mark.parametrize("attack", [PGD(steps=10, restarts=2), PGD(steps=10, loss="margin"), APGD(steps=15)])
def test_no_attack_of_ours_breaks_what_is_certified(attack, models):
    model, (images, labels) = models("two blocks"), some_images(24)
    given = certify(model, images, labels, Ball("l2", 0.02, box=False))
    radius = float(given.radius[given.radius > 0].median())
    certified = given.radius >= radius
    assert certified.sum() >= 5
    result = attack(unfuse_attention(model).double(), images.double(), labels, Ball("l2", radius))
    assert not (certified & result.success).any()
    model.float()
