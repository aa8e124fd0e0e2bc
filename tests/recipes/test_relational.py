"""The networks of the recipe `relational` compute what their files say, and its records are complete and sound."""

import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import nn
from torch.nn.functional import linear, relu

from helpers.documentation import module_of
from relational import networks
from relational.converted import LIBRARIES, converted_vit, initial_vit, trained_vit
from relational.deept import PUBLISHED
from relational.images import first_correct, first_predicted
from relational.measure import Measured, Settings, nearest, run_row
from relational.networks import DIGITS, deept_mnist, digits_vit, vnncomp_vit
from relational.records import ImageRecord, RowSummary
from relational.rows import ADDED, ROWS
from specguard.attacks import APGD
from specguard.certificates import certify, program
from specguard.certificates.methods import ZonotopeMethod
from specguard.certificates.problem import MarginLoss
from specguard.data import Data, Dataset, digits
from specguard.errors import CheckpointError, DataError, SoundnessError, SpecGuardError
from specguard.geometry import Ball
from specguard.nn import ViT, fingerprint, preset
from specguard.records.io import RecordFile, read_json, read_record
from specguard.records.shards import Shard
from specguard.records.store import described, write_tensors
from specguard.records.study import Pending

CASES = int(os.environ.get("SPECGUARD_FUZZ", "200")) // 4
MEAN, STD = (0.3,), (0.5,)
CHANNELS, IMAGE, PATCH, DIM, HEADS, HIDDEN, CLASSES = 1, 8, 4, 21, 3, 11, 6
HEAD_DIM, TOKENS = DIM // HEADS, (IMAGE // PATCH) ** 2 + 1


# ONNX -------------------------------------------------------------------------------------------------------------


class BatchNormalization(OpRun):
    """As ONNX defines it for opset 9 with one output; the reference applies the momentum as if it were training."""

    op_domain = ""

    def _run(self, x, scale, bias, mean, var, epsilon=None, **settings):
        scale, bias, mean, var = (v.reshape(-1, *[1] * (x.ndim - 2)) for v in (scale, bias, mean, var))
        return ((scale * (x - mean) / np.sqrt(var + np.float32(epsilon)) + bias).astype(x.dtype),)


