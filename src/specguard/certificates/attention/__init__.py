"""The rules of attention: its weights, the layer at a point, bounds on the propagated radius, and its remainder."""
