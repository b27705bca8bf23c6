"""The page of recorded runs: ``make_results.py`` writes it."""