class Builder:
    """The nodes and weights of a graph, written as PyTorch exports a vision transformer of VNN-COMP."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.nodes, self.weights = [], []

    def __call__(self, operation, *inputs, **settings):
        name = f"{operation}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operation, inputs, [name], **settings))
        return name

    def constant(self, value):
        return self("Constant", value=numpy_helper.from_array(np.asarray(value)))

    def weight(self, *shape, least=-1.0):
        name = f"weight_{len(self.weights)}"
        values = self.random.uniform(least, 1, shape).astype(np.float32) / math.sqrt(shape[-1])
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def linear(self, x, inputs, outputs):
        return self("Add", self.weight(outputs), self("MatMul", x, self.weight(inputs, outputs)))

    def norm(self, x, tokens=True):
        parameters = [self.weight(DIM) for _ in range(3)] + [self.weight(DIM, least=0.1)]
        moved = self("Transpose", x, perm=[0, 2, 1]) if tokens else x
        found = self("BatchNormalization", moved, *parameters, epsilon=1e-5, momentum=0.9)
        return self("Transpose", found, perm=[0, 2, 1]) if tokens else found

    def count(self, of):
        return self("Gather", self("Shape", of), self.constant(np.int64(0)), axis=0)

    def sizes(self, count, *others):
        first = self("Unsqueeze", count, axes=[0])
        return self("Concat", first, *(self.constant(np.array([n])) for n in others), axis=0)

    def attention(self, x):
        count = self.count(x)
        flat = [self.linear(x, DIM, DIM) for _ in range(3)]
        q, k, v = (self("Reshape", each, self.sizes(count, -1, HEADS, HEAD_DIM)) for each in flat)
        q, v = (self("Transpose", each, perm=[0, 2, 1, 3]) for each in (q, v))
        logits = self("MatMul", q, self("Transpose", k, perm=[0, 2, 3, 1]))
        scaled = self("Mul", logits, self.constant(np.float32(HEAD_DIM**-0.5)))
        mixed = self("MatMul", self("Softmax", scaled, axis=3), v)
        joined = self("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.linear(self("Reshape", joined, self.sizes(count, -1, DIM)), DIM, DIM)

    def block(self, x):
        x = self("Add", self.attention(self.norm(x)), x)
        hidden = self("Relu", self.linear(self.norm(x), DIM, HIDDEN))
        return self("Add", self.linear(hidden, HIDDEN, DIM), x)

    def embedding(self, x):
        count = self.count(x)
        settings = {"dilations": [1, 1], "group": 1, "pads": [0, 0, 0, 0]}
        kernel = self.weight(DIM, CHANNELS, PATCH, PATCH), self.weight(DIM)
        grid = self("Conv", x, *kernel, kernel_shape=[PATCH, PATCH], strides=[PATCH, PATCH], **settings)
        first = self("Slice", self("Shape", grid), axes=[0], starts=[0], ends=[2])
        flat = self("Reshape", grid, self("Concat", first, self.constant(np.array([-1])), axis=0))
        patches = self("Transpose", flat, perm=[0, 2, 1])
        zeros = numpy_helper.from_array(np.zeros(1, np.float32))
        token = self("ConstantOfShape", self.sizes(count, 1, DIM), value=zeros)
        tokens = self("Concat", self("Add", token, self.weight(DIM)), patches, axis=1)
        return self("Add", tokens, self.weight(TOKENS, DIM))

    def model(self, depth):
        x = self.embedding("input")
        for _ in range(depth):
            x = self.block(x)
        x = self.norm(self("ReduceMean", x, axes=[1], keepdims=0), tokens=False)
        self("Gemm", x, self.weight(CLASSES, DIM), self.weight(CLASSES), alpha=1.0, beta=1.0, transB=1)
        self.nodes[-1].output[0] = "output"
        images = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", CHANNELS, IMAGE, IMAGE])
        logits = helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", CLASSES])
        graph = helper.make_graph(self.nodes, "vit", [images], [logits], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 9)])


def model(depth=1):
    return Builder().model(depth)


def read(proto, folder):
    path = folder / "network.onnx"
    path.write_bytes(proto.SerializeToString())
    return vnncomp_vit(path, MEAN, STD)


def difference(network, proto):
    """The largest, between the network's logits and those of ONNX's own evaluation."""
    x = torch.rand(4, CHANNELS, IMAGE, IMAGE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    normalized = ((x - MEAN[0]) / STD[0]).float().numpy()
    (expected,) = ReferenceEvaluator(proto, new_ops=[BatchNormalization]).run(None, {"input": normalized})
    return float((network(x) - torch.from_numpy(expected)).detach().abs().max())


def refused(proto, folder):
    with pytest.raises(SpecGuardError) as found:
        read(proto, folder)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_network_computes_the_logits_of_its_graph(depth, tmp_path):
    network = read(model(depth), tmp_path)
    assert difference(network, model(depth)) < 2e-6
    assert network.config.depth == depth
    assert not network.training


def test_a_network_of_a_graph_can_be_certified(tmp_path):
    assert program(read(model(), tmp_path)).steps


def test_the_evaluation_that_networks_are_compared_with_tells_graphs_apart(tmp_path):
    other = Builder(seed=1).model(1)
    assert difference(read(model(), tmp_path), other) > 0.01


def nodes_of(proto):
    return [(i, node.op_type) for i, node in enumerate(proto.graph.node)]


@pytest.mark.parametrize(("place", "operation"), nodes_of(model()))
def test_a_graph_with_another_operation_or_setting_is_refused(place, operation, tmp_path):
    changed = model()
    changed.graph.node[place].op_type = "Tanh"
    refused(changed, tmp_path)
    for i, attribute in enumerate(model().graph.node[place].attribute):
        changed = model()
        mine = changed.graph.node[place].attribute[i]
        if attribute.name == "momentum":
            continue
        if attribute.type == onnx.AttributeProto.INTS:
            mine.ints[-1] += 1
        elif attribute.type == onnx.AttributeProto.INT:
            mine.i += 1
        elif attribute.type == onnx.AttributeProto.FLOAT:
            mine.f += 0.5
        else:
            mine.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t) + 1))
        assert "network" in refused(changed, tmp_path)
        unknown = model()
        unknown.graph.node[place].attribute[i].name = "unknown"
        refused(unknown, tmp_path)


@pytest.mark.parametrize(("place", "operation"), nodes_of(model()))
def test_an_operation_with_its_inputs_in_another_order_is_refused_or_means_the_same(place, operation, tmp_path):
    for i in range(1, len(model().graph.node[place].input)):
        changed = model()
        names = changed.graph.node[place].input
        names[i - 1], names[i] = names[i], names[i - 1]
        try:
            network = read(changed, tmp_path)
        except CheckpointError:
            continue
        assert difference(network, changed) < 2e-6


def test_layers_with_different_epsilons_are_refused(tmp_path):
    changed = model()
    norms = [node for node in changed.graph.node if node.op_type == "BatchNormalization"]
    next(a for a in norms[1].attribute if a.name == "epsilon").f = 1e-3
    assert "norm_eps" in refused(changed, tmp_path)


@pytest.mark.parametrize("place", range(len(model().graph.initializer)))
def test_weights_of_another_shape_or_kind_are_refused(place, tmp_path):
    for wrong in ("shape", "dtype", "short", "infinite", "elsewhere", "missing"):
        changed = model()
        tensor = changed.graph.initializer[place]
        values = numpy_helper.to_array(tensor).copy()
        if wrong == "shape":
            tensor.CopyFrom(numpy_helper.from_array(np.concatenate([values, values]), tensor.name))
        elif wrong == "dtype":
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float64), tensor.name))
        elif wrong == "short":
            tensor.dims[0] += 1
        elif wrong == "infinite":
            values.flat[0] = math.inf
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        elif wrong == "elsewhere":
            tensor.data_location = TensorProto.EXTERNAL
        else:
            del changed.graph.initializer[place]
        refused(changed, tmp_path)


def spare_weight(proto):
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(2, np.float32), "spare"))


def spare_node(proto):
    proto.graph.node.append(helper.make_node("Relu", ["output"], ["spare"]))


def second_name(proto):
    proto.graph.initializer.append(proto.graph.initializer[0])


def second_input(proto):
    proto.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [1]))


def second_output(proto):
    proto.graph.output.append(proto.graph.output[0])


def shared_weights(proto):
    norms = [node for node in proto.graph.node if node.op_type == "BatchNormalization"]
    norms[1].input[1] = norms[0].input[1]


def circle(proto):
    proto.graph.node[2].input[0] = "output"


def later_opset(proto):
    proto.opset_import[0].version = 17


def other_domain(proto):
    proto.graph.node[3].domain = "com.example"


def two_outputs(proto):
    proto.graph.node[3].output.append("more")


def negative_variance(proto):
    norm = next(node for node in proto.graph.node if node.op_type == "BatchNormalization")
    place = next(i for i, t in enumerate(proto.graph.initializer) if t.name == norm.input[4])
    tensor = proto.graph.initializer[place]
    tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))


def flat_images(proto):
    del proto.graph.input[0].type.tensor_type.shape.dim[3]


def oblong_images(proto):
    proto.graph.input[0].type.tensor_type.shape.dim[3].dim_value *= 2


def enormous_images(proto):
    for size in proto.graph.input[0].type.tensor_type.shape.dim[2:]:
        size.dim_value = 2**40


def constant_without_tensor(proto):
    node = next(node for node in proto.graph.node if node.op_type == "Constant")
    node.attribute[0].CopyFrom(helper.make_attribute("value", 3))


def skip_of_another_value(proto):
    adds = [node for node in proto.graph.node if node.op_type == "Add"]
    adds[-1].input[1] = adds[1].output[0]


@pytest.mark.parametrize(
    "change",
    [
        spare_weight, spare_node, second_name, second_input, second_output, shared_weights, circle, later_opset,
        other_domain, two_outputs, negative_variance, flat_images, oblong_images, enormous_images,
        constant_without_tensor, skip_of_another_value,
    ],
)  # fmt: skip
def test_a_graph_that_is_no_such_network_gets_one_sentence(change, tmp_path):
    changed = model()
    change(changed)
    refused(changed, tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a graph", model().SerializeToString()[:1000]])
def test_a_file_that_is_no_onnx_graph_gets_one_sentence(content, tmp_path):
    path = tmp_path / "network.onnx"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"network\.onnx is not"):
        vnncomp_vit(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        vnncomp_vit(tmp_path / "none.onnx")


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_file_is_read_as_its_graph_says_or_gets_one_sentence(seed, tmp_path):
    random, content, path = np.random.default_rng(seed), model().SerializeToString(), tmp_path / "network.onnx"
    for _ in range(CASES):
        damaged = bytearray(content)
        for place in random.integers(len(damaged), size=random.integers(1, 4)):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        said = ""
        try:
            assert vnncomp_vit(path, MEAN, STD).shape == (CHANNELS, IMAGE, IMAGE)
        except SpecGuardError as error:
            said = str(error)
        assert "\n" not in said


# DeepT ------------------------------------------------------------------------------------------------------------


def published():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[-1]) for name, shape in PUBLISHED.items()
    }


def deept_logits(w, pixels):
    """The published forward pass, with its own names."""
    x = (pixels - 0.1307) / 0.3081
    patches = x.unfold(2, 7, 7).unfold(3, 7, 7).reshape(len(x), 16, 49)
    x = linear(patches, w["to_patch_embedding.1.weight"], w["to_patch_embedding.1.bias"])
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], 1) + w["pos_embedding"]

    def norm(x, name):
        return (x - x.mean(-1, keepdim=True)) * w[f"{name}.weight"] + w[f"{name}.bias"]

    first, second = "transformer.layers.0.0.fn", "transformer.layers.0.1.fn"
    inner = norm(x, f"{first}.norm")
    q, k, v = (
        linear(inner, w[f"{first}.fn.to_{each}.weight"]).unflatten(-1, (4, 64)).transpose(1, 2) for each in "qkv"
    )
    mixed = ((q @ k.mT) / 8).softmax(-1) @ v
    x = x + linear(
        mixed.transpose(1, 2).flatten(2), w[f"{first}.fn.to_out.0.weight"], w[f"{first}.fn.to_out.0.bias"]
    )
    hidden = relu(linear(norm(x, f"{second}.norm"), w[f"{second}.fn.net.0.weight"], w[f"{second}.fn.net.0.bias"]))
    x = x + linear(hidden, w[f"{second}.fn.net.3.weight"], w[f"{second}.fn.net.3.bias"])
    return linear(norm(x[:, 0], "mlp_head.0"), w["mlp_head.1.weight"], w["mlp_head.1.bias"])


def test_deepts_network_computes_what_its_code_does(tmp_path):
    write_tensors(tmp_path / "w.safetensors", published())
    network = deept_mnist(tmp_path / "w.safetensors")
    x = torch.rand(3, 1, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = deept_logits({name: tensor.double() for name, tensor in published().items()}, x)
    assert torch.allclose(network(x), expected, rtol=0, atol=1e-6)  # the statistics of the pixels are in float32
    assert program(network).steps


def test_other_weights_than_deepts_get_one_sentence(tmp_path):
    wrong = [
        {name: tensor for name, tensor in published().items() if name != "cls_token"},
        published() | {"more": torch.zeros(1)},
        published() | {"cls_token": torch.zeros(64)},
    ]
    for i, tensors in enumerate(wrong):
        path = tmp_path / f"{i}.safetensors"
        write_tensors(path, tensors)
        with pytest.raises(CheckpointError, match=r"is not DeepT's network for MNIST: '(cls_token|more)' is"):
            deept_mnist(path)


# Images -----------------------------------------------------------------------------------------------------------


def brightness(wrong=()):
    """A network that tells dark images from bright ones, and 1200 images, of which some have the `wrong` label."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(1, 2)).double()
    network[1].weight.data, network[1].bias.data = torch.tensor([[-1.0], [1.0]]).double(), torch.zeros(2).double()
    network[1].bias.data[0] = 1.0
    images = (torch.arange(1200) % 2).float().view(-1, 1, 1, 1)
    labels = torch.arange(1200) % 2
    labels[list(wrong)] = 1 - labels[list(wrong)]
    return network, Dataset(images, labels)


