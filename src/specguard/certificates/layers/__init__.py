"""Rules of every layer except attention: the layer at a point, its propagated radius, and its adjoint."""
