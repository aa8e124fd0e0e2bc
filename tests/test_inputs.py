"""What users of Python pass is taken as what it means, or refused in one sentence that says what to write."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import specguard
from specguard import FGSM, PGD, Ball, Certificate, ViT, ViTConfig
from specguard.attacks import find_flags
from specguard.certificates import Smoothing, certify_smoothed, program
from specguard.data import Data, Dataset, digits
from specguard.errors import ConfigError, DataError, InputWarning, SpecGuardError, each_warning_once, warn
from specguard.inputs import as_ball, as_images, as_labels, as_samples, as_stream
from specguard.models import Wrapped, convert
from specguard.spectrum import parts
from specguard.train import Training, train

COUNT, CLASSES = 6, 3
BYTES = torch.randint(0, 256, (COUNT, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
IMAGES = BYTES / 255
LABELS = torch.tensor([0, 1, 2, 2, 1, 0])
DATUM = (IMAGES, LABELS)
BALL = Ball("linf", 0.02)
L2 = Ball("l2", 0.05)
RUN = 'write Ball("linf", 0.0313725) or Ball("l2", 0.0313725)'


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A linear classifier, which is certified in no time."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, CLASSES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 10)
    return model.to(dtype).eval()


MODEL = linear()


def array(images: torch.Tensor) -> np.ndarray:
    return images.numpy()


def last(images: torch.Tensor) -> torch.Tensor:
    return images.permute(0, 2, 3, 1).contiguous()


# Images -----------------------------------------------------------------------------------------------------------

SAID = {
    "bytes": "images of uint8 are divided by 255, in float32",
    "last": r"have their channels last; they are taken as permute\(0, 3, 1, 2\)",
}
FIVE = torch.rand(5, 7, 3, generator=torch.Generator().manual_seed(2))
ACCEPTED = {  # (what is passed, what it is taken as, what is said)
    "a tensor": (IMAGES, IMAGES, ()),
    "a tensor in float64": (IMAGES.double(), IMAGES.double(), ()),
    "half precision": (IMAGES.half(), IMAGES.half().float(), ()),
    "bfloat16": (IMAGES.bfloat16(), IMAGES.bfloat16().float(), ()),
    "a tensor with a gradient": (IMAGES.clone().requires_grad_(), IMAGES, ()),
    "bytes": (BYTES, IMAGES, ("bytes",)),
    "an array": (array(IMAGES), IMAGES, ()),
    "an array in float64": (array(IMAGES.double()), IMAGES.double(), ()),
    "an array of bytes": (array(BYTES), IMAGES, ("bytes",)),
    "an array that is read backwards": (array(IMAGES)[::-1], IMAGES.flip(0), ()),
    "an array of the other byte order": (array(IMAGES).astype(">f4"), IMAGES, ()),
    "an array with channels last": (array(last(IMAGES)), IMAGES, ("last",)),
    "bytes with channels last": (array(last(BYTES)), IMAGES, ("bytes", "last")),
    "a list of tensors": (list(IMAGES), IMAGES, ()),
    "a tuple of arrays": (tuple(array(IMAGES)), IMAGES, ()),
    "nested lists": (IMAGES.double().tolist(), IMAGES.double(), ()),
    "pictures": ([Image.fromarray(each) for each in array(last(BYTES))], IMAGES, ("bytes",)),
    "small pictures": ([Image.fromarray(array(last(BYTES))[0, :3, :3])], IMAGES[:1, :, :3, :3], ("bytes",)),
    "a list of tensors of five channels": ([FIVE], FIVE[None], ()),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_images_are_taken_as_they_are_meant(name):
    given, wanted, said = ACCEPTED[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = as_images(given)
    assert torch.equal(found, wanted)
    assert found.dtype == wanted.dtype
    assert not found.requires_grad
    assert all(issubclass(each.category, InputWarning) for each in caught)
    assert len(caught) == len(said)
    for key in said:
        assert any(re.search(SAID[key], str(each.message)) for each in caught)


NORMALIZED = (
    "they seem to be normalized by mean and std: give the pixels in [0, 1], and let the model normalize them: "
    "specguard.models.convert(model, mean=MEAN, std=STD), or for attacks Wrapped(model, MEAN, STD)"
)
LOADERS = (
    'for loaders and data sets write specguard.attack(model, data, "linf", 8 / 255), or certify and evaluate alike'
)
REFUSED = {
    "pixels of 0..255": (IMAGES * 200 + 1, r"found values from 1 to 201: write images / 255"),
    "normalized pixels": ((IMAGES - 0.5) / 0.25, f"found values from -2 to 2: {NORMALIZED}"),
    "beyond the box": (IMAGES + 0.01, "pixels must lie in [0, 1]; found values from 0.01 to 1.01"),
    "NaN": (IMAGES * torch.nan, "images hold values that are not finite: NaN or infinite"),
    "integers": (BYTES.long(), "or uint8 for pixels of 0..255, not int64; convert them first"),
    "an array of integers": (array(BYTES).astype(int), "not int64; convert them first"),
    "booleans": (IMAGES > 0.5, "images must be float32 or float64, not bool"),
    "complex": (IMAGES * 1j, "images must be float32 or float64, not complex64"),
    "a path": ("photos", "images are given as values, not as a path; specguard.data.image_folder reads a folder"),
    "one image": (IMAGES[0, 0, 0], "images need a batch axis: of shape (8,) write images[None]"),
    "a loader": (DataLoader(IMAGES), f"images must be a tensor, an array or a list, not a DataLoader; {LOADERS}"),
    "a picture with a palette": (
        [Image.new("P", (8, 8))],
        "a picture of mode P has no pixels of one or three channels: write convert('RGB')",
    ),
    "nothing": (None, f"images must be a tensor, an array or a list, not a NoneType; {LOADERS}"),
    "a ragged list": ([[0.1, 0.2], [0.3]], "images must be numbers of one shape, which this list is not"),
    "words": (["a", "b"], "images are given as values, not as a path"),
    "several shapes": ([IMAGES[0], IMAGES[0, :1]], "images of one batch must have one shape and one dtype"),
}


def says(error: type[SpecGuardError], sentence: str):
    return pytest.raises(error, match=f"^[^\n]*{re.escape(sentence)}[^\n]*$")


@pytest.mark.parametrize("name", REFUSED)
def test_images_that_mean_nothing_certain_are_refused_in_one_sentence(name):
    given, sentence = REFUSED[name]
    if name == "pixels of 0..255":
        given = (given - given.min()) / (given.max() - given.min()) * 200 + 1
    for call in (
        as_images,
        lambda x: PGD(steps=1)(MODEL, x, LABELS, BALL),
        lambda x: specguard.certify(MODEL, x, LABELS, L2),
    ):
        with says(DataError, sentence):
            call(given)


def test_a_model_that_knows_its_shape_says_where_the_channels_are():
    config = ViTConfig(image=8, patch=4, channels=3, classes=3, dim=8, depth=1, heads=2, mlp_ratio=1.0,
                       mean=(0.5,) * 3, std=(0.5,) * 3)  # fmt: skip
    model = ViT(config, torch.Generator().manual_seed(0)).eval()
    with pytest.warns(InputWarning, match="channels last"):
        found = as_images(last(IMAGES), model=model)
    assert torch.equal(found, IMAGES)


def test_a_tensor_with_channels_last_is_refused_where_the_model_is_any_callable():
    convolution = nn.Sequential(nn.Conv2d(3, 3, 8), nn.Flatten()).eval()
    with says(
        SpecGuardError,
        "the model cannot take images of shape (8, 8, 3) in float32: write images.permute(0, 3, 1, 2)",
    ):
        FGSM(convolution, last(IMAGES), LABELS, BALL)


# Dtypes -----------------------------------------------------------------------------------------------------------


def test_an_attack_on_a_model_in_float32_rounds_images_in_float64_and_says_so():
    exact = IMAGES.double() * (1 - 1e-12)
    with pytest.warns(
        InputWarning, match="images of float64 are rounded to float32, the dtype of the model's weights"
    ):
        found = PGD(steps=2)(MODEL, exact, LABELS, BALL)
    wanted = PGD(steps=2)(MODEL, exact.float(), LABELS, BALL)
    assert torch.equal(found.images, wanted.images)
    assert found.images.dtype == torch.float32


def test_an_attack_on_a_model_in_float64_takes_images_in_float32_as_they_are():
    model = linear(torch.float64)
    found = PGD(steps=2)(model, IMAGES, LABELS, BALL)
    assert torch.equal(found.images, PGD(steps=2)(model, IMAGES.double(), LABELS, BALL).images)


@pytest.mark.parametrize("images", [IMAGES, IMAGES.double() * (1 - 1e-12), array(IMAGES.double() * (1 - 1e-12))])
def test_the_image_that_is_certified_is_the_one_that_is_given(images):
    """Also in float64, with a model in float32: nothing is rounded before a proof."""
    entries = np.asarray(images, np.float64)
    found = specguard.certify(MODEL, images, LABELS, L2, ["local"])
    exact = specguard.certify(linear(torch.float64), torch.from_numpy(entries), LABELS, L2, ["local"])
    assert found.images == exact.images
    assert len(set(found.images)) == COUNT


def test_bytes_are_certified_as_the_images_that_are_attacked():
    with pytest.warns(InputWarning, match="uint8"):
        found = specguard.certify(MODEL, BYTES, LABELS, L2, ["local"])
    assert (
        found.images
        == specguard.certify(MODEL, Dataset(BYTES, LABELS).batch(slice(None))[0], LABELS, L2, ["local"]).images
    )


class Halved(nn.Module):
    """What converts its input itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.half()).float()