def test_the_first_images_that_are_classified_correctly_are_chosen():
    chosen = first_correct(*brightness(wrong=(0, 2, *range(10, 700))), 12)
    assert chosen.indices.tolist() == [1, *range(3, 10), 700, 701, 702, 703]
    assert chosen.labels.tolist() == [i % 2 for i in chosen.indices.tolist()]
    assert chosen.images.flatten().tolist() == chosen.labels.tolist()
    assert chosen.images.dtype == torch.float64


def test_too_few_correct_images_get_one_sentence():
    with pytest.raises(DataError, match="classifies 2 of 1200 images correctly, not 3"):
        first_correct(*brightness(wrong=range(2, 1200)), 3)


def test_the_labels_of_an_untrained_network_are_its_predictions():
    chosen = first_predicted(*brightness(wrong=(0, 1)), 4)
    assert chosen.labels.tolist() == [0, 1, 0, 1]
    assert chosen.indices.tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="1200 images, not 1201"):
        first_predicted(*brightness(), 1201)


# Trained here -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LIBRARIES)
def test_the_stored_weights_are_of_the_converted_network(name, timm):
    trained, initial = converted_vit(name), initial_vit(name)
    assert trained.config == initial.config
    assert fingerprint(trained) != fingerprint(initial)
    assert fingerprint(trained) == fingerprint(converted_vit(name))
    assert torch.equal(trained.normalise.mean, initial.normalise.mean)
    assert trained.head.weight.dtype == torch.float64
    assert program(trained).steps


