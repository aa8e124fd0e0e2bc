"""The options of `specguard train`, group by group."""

from pathlib import Path
from typing import Annotated, Literal

from specguard.cli.groups import DATA_HELP
from specguard.cli.options import Options
from specguard.records.base import Norm, setting

ObjectiveName = Literal[
    "standard", "pgd", "trades", "mart", "nfgsm", "emma", "la", "certified", "noise", "consistency"
]


class RunOptions(Options, frozen=True):
    """Where a run lies, and how it is computed."""

    # torchrun takes --run for an abbreviation of an option of its own
    run: Annotated[Path, setting("directory of the run; under torchrun, --run-dir", "--run", "--run-dir")]
    resume: Annotated[bool, setting("continue the run; options not given are the stored ones", "--resume")] = False
    recipe: Annotated[
        str | None,
        setting(
            "options for a purpose, printed: robust-finetune, certifiable, smoothing; those given take precedence"
        ),
    ] = None
    device: Annotated[str, setting("auto, cpu, cuda or cuda:N")] = "auto"
    seed: Annotated[int, setting("seed of all random numbers")] = 0
    checkpoint_steps: Annotated[
        int | None, setting("write a checkpoint also every N steps within an epoch", ge=1)
    ] = None
    tensorboard: Annotated[bool, setting("write the metrics as an event file of TensorBoard too")] = False


class ModelAndDataOptions(Options, frozen=True):
    """What is trained, and on what."""

    model: Annotated[
        str, setting("name from `specguard models`, timm:NAME, torchvision:NAME, hf:FOLDER, or a finished run")
    ] = "tiny"
    set_: Annotated[tuple[str, ...], setting("change a field of the model, as norm=rmsnorm")] = ()
    data: Annotated[str, setting(DATA_HELP)] = "digits"
    data_root: Annotated[Path | None, setting("folder that holds the data set")] = None
    verify_data: Annotated[bool, setting("check the official checksums")] = True


class OptimizationOptions(Options, frozen=True):
    """How weights are updated."""

    epochs: Annotated[int, setting("passes over the data, in whole batches", ge=1)] = 20
    batch: Annotated[int, setting("images per optimizer step", ge=1)] = 128
    accumulate: Annotated[int, setting("parts that a batch is split into", ge=1)] = 1
    optimizer: Annotated[Literal["adamw", "sgd"], setting("optimizer")] = "adamw"
    lr: Annotated[float | None, setting("peak learning rate")] = None
    weight_decay: Annotated[float | None, setting("weight decay")] = None
    momentum: Annotated[float, setting("momentum of sgd")] = 0.9
    schedule: Annotated[Literal["cosine", "onecycle"], setting("learning rate over time")] = "cosine"
    warmup: Annotated[float, setting("epochs of linear warm-up (cosine)")] = 5.0
    sam: Annotated[float | None, setting("rho of sharpness-aware minimization")] = None
    sam_adaptive: Annotated[bool, setting("measure rho relative to the weights")] = False
    awp: Annotated[float | None, setting("gamma of adversarial weight perturbation (pgd, trades, mart, nfgsm)")] = (
        None
    )
    ema: Annotated[float | None, setting("decay of averaged weights, which then are the result")] = None
    clip: Annotated[float, setting("largest norm of the gradient; 0 for no clipping")] = 1.0
    label_smoothing: Annotated[float, setting("fraction of the target spread over all classes")] = 0.0
    precision: Annotated[Literal["float32", "bfloat16"], setting("precision of autocast")] = "float32"
    compile: Annotated[
        Literal["default", "reduce-overhead", "max-autotune"] | None, setting("mode of torch.compile")
    ] = None


class AdversarialOptions(Options, frozen=True):
    """What a batch is trained for."""

    objective: Annotated[ObjectiveName, setting("training objective")] = "standard"
    norm: Annotated[Norm, setting("norm of the perturbations")] = "linf"
    radius: Annotated[str, setting("their radius, in pixels of [0, 1]")] = "8/255"
    inner_steps: Annotated[int, setting("steps of the inner attack (pgd, trades, mart)", ge=1)] = 10
    inner_step_size: Annotated[str | None, setting("its step size, in pixels of [0, 1]")] = None
    ramp: Annotated[float, setting("epochs over which the radius grows linearly")] = 5.0
    clean_fraction: Annotated[float, setting("fraction of a batch that is not attacked (pgd)")] = 0.0
    beta: Annotated[float | None, setting("weight of the divergence (trades, mart)")] = None
    lipschitz: Annotated[
        str,
        setting("Lipschitz constant of all layers before the head, or `local` for T1 at every image (emma, la)"),
    ] = "1"
    temperature: Annotated[float, setting("temperature of the logits (la)")] = 0.75
    offset: Annotated[float, setting("margin offset (la)")] = 2.0
    focus: Annotated[float, setting("focal exponent on (1 - p) (la)")] = 5.0
    input_gradient: Annotated[float, setting("weight of the penalty |d loss / d image|^2")] = 0.0
    validate: Annotated[
        int, setting("training images held out and attacked every epoch to select the best weights", ge=0)
    ] = 0


class NoiseOptions(Options, frozen=True):
    """How a model is trained for `specguard smooth`."""

    sigma: Annotated[float, setting("standard deviation of the noise, in pixels (noise, consistency)")] = 0.25
    noisy_copies: Annotated[int, setting("noisy copies of every image (consistency)", ge=2)] = 2
    consistency: Annotated[
        float, setting("weight of the divergence of their predictions from the mean (consistency)")
    ] = 10.0
    entropy: Annotated[float, setting("weight of the entropy of the mean (consistency)")] = 0.5


class PenaltyOptions(Options, frozen=True):
    """Which singular values are penalized."""

    penalty: Annotated[tuple[Literal["msvp", "spectral"], ...], setting("penalties")] = ()
    lambda_q: Annotated[float, setting("strength of MSVP on W^Q")] = 1e-4
    lambda_k: Annotated[float, setting("strength of MSVP on W^K")] = 1e-4
    lambda_v: Annotated[float, setting("strength of MSVP on W^V")] = 1e-4
    lambda_o: Annotated[float, setting("strength of MSVP on W^O")] = 0.0
    per_head: Annotated[
        bool, setting("penalize the matrix of every head, or of the layer", "--per-head/--per-matrix")
    ] = True
    spectral: Annotated[float, setting("strength of the spectral penalty")] = 1e-4


class AugmentationOptions(Options, frozen=True):
    """How images are augmented."""

    crop: Annotated[int, setting("random crop after padding by this many pixels")] = 0
    flip: Annotated[bool, setting("flip horizontally at random")] = False
    jitter: Annotated[float, setting("strength of random brightness, contrast and saturation")] = 0.0
    hue: Annotated[float, setting("largest random rotation of the hue, in turns")] = 0.0
    mixup: Annotated[float, setting("Beta parameter of mixup; 0 for none")] = 0.0
    cutmix: Annotated[float, setting("Beta parameter of CutMix; 0 for none")] = 0.0
    mix_probability: Annotated[float, setting("probability that a batch is mixed")] = 1.0