def test_a_model_in_half_precision_is_refused_with_what_to_write_unless_it_converts_its_input():
    model = linear(torch.float16)
    with says(SpecGuardError, "in float32: its weights have half precision, so write model.float()"):
        FGSM(model, IMAGES, LABELS, BALL)
    assert FGSM(Halved(model), IMAGES, LABELS, BALL).success.shape == (COUNT,)


def test_a_callable_that_cannot_take_the_dtype_is_one_sentence():
    with says(SpecGuardError, "the model cannot take images of shape (3, 8, 8) in float64"):
        FGSM(lambda x: MODEL(x), IMAGES.double(), LABELS, BALL)


# Labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS.tolist(), tuple(LABELS.tolist()), LABELS.numpy(), LABELS.int(), LABELS.to(torch.uint8),
     list(LABELS.numpy()), list(LABELS), LABELS.numpy().astype(np.int16), LABELS.numpy()[::-1][::-1]],
)  # fmt: skip
def test_whole_numbers_are_labels_whatever_holds_them(labels):
    assert torch.equal(as_labels(labels, COUNT), LABELS)
    assert FGSM(MODEL, IMAGES, labels, BALL).success.shape == (COUNT,)
    assert torch.equal(specguard.certify(MODEL, IMAGES, labels, L2, ["local"]).labels, LABELS)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (LABELS.float(), "labels must be 6 integers, not float32; write labels.long() if they are class numbers"),
        (LABELS.double().tolist(), "labels must be 6 integers, not float64; write labels.long()"),
        (LABELS > 0, "labels must be 6 integers, not bool"),
        (torch.eye(3)[LABELS], "labels must be 6 integers, not of shape (6, 3); write labels.argmax(1) if one-hot"),
        (LABELS[:, None], "labels must be 6 integers, not of shape (6, 1); write labels.squeeze(1)"),
        (LABELS[:4], "labels must be 6 integers, not of shape (4,)"),
        (2, "labels must be 6 integers, not of shape (), one for each image; of a single image they are [2]"),
        (["cat"] * 6, "labels must be a tensor, an array or a list of integers, not a list of other things"),
        ([[1], [1, 2]], "labels must be a tensor, an array or a list of integers"),
        (LABELS - 1, "labels are class numbers from 0 on; found -1"),
    ],
)
def test_labels_that_would_have_to_be_rounded_or_guessed_are_refused(labels, sentence):
    for call in (lambda: FGSM(MODEL, IMAGES, labels, BALL), lambda: specguard.certify(MODEL, IMAGES, labels, L2)):
        with says(DataError, sentence):
            call()


