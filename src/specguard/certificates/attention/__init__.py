"""The rules of attention: its weights, the layer at a point, bounds on its spread, and its remainder."""
