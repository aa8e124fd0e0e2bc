"""The checker's rules of every layer except attention."""