def test_labels_beyond_the_classes_are_refused():
    with says(DataError, "labels must lie in 0..2; found 5"):
        as_labels([0, 5], 2, classes=3)
    for call in (
        lambda: FGSM(MODEL, IMAGES, LABELS + 2, BALL),
        lambda: specguard.certify(MODEL, IMAGES, LABELS + 2, L2),
    ):
        with pytest.raises(DataError, match=r"0\.\.2|out of range for 3 classes"):
            call()


# Balls and the habits of other libraries --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ball",
    [
        ("linf", 0.02),
        ("Linf", 0.02),
        ["LINF", 0.02],
        ("linf", np.float64(0.02)),
        ("linf", torch.tensor(0.02, dtype=torch.float64)),
    ],
)
def test_a_norm_and_a_radius_are_a_ball(ball):
    assert as_ball(ball) == as_ball(*ball) == BALL
    assert torch.equal(
        PGD(steps=1)(MODEL, IMAGES, LABELS, ball).images, PGD(steps=1)(MODEL, IMAGES, LABELS, BALL).images
    )
    assert Ball("L2", 1) == Ball("l2", 1.0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: PGD()(MODEL, IMAGES, LABELS, 8 / 255), f"a radius needs a norm: {RUN}"),
        (lambda: specguard.certify(MODEL, IMAGES, LABELS, 8 / 255), f"a radius needs a norm: {RUN}"),
        (lambda: specguard.attack(MODEL, DATUM, 8 / 255), f"a radius needs a norm: {RUN}"),
        (lambda: specguard.certify(MODEL, *DATUM, "l2", 0.1), 'are one argument here: write Ball("l2", 0.1)'),
        (lambda: specguard.attack(MODEL, *DATUM, BALL), "images and labels are one argument here"),
        (lambda: specguard.attack(MODEL, DATUM, LABELS, 0.1), "norm of a Tensor is unknown"),
        (lambda: PGD()(MODEL, DataLoader(TensorDataset(*DATUM))), "data with labels go to specguard.attack("),
        (lambda: PGD()(MODEL, IMAGES, LABELS, "Linf"), 'a norm needs a radius: write Ball("linf", 8 / 255)'),
        (lambda: specguard.certify(MODEL, DATUM, "l2"), 'a norm needs a radius: write Ball("l2", 8 / 255)'),
        (lambda: PGD()(MODEL, IMAGES, LABELS), 'the perturbations are missing: write Ball("linf", 8 / 255)'),
        (lambda: PGD()(MODEL, IMAGES, LABELS, {"eps": 1}), 'a dict is no ball: write Ball("linf", 8 / 255)'),
        (lambda: Ball("l1", 0.1), "norm 'l1' is unknown; choose one of l2, linf"),
        (lambda: Ball("linf", "8/255"), "a radius is one number such as 8 / 255, not '8/255'"),
        (lambda: Ball("linf", torch.ones(2)), "a radius is one number such as 8 / 255"),
        (lambda: as_ball(BALL, 0.3), "the radius is stated twice: the ball has 0.02, beside 0.3"),
        (
            lambda: PGD(eps=8 / 255),
            "PGD has no argument 'eps': a ball has the radius and the norm, "
            'as in PGD()(model, images, labels, Ball("linf", 0.0313725))',
        ),
        (lambda: PGD(norm="L2", eps=0.5), 'as in PGD()(model, images, labels, Ball("l2", 0.5))'),
        (lambda: PGD(MODEL, eps=8 / 255), "'model': that belongs into the call, as in PGD()(model"),
        (lambda: PGD(epsilon=0.03), "PGD has no argument 'epsilon': a ball has the radius"),
        (lambda: PGD(alpha=2 / 255), "PGD has no argument 'alpha': say step_size, in pixels"),
        (lambda: PGD(rel_stepsize=0.1), "say step_size, in pixels"),
        (lambda: PGD(random_start=True), 'say start="random" or start="center"'),
        (lambda: PGD(step=3), "PGD has no argument 'step'; did you mean 'steps'?"),
        (lambda: specguard.AutoAttack(MODEL, norm="Linf", eps=0.03), "into the call, as in AutoAttack()"),
        (lambda: specguard.Square(n_queries=100), "say queries"),
        (lambda: PGD()(MODEL, IMAGES, LABELS, eps=0.03), "PGD has no argument 'eps': a ball has the radius"),
        (lambda: PGD()(MODEL, IMAGES, LABELS, BALL, n_examples=5), "specguard.attack has n and batch"),
        (lambda: PGD()(IMAGES, LABELS), "a Tensor is no model: write PGD()(model, images, labels, Ball("),
        (lambda: PGD()(MODEL, (IMAGES, LABELS), BALL), "data with labels go to specguard.attack(model, data, ball"),
        (lambda: PGD()(MODEL, IMAGES), "labels are missing: an attack is called as attack(model, images,"),
    ],
)  # fmt: skip
def test_calls_as_other_libraries_have_them_are_answered_with_what_to_write(call, sentence):
    with pytest.raises(SpecGuardError) as raised:
        call()
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert ". " not in str(raised.value)


