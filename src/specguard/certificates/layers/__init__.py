"""Rules of every layer but attention: the layer at a point, how far it spreads a radius, and its adjoint."""
