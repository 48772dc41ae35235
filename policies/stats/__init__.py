"""Statistics that the judge folds: one method a file."""