def test_a_radius_in_units_of_bytes_is_warned_of_by_the_functions_on_data():
    with pytest.warns(InputWarning, match="8/255"):
        specguard.attack(MODEL, (IMAGES, LABELS), "linf", 8, attack="fgsm")


# Data -------------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(zip(IMAGES, LABELS, strict=True))


WHOLE = Dataset(BYTES, LABELS)
DATA = {
    "a pair": lambda: (IMAGES, LABELS),
    "a list of images and labels": lambda: [IMAGES, LABELS],
    "a pair of arrays": lambda: (array(IMAGES), LABELS.numpy()),
    "a pair of lists": lambda: (list(IMAGES), LABELS.tolist()),
    "a loader": lambda: DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4),
    "a loader of whatever comes": lambda: DataLoader(Numbers(), batch_size=4),
    "a torch data set": lambda: TensorDataset(IMAGES, LABELS),
    "an iterable data set": lambda: Numbers(),
    "a list of batches": lambda: [(IMAGES[:4], LABELS[:4]), (IMAGES[4:], LABELS[4:])],
    "the two batches of a loader": lambda: list(DataLoader(TensorDataset(IMAGES, LABELS), batch_size=3)),
    "two batches": lambda: [(IMAGES[:3], LABELS[:3]), (IMAGES[3:], LABELS[3:].tolist())],
    "a generator of batches": lambda: ((x[None], [int(y)]) for x, y in zip(IMAGES, LABELS, strict=True)),
    "a list of samples": lambda: list(zip(IMAGES, LABELS.tolist(), strict=True)),
    "a Dataset": lambda: WHOLE,
    "a Data": lambda: Data("some", WHOLE.select(slice(2)), WHOLE, ("a", "b", "c")),
}