@pytest.mark.parametrize("name", LIBRARIES)
def test_initial_weights_follow_from_the_seed_alone(name, timm):
    before = torch.random.get_rng_state()
    one, same, other = (fingerprint(initial_vit(name, seed)) for seed in (3, 3, 4))
    assert one == same != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_training_a_converted_network_continues_where_it_was(timm, tmp_path):
    images = torch.randint(256, (128, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    split = Dataset(images, torch.arange(128) % 10)
    data = Data("noise", split, split, tuple("abcdefghij"))
    steps = []
    first = trained_vit("timm", data, tmp_path, lambda progress: steps.append(progress.step))
    again = trained_vit("timm", data, tmp_path, lambda progress: pytest.fail("it was trained already"))
    assert sorted(set(steps)) == list(range(1, 11))
    assert fingerprint(first) == fingerprint(again) != fingerprint(initial_vit("timm").float())


@pytest.mark.parametrize("name", DIGITS)
def test_the_networks_of_digits_are_trained_once(name, tmp_path, monkeypatch):
    short = {each: replace(training, epochs=1) for each, training in DIGITS.items()}
    monkeypatch.setattr(networks, "DIGITS", short)
    first = digits_vit(name, tmp_path)
    again = digits_vit(name, tmp_path, lambda progress: pytest.fail("it was trained already"))
    assert fingerprint(first) == fingerprint(again)
    assert program(first).steps


def test_the_adversarial_training_is_that_of_the_recipe_of_digits():
    recorded = read_json(Path(networks.__file__).parents[1] / "digits_pgd/pgd/result.json")
    assert described(DIGITS["adversarial"]) == {"awp": None} | recorded["settings"]["training"]


# Measured ---------------------------------------------------------------------------------------------------------

BALLS = tuple(
    Ball(norm, 0.0, box=box) for norm, box in (("l2", False), ("linf", False), ("l2", True), ("linf", True))
)
FAST = Settings(
    ZonotopeMethod(symbols=100),
    ("local",),
    APGD(steps=10, restarts=2, loss="margin"),
    APGD(steps=10, loss="margin"),
)


def small():
    """A network with random weights, large enough for attacks, and two images with its predictions."""
    config = preset("tiny", dim=8, depth=1, heads=2)
    network = ViT(config, torch.Generator().manual_seed(1)).double().eval()
    for weight in network.parameters():
        weight.data *= 4 if weight.ndim > 1 else 1
    return network, first_predicted(network, digits().test, 2)


def measured(folder, settings=FAST, balls=BALLS, **given):
    network, chosen = small()
    return run_row("small", network, digits(), chosen, balls, folder, settings, **given)


def stored(folder):
    return RecordFile(folder / "records.jsonl", ImageRecord).read()


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    """The folder of a row that was measured, and its summary."""
    folder = tmp_path_factory.mktemp("row") / "small"
    return folder, measured(folder)


def test_the_records_of_a_row_are_complete(row):
    folder, summary = row
    records = stored(folder)
    network, chosen = small()
    assert [record.sample for record in records] == chosen.indices.tolist() == list(summary.samples)
    assert [record.label for record in records] == chosen.labels.tolist()
    for record in records:
        assert tuple((ball.norm, ball.box) for ball in record.balls) == tuple((b.norm, b.box) for b in BALLS)
        assert record.others["local"] > 0
        for ball in record.balls:
            assert 0 < ball.radius < ball.attacked
            assert ball.lower > 0
            assert ball.checked is not None
            assert math.isclose(sum(ball.limits.values()), 1)
            assert {"input", "rounding"} < ball.limits.keys()
            assert ball.seconds.keys() == {"search", "ball", "attack", "checker", "nearer"}
    assert summary.n == 2
    assert summary.study.about.model == fingerprint(network)
    assert summary.environment.hardware["threads"] >= 1
    for number, ball in enumerate(summary.balls):
        radii = [record.balls[number].radius for record in records]
        assert list(ball.radii) == radii
        assert ball.certified.median == ball.certified.mean == sum(radii) / 2
        assert ball.certified.lower_median == ball.certified.smallest == min(radii)
        assert (ball.proved, ball.broken) == (2, 0)
        assert math.isclose(sum(ball.limits.values()), 1)
        proved = [record.balls[number].checked > 0 for record in records]
        assert ball.checked == sum(proved)


def test_the_radii_of_a_row_are_those_that_certify_finds(row):
    network, chosen = small()
    for ball, of in zip(BALLS, row[1].balls, strict=True):
        found = certify(network, chosen.images, chosen.labels, ball, [FAST.method]).largest["zonotope"]
        assert of.radii == pytest.approx(found.tolist(), rel=1e-6)


def test_an_l2_ball_is_certified_whole_and_attacked_within_the_box(row):
    for record in stored(row[0]):
        whole, _, boxed, _ = record.balls
        assert (whole.radius, whole.lower, whole.limits) == (boxed.radius, boxed.lower, boxed.limits)
        assert boxed.attacked >= boxed.radius
    network, chosen = small()
    for box in (False, True):
        ball = Ball("l2", row[1].balls[0].radii[0], box=box)
        found = certify(network, chosen.images[:1], chosen.labels[:1], ball, [FAST.method], search=False)
        assert float(found.lower["zonotope"].amin()) == pytest.approx(stored(row[0])[0].balls[0].lower, rel=1e-6)


def test_a_row_that_was_stopped_continues_with_the_images_that_are_missing(tmp_path, monkeypatch):
    whole = Measured.image
    taken = []

    def stopping(self, pixels, label, sample, balls):
        taken.append(sample)
        if len(taken) == 2:
            raise KeyboardInterrupt
        return whole(self, pixels, label, sample, balls)

    monkeypatch.setattr(Measured, "image", stopping)
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, balls=BALLS[:1])
    first = stored(tmp_path)
    assert [record.sample for record in first] == taken[:1]
    again = measured(tmp_path, balls=BALLS[:1])
    assert taken == [0, 1, 1]
    assert stored(tmp_path)[:1] == first
    assert again == measured(tmp_path, balls=BALLS[:1])
    assert len(taken) == 3
    with pytest.raises(SpecGuardError, match="holds another study"):
        measured(tmp_path, balls=BALLS[1:2])


def test_two_processes_share_a_row(tmp_path):
    first = measured(tmp_path, balls=BALLS[:1], shard=Shard(0, 2))
    assert isinstance(first, Pending)
    assert measured(tmp_path, balls=BALLS[:1], shard=Shard(1, 2)).n == 2


@dataclass(frozen=True)
class Optimist(ZonotopeMethod):
    """Finds a radius that is far too large; `sure` says whether it holds to it when it is asked again."""

    sure: bool = True

    def search(self, problem, ball):
        return torch.full_like(problem.margins[0], 7.0 if ball.norm == "l2" else 0.9), self.nothing_lost(problem)

    def upper_loss(self, problem, layer_radii):
        return self.nothing_lost(problem) if self.sure else super().upper_loss(problem, layer_radii)

    def nothing_lost(self, problem):
        return MarginLoss(torch.zeros_like(problem.margins), {})


@pytest.mark.parametrize("ball", BALLS, ids=str)
def test_a_certificate_that_an_attack_breaks_stops_the_row(ball, tmp_path):
    with pytest.raises(SoundnessError, match=f"certified by zonotope and broken at {ball.norm} radius"):
        measured(tmp_path, replace(FAST, method=Optimist(symbols=100)), (ball,))
    assert not stored(tmp_path)


def test_a_radius_that_only_the_search_certifies_stops_the_row(tmp_path):
    with pytest.raises(SoundnessError, match="only at times"):
        measured(tmp_path, replace(FAST, method=Optimist(symbols=100, sure=False)), BALLS[:1])


def broken_there(ball):
    ball["broken"] = True


def attacked_within(ball):
    ball["attacked"] = 0.9 * ball["radius"]


@pytest.mark.parametrize("change", [broken_there, attacked_within])
def test_a_record_of_a_broken_certificate_is_refused(change, row, tmp_path):
    for name in ("study.json", "environment.jsonl"):
        (tmp_path / name).write_bytes((row[0] / name).read_bytes())
    lines = [json.loads(line) for line in (row[0] / "records.jsonl").read_text().splitlines()]
    change(lines[1]["balls"][3])
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(
        SoundnessError, match=r"image 1 is certified by zonotope and broken at linf .* within \[0, 1\]"
    ):
        measured(tmp_path)


@pytest.mark.parametrize("truth", [1e-5, 0.03, 0.4, 1.0])
@pytest.mark.parametrize("certified", [0.0, 1e-6])
def test_the_nearest_point_is_found_from_where_none_is(truth, certified):
    asked = []

    def distance(radius):
        asked.append(radius)
        return None if radius < truth else max(truth, 0.9 * radius)

    assert truth <= nearest(distance, certified, 1.0) <= 1.06 * truth
    assert len(asked) < 30
    assert nearest(lambda radius: None, certified, 1.0) is None


COMMITTED = sorted(path for path in Path(networks.__file__).parent.glob("*.json") if path.stem not in ADDED)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_row_says_where_and_how_it_was_measured(path):
    summary, row = read_record(path, RowSummary), ROWS[path.stem]
    assert summary.study.row == path.stem
    assert summary.n == summary.study.about.n == row.images
    assert [(ball.norm, ball.box) for ball in summary.balls] == [(ball.norm, ball.box) for ball in row.balls]
    assert all(ball.broken == 0 and len(ball.radii) == row.images for ball in summary.balls)
    assert summary.environment.hardware["threads"] == 1
    assert summary.environment.versions["torch"]
    assert re.fullmatch(r"[0-9a-f]{40}\+?", summary.environment.commit)


def test_the_page_of_results_names_every_row():
    tables = module_of("tables")
    from published.relational import NETWORKS, relational_records

    assert tables.STUDIES["relational"]
    assert NETWORKS.keys() == ROWS.keys()
    assert relational_records().keys() == {path.stem for path in COMMITTED}
