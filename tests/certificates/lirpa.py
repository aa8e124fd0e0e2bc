"""A stand-in for auto_LiRPA: its names and signatures, with plain interval bounds instead of CROWN.

It follows a model's operations one by one, as the real one does, knows those that the real one takes, and raises on
any other. Bounds are sound but for rounding, which the guard's tolerance covers; `lie`, where it is set, spoils it.
"""

import operator
import types

import torch
from torch import Tensor, fx, nn

Interval = tuple[Tensor, Tensor]


class PerturbationLpNorm:
    def __init__(self, eps=0, norm=float("inf"), x_L=None, x_U=None):
        self.eps, self.norm = eps, norm


class BoundedTensor(Tensor):
    @staticmethod
    def __new__(cls, x, ptb=None):
        return torch.Tensor._make_subclass(
            cls, x.to(torch.get_default_dtype())
        )  # as the real one's tensors are made

    def __init__(self, x, ptb=None):
        self.ptb = ptb


class _Node:
    pass


def _node(name: str) -> _Node:
    return type(name, (_Node,), {})()


class _Flat(fx.Tracer):
    """Goes into every module but torch's own layers."""

    def is_leaf_module(self, module, name):
        return isinstance(module, nn.Linear | nn.Conv2d | nn.ReLU | nn.Tanh | nn.Identity)


class BoundedModule(nn.Module):
    lie = None  # of the tests: bounds -> bounds
    forward_lie = None

    def __init__(self, model, global_input, bound_opts=None, device="auto", verbose=False, custom_ops=None):
        super().__init__()
        assert torch.get_default_dtype() == torch.float64, "the default type must be float64 while a graph is made"
        self.model = model
        whole = nn.Sequential(model)
        self.graph = _Flat().trace(whole)
        self.traced = fx.GraphModule(whole, self.graph)

    def nodes(self):
        for node in self.graph.nodes:
            if node.target in (operator.pow, torch.pow, "pow", torch.square):
                yield _node("BoundPow")
            else:
                yield _node("BoundOther")

    def forward(self, x):
        out = self.traced(x)
        return out if self.forward_lie is None else self.forward_lie(out)

    def compute_bounds(self, x=None, C=None, method="backward", bound_lower=True, bound_upper=True):
        assert method in ("CROWN", "CROWN-IBP", "IBP")
        (moved,) = x
        plain, ptb = moved.as_subclass(Tensor), moved.ptb
        low, high = Walk(self.traced).run((plain - ptb.eps, plain + ptb.eps))
        middle, reach = (high + low) / 2, (high - low) / 2
        lower = (C @ middle[..., None] - C.abs() @ reach[..., None])[..., 0]
        return (lower if self.lie is None else self.lie(lower)), None


class Walk(fx.Interpreter):
    """Every operation on intervals; an l2 ball lies in the linf ball of the same radius."""

    def call_module(self, target, args, kwargs):
        layer, (x,) = self.fetch_attr(target), args
        if isinstance(layer, nn.Linear | nn.Conv2d):
            middle, reach = layer((x[0] + x[1]) / 2), (x[1] - x[0]) / 2
            positive = _positive(layer)(reach)
            return middle - positive, middle + positive
        assert isinstance(layer, nn.ReLU | nn.Tanh | nn.Identity), type(layer)
        return layer(x[0]), layer(x[1])

    def call_function(self, target, args, kwargs):
        rising = (torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.log, torch.sqrt)
        if target in rising:
            return target(args[0][0]), target(args[0][1])
        if target is operator.getitem:
            return args[0][0][args[1]], args[0][1][args[1]]
        if target is torch.cat:
            parts = [_interval(part) for part in args[0]]
            return torch.cat([p[0] for p in parts], *args[1:]), torch.cat([p[1] for p in parts], *args[1:])
        if target is torch.reciprocal:
            low, high = args[0]
            assert bool((low > 0).all()), "Only positive values are supported in BoundReciprocal"
            return 1 / high, 1 / low
        if target in (operator.add, operator.sub, operator.mul, torch.matmul):
            return _two(target, _interval(args[0]), _interval(args[1]), same=args[0] is args[1])
        raise NotImplementedError(f"{target} is not taken")

    def call_method(self, target, args, kwargs):
        assert target in ("reshape", "transpose", "permute", "sum", "mean"), f"{target} is not taken"
        low, high = args[0]
        return getattr(low, target)(*args[1:], **kwargs), getattr(high, target)(*args[1:], **kwargs)


def _interval(value) -> Interval:
    if isinstance(value, tuple):
        return value
    constant = torch.as_tensor(value)
    return constant, constant


def _two(target, a: Interval, b: Interval, same: bool) -> Interval:
    if target is operator.add:
        return a[0] + b[0], a[1] + b[1]
    if target is operator.sub:
        return a[0] - b[1], a[1] - b[0]
    if target is torch.matmul:
        (ma, ra), (mb, rb) = (((x[0] + x[1]) / 2, (x[1] - x[0]) / 2) for x in (a, b))
        middle, reach = ma @ mb, ma.abs() @ rb + ra @ mb.abs() + ra @ rb
        return middle - reach, middle + reach
    products = torch.stack(torch.broadcast_tensors(*(x * y for x in a for y in b)))
    low, high = products.amin(0), products.amax(0)
    return (low.clamp(min=0) if same else low), high


def _positive(layer):
    weight = layer.weight.abs()
    if isinstance(layer, nn.Linear):
        return lambda reach: reach @ weight.mT
    return lambda reach: nn.functional.conv2d(reach, weight, None, layer.stride, layer.padding)


def stand_in() -> types.ModuleType:
    """A module to put in place of auto_LiRPA, with a class of its own: one test's lies are not another's."""
    module = types.ModuleType("auto_LiRPA")
    module.__version__ = "0.0 (stand-in)"
    module.BoundedModule = type("BoundedModule", (BoundedModule,), {})
    module.BoundedTensor, module.PerturbationLpNorm = BoundedTensor, PerturbationLpNorm
    return module