@pytest.mark.parametrize("name", DATA)
def test_whatever_holds_images_with_labels_is_data_and_batches_change_nothing(name):
    images, labels = as_samples(DATA[name]())
    assert torch.equal(images, IMAGES)
    assert torch.equal(labels, LABELS)
    assert torch.equal(as_samples(DATA[name](), n=5)[1], LABELS[:5])
    stream = as_stream(DATA[name](), batch=4)
    chunks = list(stream)
    assert stream.count in (None, COUNT)
    assert max(len(chunk.labels) for chunk in chunks) <= 4
    assert torch.cat([chunk.ids for chunk in chunks]).tolist() == list(range(COUNT))
    wanted = specguard.attack(MODEL, (IMAGES, LABELS), BALL, attack=PGD(steps=2))
    found = specguard.attack(MODEL, DATA[name](), "linf", 0.02, attack=PGD(steps=2), batch=4)
    assert torch.equal(found.adversarial.images, wanted.adversarial.images)
    assert (found.clean, found.robust) == (wanted.clean, wanted.robust)
    certificate = specguard.certify(MODEL, DATA[name](), "l2", 0.05, ["local"], batch=4)
    whole = specguard.certify(MODEL, IMAGES, LABELS, L2, ["local"])
    torch.testing.assert_close(certificate.lower["local"], whole.lower["local"], rtol=1e-12, atol=1e-12)


def test_one_batch_is_in_memory_at_a_time():
    """The second batch is asked for after the first one was worked on."""
    seen: list[int] = []

    def batches():
        for number in range(3):
            seen.append(number)
            yield IMAGES[:2], LABELS[:2]

    done: list[tuple[int, int | None]] = []
    at: list[int] = []
    specguard.attack(
        MODEL, batches(), BALL, attack="fgsm", watch=lambda d, n: (done.append((d, n)), at.append(len(seen)))
    )
    assert done == [(2, None), (4, None), (6, None)]
    assert at == [1, 2, 3]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (IMAGES, "labels are missing: write (images, labels)"),
        ("digits", "data are given as values, not as the name 'digits': write specguard.data.image_folder(PATH)"),
        ({"images": IMAGES}, "a dictionary is no data: batches are pairs (images, labels)"),
        ([{"image": IMAGES, "label": LABELS}], "not a dict; write ((batch[KEY], batch[KEY]) for batch in data)"),
        (DataLoader(IMAGES), "batches are pairs (images, labels), not a Tensor"),
        ([(IMAGES, LABELS, LABELS)], "batches are pairs (images, labels), not a tuple of 3"),
        (3, "a int holds no images with labels; it must be a pair (images, labels), a DataLoader"),
        ([], "the data hold no images"),
        ((IMAGES, LABELS[:2]), "labels must be 6 integers, not of shape (2,)"),
        ([(IMAGES[:4], LABELS), (IMAGES[4:], LABELS)], "of one length, not 4 images with 6 labels"),
        ([(IMAGES, None)] * 3, "and these labels are a NoneType, not a tensor, array or list"),
        ([({"pixels": IMAGES}, LABELS)], "and these images are a dict, not a tensor, array or list"),
    ],
)
def test_data_without_images_and_labels_are_refused_in_one_sentence(data, sentence):
    for call in (specguard.attack, specguard.evaluate, specguard.certify):
        with says(DataError, sentence):
            call(MODEL, data, "l2", 0.05)


def test_labels_beyond_the_images_of_a_batch_are_not_cut_where_few_images_are_asked_for():
    with says(DataError, "of one length, not 6 images with 4 labels"):
        as_samples([(IMAGES, LABELS[:4])], n=3)


