"""The checker's affine forms: enclosures of activations that know which entries move together."""
