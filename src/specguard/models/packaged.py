"""The models of the zoo, whose weights are part of the package."""

from specguard.errors import CheckpointError
from specguard.models.run import from_run
from specguard.nn import Classifier, matches_fingerprint
from specguard.records.zoo import PREFIX, zoo_card, zoo_folder


def from_zoo(name: str) -> Classifier:
    """Load a trained model of the zoo, and verify the fingerprint on its card.

    Args:
        name: Its name as `specguard zoo` lists it, with or without `zoo:` before it.

    Returns:
        The model, in eval mode, on the CPU; it takes pixels in [0, 1].

    Example:
        >>> from_zoo("digits-certified").classes
        10
    """
    name = name.removeprefix(PREFIX)
    card, folder = zoo_card(name), zoo_folder(name)
    model = from_run(folder)
    if not matches_fingerprint(model, card.fingerprint):
        raise CheckpointError(f"{folder} does not hold the model of its card: their fingerprints differ")
    return model