def test_bytes_are_divided_in_float32_whatever_the_default_dtype_is():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.warns(InputWarning, match="in float32"):
            found = as_images(BYTES)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert torch.equal(found, IMAGES)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 3.5])
def test_a_device_that_is_not_there_is_one_sentence(device):
    for call in (specguard.attack, specguard.evaluate):
        with says(ConfigError, f"device '{device}' is "):
            call(MODEL, DATUM, BALL, device=device)


def test_a_mask_of_skipped_images_needs_an_entry_for_each():
    with says(DataError, "skip needs one entry for each image, and has 2"):
        specguard.certify(MODEL, IMAGES, LABELS, L2, ["local"], stop_early=True, skip=torch.tensor([True, False]))


@pytest.mark.parametrize("setting", [{"n": 0}, {"n": 2.5}, {"batch": 0}, {"n": True}])
def test_numbers_of_images_are_whole(setting):
    with says(ConfigError, "must be a whole number of at least 1"):
        specguard.attack(MODEL, (IMAGES, LABELS), "l2", 0.05, **setting)


# The mode and the output of a model -------------------------------------------------------------------------------


def test_a_model_in_train_mode_is_said_and_evaluated_in_eval_mode():
    model = nn.Sequential(linear(), nn.Dropout(0.9))
    calls = (
        lambda: FGSM(model, IMAGES, LABELS, BALL),
        lambda: specguard.certify(model, IMAGES, LABELS, L2, ["local"]),
        lambda: specguard.evaluate(model, (IMAGES, LABELS), L2, attack="fgsm", methods=["local"], batch=2),
        lambda: specguard.attack(model, (IMAGES, LABELS), L2, attack="fgsm", batch=2),
        lambda: certify_smoothed(model, IMAGES[0], Smoothing(n0=2, n=2), sample=0),
        lambda: find_flags(model, IMAGES, LABELS, BALL, max_images=1),
    )
    for call in calls:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        said = [str(each.message) for each in caught if "train mode" in str(each.message)]
        assert said == [
            "the model is in train mode; it is evaluated in eval mode, as after model.eval(), and left as it was"
        ]
        assert not any("specguard" in each.filename for each in caught), "a warning names the line of the caller"
        assert all(layer.training for layer in (model, model[1]))
    wanted = specguard.certify(nn.Sequential(linear(), nn.Dropout(0.9)).eval(), IMAGES, LABELS, L2, ["local"])
    with pytest.warns(InputWarning, match="train mode"):
        assert torch.equal(
            specguard.certify(model, IMAGES, LABELS, L2, ["local"]).lower["local"], wanted.lower["local"]
        )
    with says(ConfigError, "is in train mode; proofs are about eval mode"):
        program(model)


