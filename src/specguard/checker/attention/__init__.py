"""The checker's rules of attention."""
