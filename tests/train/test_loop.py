"""The loop minimizes what it says, in every combination of its parts."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from specguard.data import Augmentation, Data, Dataset, digits
from specguard.errors import ConfigError, RunError, TrainingError
from specguard.models import from_run
from specguard.nn import ViT, fingerprint, preset
from specguard.penalties import MSVP, SpectralNorm
from specguard.records.io import read_lines
from specguard.spectrum import exact_weight_spectra
from specguard.train import SAM, SGD, AdamW, Cosine, CrossEntropy, OneCycle, Training, train
from specguard.train.loop import Loop
from specguard.train.state import TrainingState

CPU = torch.device("cpu")
CONFIG = preset("tiny", dim=12, depth=1, heads=2, pool="mean")


@pytest.fixture(scope="module")
def data() -> Data:
    whole = digits()
    some = Dataset(whole.train.images[:200], whole.train.labels[:200])
    return Data("some digits", some, Dataset(whole.test.images[:50], whole.test.labels[:50]), whole.classes)


def model() -> ViT:
    return ViT(CONFIG, torch.Generator().manual_seed(0))


COMBINATIONS = {
    "sgd": {"optimizer": SGD(lr=0.1)},
    "nesterov": {"optimizer": SGD(lr=0.1, nesterov=True)},
    "sgd without momentum": {"optimizer": SGD(lr=0.5, momentum=0.0)},
    "adamw": {"optimizer": AdamW(lr=3e-3)},
    "one cycle": {"schedule": OneCycle()},
    "sam": {"sam": SAM(0.02)},
    "adaptive sam": {"sam": SAM(0.5, adaptive=True)},
    "accumulation": {"accumulate": 3},
    "bf16": {"precision": "bfloat16"},
    "ema": {"ema": 0.5},
    "no clipping": {"clip": None},
    "smoothing": {"objective": CrossEntropy(0.1)},
    "msvp": {"penalties": (MSVP(1e-3, 1e-3, 1e-3, 1e-3),)},
    "two penalties": {"penalties": (MSVP(per_head=False), SpectralNorm(1e-3))},
    "everything": {
        "sam": SAM(), "ema": 0.9, "accumulate": 2, "precision": "bfloat16", "penalties": (MSVP(),),
        "augmentation": Augmentation(crop=1, mixup=0.2), "objective": CrossEntropy(0.05), "checkpoint_steps": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_every_combination_learns(options, data, tmp_path):
    training = Training(epochs=10, batch=40, schedule=Cosine(warmup=0.5), optimizer=AdamW(lr=1e-2))
    train(model(), data, tmp_path / "run", replace(training, **options), device=CPU)
    losses = [r["loss"] for r in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 10
    assert losses[-1] < 0.98 * losses[0]


@pytest.mark.parametrize("norm", ["layernorm", "batchnorm"])
def test_accumulated_gradients_are_the_whole_batchs_and_contain_the_penalty_once(norm, data, tmp_path):
    """For batch norm the parts are normalized apart, so only the other half of the claim is made."""
    gradients = []
    for accumulate in (1, 3):
        training = Training(batch=40, accumulate=accumulate, penalties=(SpectralNorm(0.1),))
        built = ViT(replace(CONFIG, norm=norm), torch.Generator().manual_seed(0))
        loop = Loop(TrainingState(built, training, 5, CPU), training, data, tmp_path, CPU, lambda p: None)
        images, labels = data.train.batch(slice(0, 40))
        loop.gradients(images, torch.nn.functional.one_hot(labels, 10).float())
        gradients.append({n: p.grad.clone() for n, p in built.named_parameters()})
    for name, whole in gradients[0].items():
        close = torch.allclose(whole, gradients[1][name], rtol=1e-4, atol=1e-6)
        assert close or norm == "batchnorm", name


def test_a_step_follows_the_analytic_gradient_of_objective_plus_penalty(data, tmp_path):
    penalty = MSVP(0.3, 0.2, 0.1)
    training = Training(
        batch=40, optimizer=SGD(lr=0.1, momentum=0.0, weight_decay=0.0), clip=None, penalties=(penalty,)
    )
    training = replace(training, schedule=Cosine(warmup=0))
    built, reference = model(), model()
    loop = Loop(TrainingState(built, training, 5, CPU), training, data, tmp_path, CPU, lambda p: None)
    images, labels = data.train.batch(slice(0, 40))
    loop.step(images, torch.nn.functional.one_hot(labels, 10).float())
    loss = cross_entropy(reference(images), labels)
    for layer in reference.modules():
        if hasattr(layer, "qkv"):
            for strength, W in zip((0.3, 0.2, 0.1), layer.qkv.weight.chunk(3), strict=True):
                loss = loss + strength * sum(torch.linalg.svdvals(h)[0] ** 2 for h in W.chunk(layer.heads))
    loss.backward()
    for (name, p), q in zip(built.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach() - 0.1 * q.grad, rtol=2e-3, atol=2e-5, msg=name)


def test_msvp_lowers_the_largest_singular_values(data, tmp_path):
    largest = {}
    for strength in (0.0, 0.5):
        built, training = model(), Training(epochs=8, batch=40, penalties=(MSVP(strength, strength, strength),))
        train(built, data, tmp_path / str(strength), training, device=CPU)
        largest[strength] = max(float(w.values.max()) for w in exact_weight_spectra(built) if w.kind in "qkv")
    assert largest[0.5] < 0.7 * largest[0.0]


def test_strength_zero_is_bit_for_bit_training_without_a_penalty(data, tmp_path):
    runs = []
    for name, penalties in (("without", ()), ("zero", (MSVP(0.0, 0.0, 0.0),))):
        train(model(), data, tmp_path / name, Training(epochs=2, batch=40, penalties=penalties), device=CPU)
        runs.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert runs[0] == runs[1]


def test_the_seed_alone_decides(data, tmp_path):
    contents = []
    for i, (seed, world) in enumerate(((1, 5), (1, 6), (2, 5))):
        torch.manual_seed(world)
        augmentation = Augmentation(crop=1, mixup=0.5)
        train(
            model(),
            data,
            tmp_path / str(i),
            Training(epochs=2, batch=40, augmentation=augmentation, seed=seed),
            device=CPU,
        )
        contents.append((tmp_path / str(i) / "metrics.jsonl").read_bytes())
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


def test_averaged_weights_are_the_exponential_mean_and_the_result(data, tmp_path):
    built, decay = model(), 0.5
    training = Training(batch=40, ema=decay)
    state = TrainingState(built, training, 5, CPU)
    loop = Loop(state, training, data, tmp_path, CPU, lambda p: None)
    images, labels = data.train.batch(slice(0, 40))
    targets = torch.nn.functional.one_hot(labels, 10).float()
    expected = None
    for step in range(12):
        loop.step(images, targets)
        state.step += 1
        now = built.head.weight.detach().clone()
        rate = min(decay, (1 + step) / (10 + step))
        expected = now if expected is None else rate * expected + (1 - rate) * now
    torch.testing.assert_close(state.average.module.head.weight, expected)
    result = train(model(), data, tmp_path / "run", replace(training, epochs=1), device=CPU)
    assert result.weights == "ema"
    assert result.test_accuracy.count == result.metrics.ema_test_correct


@dataclass(frozen=True)
class Recording:
    """An objective that remembers what it was told."""

    def __call__(self, model, images: Tensor, targets: Tensor, context) -> Tensor:
        SEEN.append((context.step, context.progress, torch.rand(1, generator=context.generator).item()))
        return cross_entropy(model(images), targets)


SEEN: list[tuple[int, float, float]] = []


def test_an_objective_learns_where_training_stands_and_gets_fresh_reproducible_randomness(data, tmp_path):
    draws = []
    for name in ("a", "b"):
        SEEN.clear()
        train(model(), data, tmp_path / name, Training(epochs=2, batch=40, objective=Recording()), device=CPU)
        draws.append(list(SEEN))
    assert draws[0] == draws[1]
    steps, progress, random = zip(*draws[0], strict=True)
    assert steps == tuple(range(10))
    assert all(a < b for a, b in pairwise(progress))
    assert progress[0] == 0
    assert len(set(random)) == 10


@dataclass(frozen=True)
class Exploding:
    """An objective that stops being finite at one step."""

    at: int

    def __call__(self, model, images: Tensor, targets: Tensor, context) -> Tensor:
        return cross_entropy(model(images), targets) * (torch.nan if context.step == self.at else 1.0)


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_loss_that_is_not_finite_names_the_step_and_never_reaches_the_disk(at, data, tmp_path):
    training = Training(epochs=3, batch=40, objective=Exploding(at), checkpoint_steps=1)
    with pytest.raises(TrainingError, match=rf"at step {at + 1} of 15"):
        train(model(), data, tmp_path / "run", training, device=CPU)
    losses = [record["loss"] for record in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert losses == [loss for loss in losses if math.isfinite(loss)]
    saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    assert saved == ([f"{at:08d}"] if at else [])


def test_progress_is_told_after_every_step_and_a_record_after_every_epoch(data, tmp_path):
    told = []
    train(model(), data, tmp_path / "run", Training(epochs=2, batch=40), device=CPU, watch=told.append)
    assert [t.step for t in told if t.record is None] == list(range(1, 11))
    assert [t.record.epoch for t in told if t.record] == [1, 2]
    assert {t.steps for t in told} == {10}


def test_a_batch_larger_than_the_data_is_the_data(data, tmp_path):
    result = train(model(), data, tmp_path / "run", Training(epochs=2, batch=1000), device=CPU)
    assert result.metrics.step == 2


def test_data_that_does_not_fit_the_model_is_refused_before_anything_is_written(data, tmp_path):
    for config in (preset("deit_tiny_patch4_32"), replace(CONFIG, classes=11)):
        with pytest.raises(ConfigError):
            train(ViT(config), data, tmp_path / "run", Training(), device=CPU)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 0}, {"batch": 0}, {"accumulate": 0}, {"batch": 2, "accumulate": 3}, {"ema": 1.0}, {"clip": 0.0},
        {"clip": float("nan")}, {"precision": "float16"}, {"compile": "fast"}, {"checkpoint_steps": 0},
        {"compile": "reduce-overhead", "accumulate": 2},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        Training(**options)


def test_a_slow_average_of_a_short_run_is_not_the_start(data, tmp_path):
    training = Training(epochs=12, batch=40, optimizer=AdamW(lr=1e-2), ema=0.9999)
    metrics = train(model(), data, tmp_path / "run", training, device=CPU).metrics
    assert metrics.ema_test_loss < 1.2 * metrics.test_loss


def test_a_batch_is_cut_into_as_many_parts_as_asked_for(data, tmp_path):
    calls = []

    @dataclass(frozen=True)
    class Counting:
        def __call__(self, model, images: Tensor, targets: Tensor, context) -> Tensor:
            calls.append(len(images))
            return cross_entropy(model(images), targets)

    few = Dataset(data.train.images[:10], data.train.labels[:10])
    small = Data("few", few, data.test, data.classes)
    training = Training(epochs=1, batch=5, accumulate=4, objective=Counting())
    train(model(), small, tmp_path / "run", training, device=CPU)
    assert calls == [2, 1, 1, 1] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_precision_comes_back_as_it_was(dtype, data, tmp_path):
    whole = [Dataset(s.images.to(dtype), s.labels) for s in (data.train, data.test)]
    built = model().to(dtype)
    train(built, Data("cast", *whole, data.classes), tmp_path / "run", Training(epochs=1, batch=40), device=CPU)
    assert fingerprint(from_run(tmp_path / "run")) == fingerprint(built)


def test_a_parametrized_model_comes_back_with_plain_weights(data, tmp_path):
    built = model()
    torch.nn.utils.parametrizations.orthogonal(built.head)
    torch.nn.utils.parametrizations.spectral_norm(built.blocks[0].mlp.branch.inner.expand)
    train(built, data, tmp_path / "run", Training(epochs=1, batch=40), device=CPU)
    images = data.test.batch(slice(0, 5))[0]
    torch.testing.assert_close(from_run(tmp_path / "run")(images), built.eval()(images), rtol=0, atol=0)


def test_a_run_without_checkpoint_is_not_resumed_from_other_weights(data, tmp_path):
    def stop(progress) -> None:
        raise KeyboardInterrupt

    training = Training(epochs=2, batch=40)
    with pytest.raises(KeyboardInterrupt):
        train(model(), data, tmp_path / "run", training, device=CPU, watch=stop)
    other = ViT(CONFIG, torch.Generator().manual_seed(1))
    with pytest.raises(RunError, match="initial_weights"):
        train(other, data, tmp_path / "run", training, device=CPU, resume=True)
    train(model(), data, tmp_path / "run", training, device=CPU, resume=True)


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, float("nan")])
def test_label_smoothing_out_of_range_is_refused(smoothing):
    with pytest.raises(ConfigError):
        CrossEntropy(smoothing)