def test_a_model_that_returns_probabilities_is_warned_of_and_the_result_says_so():
    for call in (
        lambda m: FGSM(m, IMAGES, LABELS, BALL),
        lambda m: specguard.attack(m, (IMAGES, LABELS), BALL, attack="pgd", batch=2).adversarial,
        lambda m: specguard.evaluate(m, (IMAGES, LABELS), BALL, attack="pgd", methods=(), batch=2),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = call(lambda x: MODEL(x).softmax(1))
        assert [str(each.message) for each in caught] == list(found.warnings)
        assert "seems to return probabilities" in str(caught[0].message)
        assert call(MODEL).warnings == ()


def test_a_warning_of_a_call_is_issued_once_and_again_in_the_next():
    def call():
        with each_warning_once():
            warn("one")
            warn("two")
            warn("one")

    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        assert [str(each.message) for each in caught] == ["one", "two"]


# Models of other libraries ----------------------------------------------------------------------------------------


def small(timm, mean: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=2,
                              num_classes=CLASSES)  # fmt: skip
    model.pretrained_cfg = {"mean": (mean,) * 3, "std": (0.5 if mean else 1.0,) * 3}
    for name, parameter in model.named_parameters():
        if "head" in name:
            nn.init.normal_(parameter)
    return model.eval()


def test_a_model_of_timm_is_certified_as_the_function_that_is_attacked(timm):
    """Of the pixels as they are given: no normalization is put before it, and that is said."""
    model = small(timm)
    with torch.no_grad():
        labels = model(IMAGES).argmax(1)
    with pytest.warns(
        InputWarning, match=r"convert\(model, mean=\(0.5, 0.5, 0.5\), std=\(0.5, 0.5, 0.5\)\)"
    ) as said:
        certificate = specguard.certify(model, IMAGES, labels, Ball("l2", 1e-3), ["zonotope"])
    assert len(said) == 1
    assert torch.equal(certificate.predicted, labels)
    with torch.no_grad():
        logits = model(IMAGES).double()
    margins = logits.gather(1, labels[:, None]) - logits
    others = torch.arange(CLASSES) != labels[:, None]
    torch.testing.assert_close(certificate.margins[others], margins[others], atol=1e-4, rtol=1e-4)
    assert certificate.certified.any()
    with pytest.warns(InputWarning, match="gets pixels in"):
        found = specguard.evaluate(model, (IMAGES, labels), "l2", 1e-3, attack="fgsm", methods=["zonotope"])
    assert found.clean.value == 1
    assert found.certified.count == int(certificate.certified.sum())
    normalized = convert(model)
    assert (
        not torch.equal(normalized(IMAGES).argmax(1), labels)
        or (normalized(IMAGES) - model(IMAGES)).abs().max() > 0.1
    )


def test_nothing_is_said_of_a_model_that_takes_pixels_as_they_are(timm):
    model = small(timm, mean=0.0)
    specguard.attack(model, (IMAGES, LABELS), BALL, attack="fgsm")
    specguard.certify(convert(small(timm)), IMAGES, LABELS, Ball("l2", 1e-3), ["local"])
    specguard.attack(Wrapped(small(timm), (0.5,) * 3, (0.5,) * 3), (IMAGES, LABELS), BALL, attack="fgsm")


def test_normalized_pixels_are_refused_with_what_to_write(timm):
    with says(DataError, NORMALIZED):
        specguard.attack(small(timm), ((IMAGES - 0.5) / 0.5, LABELS), BALL)


def test_what_cannot_be_certified_is_refused_by_name_and_attacked_all_the_same():
    model = nn.Sequential(nn.Conv2d(3, 3, 8), nn.Flatten()).eval()
    for call in (specguard.certify, specguard.evaluate):
        with says(ConfigError, "0 is a Conv2d, for which there is no rule"):
            call(model, (IMAGES, LABELS), "l2", 0.05)
        with says(ConfigError, "a function cannot be certified, since a proof needs layers"):
            call(lambda x: model(x), (IMAGES, LABELS), "l2", 0.05)
    assert specguard.attack(lambda x: model(x), (IMAGES, LABELS), "l2", 0.05).clean.n == COUNT
    assert specguard.evaluate(model, (IMAGES, LABELS), "l2", 0.05, methods=()).certified is None


# The functions on data --------------------------------------------------------------------------------------------


def test_an_evaluation_counts_every_image_once_and_its_parts_are_those_of_attacks_and_certificates():
    found = specguard.evaluate(MODEL, (IMAGES, LABELS), "l2", 0.3, methods=["local", "adjoint"], batch=4)
    attacked = specguard.attack(MODEL, (IMAGES, LABELS), "l2", 0.3)
    certificate = specguard.certify(MODEL, IMAGES, LABELS, Ball("l2", 0.3), ["local", "adjoint"])
    with torch.no_grad():
        clean = MODEL(IMAGES).argmax(1) == LABELS
    assert found.clean.count == attacked.clean.count == int(clean.sum())
    assert found.robust == attacked.robust
    assert list(found.certified_images) == certificate.certified.nonzero()[:, 0].tolist()
    assert list(found.misclassified_images) == attacked.adversarial.success.nonzero()[:, 0].tolist()
    assert sorted(found.certified_images + found.misclassified_images + found.unknown_images) == list(range(COUNT))
    assert found.certified.count <= found.robust.count <= found.clean.count
    assert found.attacks == ("fgsm", "pgd", "cw")


def test_the_worst_case_of_a_suite_is_kept_for_every_image():
    found = specguard.attack(MODEL, (IMAGES, LABELS), "l2", 0.3, attack="full", batch=4)
    with torch.no_grad():
        predicted = MODEL(found.adversarial.images).argmax(1)
    assert torch.equal(found.adversarial.predicted, predicted)
    assert torch.equal(found.adversarial.success, predicted != LABELS)
    assert Ball("l2", 0.3).contains(found.adversarial.images, IMAGES).all()
    assert found.robust.count == int((~found.adversarial.success).sum())
    assert {name for name, _ in found.by_attack} <= {"apgd-ce", "apgd-t", "fab", "square"}
    single = specguard.attack(MODEL, (IMAGES, LABELS), "l2", 0.3, attack=PGD(steps=3), seed=4)
    direct = PGD(steps=3)(MODEL, IMAGES, LABELS, Ball("l2", 0.3), seed=4)
    assert torch.equal(single.adversarial.images, direct.images)
    with says(ConfigError, "attack 'pdg' is unknown"):
        specguard.attack(MODEL, (IMAGES, LABELS), "l2", 0.3, attack="pdg")


def test_certificates_of_batches_are_those_of_all_images_at_once():
    model = program(linear())
    for options in ({"stop_early": True}, {}):
        whole = specguard.certify(model, IMAGES, LABELS, L2, ["local", "adjoint"], **options)
        parted = specguard.certify(model, IMAGES, LABELS, L2, ["local", "adjoint"], batch=4, **options)
        assert isinstance(parted, Certificate)
        for name in ("images", "labels", "predicted", "margins", "certified"):
            one, other = getattr(whole, name), getattr(parted, name)
            assert one == other if isinstance(one, tuple) else torch.equal(one, other)
        for name, lower in whole.lower.items():
            torch.testing.assert_close(parted.lower[name], lower, rtol=1e-12, atol=1e-12)
        assert whole.largest.keys() == parted.largest.keys()
        assert len(parted.failures) == len(whole.failures)
        assert len(parted.proofs) == len(whole.proofs)
        assert {name: count.tolist() for name, count in whole.asked.items()} == {
            name: count.tolist() for name, count in parted.asked.items()
        }
    assert specguard.certify(model, IMAGES, LABELS, L2, "local").lower.keys() == {"local"}
    both = specguard.certify(model, IMAGES, LABELS, [L2, BALL], ["local"], batch=4)
    assert [each.ball for each in both] == [L2, BALL]
    assert (
        specguard.certify(model, (IMAGES, LABELS), L2, methods=["local"], n=2).labels.tolist()
        == LABELS[:2].tolist()
    )


# What is printed --------------------------------------------------------------------------------------------------


def test_results_are_printed_as_short_blocks_without_tensors():
    attacked = FGSM(MODEL, IMAGES, LABELS, BALL)
    results = (
        attacked,
        specguard.certify(MODEL, IMAGES, LABELS, L2, ["local", "adjoint"]),
        specguard.certify(MODEL, IMAGES, LABELS, L2, ["local", "adjoint"], stop_early=True),
        specguard.attack(MODEL, (IMAGES, LABELS), BALL),
        specguard.evaluate(MODEL, (IMAGES, LABELS), BALL),
    )
    for result in results:
        text = repr(result)
        assert text.startswith(type(result).__name__)
        assert "tensor" not in text
        assert f"of {COUNT} images" in text or f"Evaluation of {COUNT}" in text
        assert len(text.splitlines()) <= 6
        assert all(len(line) < 120 for line in text.splitlines())
    assert f"{int(attacked.success.sum())} of 6 images of shape (3, 8, 8) misclassified" in repr(attacked)
    assert "0 of 0 images" in repr(FGSM(MODEL, IMAGES[:0], LABELS[:0], BALL))


# Paths, and the other functions -----------------------------------------------------------------------------------


def test_paths_are_strings_too_and_devices_their_names(tmp_path):
    data = digits()
    few = Data("few", data.test.select(slice(20)), data.test.select(slice(20)), data.classes)
    model = ViT(specguard.preset("tiny", depth=1, dim=8, heads=2), torch.Generator().manual_seed(0))
    run = str(tmp_path / "run")
    train(model, few, run, Training(epochs=1, batch=20), device="cpu")
    loaded = specguard.from_run(run)
    assert torch.equal(loaded(few.test.images), model.eval()(few.test.images))
    for given in (DataLoader(TensorDataset(IMAGES, LABELS)), (IMAGES, LABELS), "digits"):
        with says(ConfigError, "training takes specguard.data, not a"):
            train(model, given, run, Training(epochs=1), device="cpu")


def test_smoothing_and_spectra_take_what_attacks_take():
    settings = Smoothing(n0=5, n=20)
    wanted = certify_smoothed(MODEL, IMAGES[0], settings, sample=0)
    for image in (array(IMAGES[0]), IMAGES[0].tolist(), IMAGES[0].double()):
        assert certify_smoothed(MODEL, image, settings, sample=0) == wanted
    config = ViTConfig(image=8, patch=4, channels=3, classes=3, dim=8, depth=1, heads=2, mlp_ratio=1.0,
                       mean=(0.5,) * 3, std=(0.5,) * 3)  # fmt: skip
    model = ViT(config, torch.Generator().manual_seed(0)).eval()
    assert next(parts(model, array(IMAGES))).at.shape == IMAGES.shape


def test_an_object_with_logits_is_a_model_of_these_functions_too():
    found = specguard.attack(lambda x: SimpleNamespace(logits=MODEL(x)), (IMAGES, LABELS), BALL, attack="pgd")
    assert found.clean.n == COUNT
